"""`python -m tasks.online`: runs ans_core.stages.online as DVC's stage `online`."""

from tasks.runner import main

if __name__ == "__main__":
    main("online")
