"""`python -m tasks.judge_questions`: runs ans_core.stages.judge_questions as DVC's stage
`judge_questions`."""

from tasks.runner import main

if __name__ == "__main__":
    main("judge_questions")
