"""`python -m tasks.rl`: runs ans_core.stages.rl as DVC's stage `rl`."""

from tasks.runner import main

if __name__ == "__main__":
    main("rl")
