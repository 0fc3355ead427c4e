"""`python -m tasks.rft`: runs ans_core.stages.rft as DVC's stage `rft`."""

from tasks.runner import main

if __name__ == "__main__":
    main("rft")
