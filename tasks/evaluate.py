"""`python -m tasks.evaluate ROW`: runs ans_core.stages.evaluate on one checkpoint as DVC's stage
`evaluate@ROW`."""

from tasks.runner import main

if __name__ == "__main__":
    main("evaluate")
