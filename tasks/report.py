"""`python -m tasks.report`: runs ans_core.stages.report as DVC's stage `report`."""

from tasks.runner import main

if __name__ == "__main__":
    main("report")
