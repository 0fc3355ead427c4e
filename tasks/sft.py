"""`python -m tasks.sft`: runs ans_core.stages.sft as DVC's stage `sft`."""

from tasks.runner import main

if __name__ == "__main__":
    main("sft")
