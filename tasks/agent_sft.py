"""`python -m tasks.agent_sft ROW`: runs ans_core.stages.agent_sft as DVC's stage `agent_sft@ROW`."""

from tasks.runner import main

if __name__ == "__main__":
    main("agent_sft")
