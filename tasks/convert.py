"""`python -m tasks.convert`: runs ans_core.stages.convert as DVC's stage `convert`."""

from tasks.runner import main

if __name__ == "__main__":
    main("convert")
