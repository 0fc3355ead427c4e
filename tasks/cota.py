"""`python -m tasks.cota`: runs ans_core.stages.cota as DVC's stage `cota`."""

from tasks.runner import main

if __name__ == "__main__":
    main("cota")
