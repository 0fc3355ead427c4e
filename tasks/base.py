"""`python -m tasks.base`: runs ans_core.stages.base as DVC's stage `base`."""

from tasks.runner import main

if __name__ == "__main__":
    main("base")
