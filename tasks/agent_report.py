"""`python -m tasks.agent_report`: runs ans_core.stages.agent_report as DVC's stage `agent_report`."""

from tasks.runner import main

if __name__ == "__main__":
    main("agent_report")
