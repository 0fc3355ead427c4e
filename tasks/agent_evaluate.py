"""`python -m tasks.agent_evaluate ROW`: runs ans_core.stages.agent_evaluate as DVC's stage
`agent_evaluate@ROW`."""

from tasks.runner import main

if __name__ == "__main__":
    main("agent_evaluate")
