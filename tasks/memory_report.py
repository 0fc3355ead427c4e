"""`python -m tasks.memory_report`: runs ans_core.stages.memory_report as DVC's stage `memory_report`."""

from tasks.runner import main

if __name__ == "__main__":
    main("memory_report")
