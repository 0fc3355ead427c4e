import io

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from tqdm import tqdm

from flows import progress
from tasks.ports import free_port


def test_a_bar_of_tqdm_tells_percent_and_what_is_done() -> None:
    drawn = io.StringIO()
    bar = tqdm(total=200, desc="sft", file=drawn, ncols=120)
    bar.update(90)
    bar.set_postfix_str("loss 0.2")
    bar.close()
    percent, said = progress.state_of(drawn.getvalue().split("\r")[-1]) or (0.0, "")
    assert percent == 45.0
    assert said.startswith("sft 90/200 [")
    assert said.endswith("loss 0.2]")


@pytest.mark.parametrize(
    "line",
    ["", "stage 1 of 12: prepare (0:00 elapsed)", "45% of it", "read: 12 records [00:01, 9.87 records/s]"],
)
def test_other_lines_tell_no_progress(line: str) -> None:
    assert progress.state_of(line) is None


def test_keys_are_what_prefect_allows() -> None:
    assert [progress.key_of(name) for name in ("evaluate@rl", "judge_questions")] == [
        "evaluate-rl",
        "judge-questions",
    ]


@pytest.mark.slow
def test_a_stage_runs_and_is_heard_while_the_server_is_away() -> None:
    lines: list[str] = []
    with (
        temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}),
        progress.shown("sft", lines.append) as say,
    ):
        say("sft:  45%|####     | 90/200 [12:33<15:20, loss=0.2]")
    assert len(lines) == 1
