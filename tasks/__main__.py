"""`python -m tasks STAGE`: runs a stage of tasks/stages.py as DVC does."""

from tasks.runner import main

if __name__ == "__main__":
    main()
