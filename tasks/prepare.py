"""`python -m tasks.prepare`: runs ans_core.stages.prepare as DVC's stage `prepare`."""

from tasks.runner import main

if __name__ == "__main__":
    main("prepare")
