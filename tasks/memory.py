"""`python -m tasks.memory`: runs ans_core.stages.memory as DVC's stage `memory`."""

from tasks.runner import main

if __name__ == "__main__":
    main("memory")
