"""perf/wordless.py's arithmetic, and the files that its --add assembles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import wordless
from perf.wordless import CEILING, FULL, LOOP1, METRICS

EXACT = "region_caption/test/exact_match"


def row(value: float, **changed: float) -> dict[str, float]:
    return dict.fromkeys((m for m in METRICS if m != CEILING), value) | changed


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(wordless, "RESULTS", tmp_path)
    return tmp_path


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def cells(table: str, first: str) -> list[list[str]]:
    """Return the cells after the first of every line that begins with `first`."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [found[1:] for found in lines if found[0] == first]


def test_a_share_is_what_is_closed_of_the_way_to_the_full_result():
    assert wordless.share(0.5, 0.6, 0.9) == pytest.approx(0.25)
    assert wordless.share(0.5, 0.4, 0.9) == pytest.approx(-0.25)
    assert wordless.share(0.9, 0.95, 0.9) is None
    assert wordless.share(0.9, 0.95, 0.8) is None


def test_the_tables_hold_means_gains_and_shares_paired_by_seed(results: Path):
    starts, reached, full, ceilings = (0.5, 0.6), (0.7, 0.65), (0.9, 0.8), (1.0, 0.7)
    for seed in (0, 1):
        rows = {
            "sft": row(starts[seed], **{CEILING: ceilings[seed]}),
            "rl, kl 0.2": row(reached[seed]),
            "further sft": row(starts[seed]),
        }
        if seed == 0:
            rows["rl, kl 1"] = row(0.1)  # seed 1 has no such row: it is left out
        write(results / f"some-seed{seed}.json", rows)
        write(
            results / f"tiny-test-seed{seed}.json",
            {"sft": row(full[seed], **{CEILING: 0.95}), "rl": row(1.0)},
        )
    found = wordless.table(wordless.seeds_of("some"))
    assert found.splitlines()[:3] == [
        "seeds [0, 1]",
        "",
        "| metric | sft | rl, kl 0.2 | further sft | sft, all captions |",
    ]
    means, gains, shares = cells(found, LOOP1)
    assert means == ["0.550 ± 0.071", "0.675 ± 0.035", "0.550 ± 0.071", "0.850 ± 0.071"]
    assert gains == ["+0.200 / +0.050", "+0.000 / +0.000"]
    assert shares == ["0.50 / 0.25 (mean 0.38)", "0.00 / 0.00 (mean 0.00)"]  # .2 of .4, .05 of .2
    # .2 of .5, .05 of .1
    assert cells(found, f"{LOOP1}, gap to IoU_of_truth")[0][0] == "0.40 / 0.50 (mean 0.45)"
    assert cells(found, CEILING) == [["0.850 ± 0.212", "-", "-", "0.950 ± 0.000"]]


def test_a_file_with_its_own_row_of_all_captions_needs_no_other_file(results: Path):
    write(
        results / "some-seed4.json",
        {"sft": row(0.5, **{CEILING: 0.7}), "rl, 300 steps": row(0.6), FULL: row(0.5, **{EXACT: 0.7})},
    )
    found = wordless.table(wordless.seeds_of("some"))
    assert cells(found, LOOP1)[2] == ["-"]  # SFT with all captions is no better: there is no gap
    assert cells(found, EXACT)[2] == ["0.50"]


def test_missing_files_are_named(results: Path):
    with pytest.raises(SystemExit, match=r"some-seed\*.json: no such file; make one with --add some"):
        wordless.seeds_of("some")
    write(results / "some-seed3.json", {"rl": row(0.5)})
    with pytest.raises(SystemExit, match=r"no row 'sft'; it has \['rl'\]"):
        wordless.seeds_of("some")
    write(results / "some-seed3.json", {"sft": row(0.5)})
    with pytest.raises(SystemExit, match=r"tiny-test-seed3\.json is missing"):
        wordless.seeds_of("some")


def test_add_assembles_a_file_from_a_summary_and_a_result_of_further_sft(results: Path):
    summary = write(
        results / "summary.json", {"untrained": {}, "sft": row(0.5, **{CEILING: 0.7}), "rl": row(0.6)}
    )
    further = write(results / "some-test-further-seed2.json", row(0.7))
    wordless.add("some", "sft", summary, 2)
    wordless.add("some", "rl, kl 0.2", summary, 2)
    wordless.add("some", "rl, kl 0.2", summary, 2)  # once more: it is replaced
    path = wordless.add("some", "further sft", further, wordless.seed_of(further))
    assert path == results / "some-seed2.json"
    assert json.loads(path.read_text()) == {
        "sft": row(0.5, **{CEILING: 0.7}),
        "rl, kl 0.2": row(0.6),
        "further sft": row(0.7),
    }


def test_add_refuses_a_row_that_the_file_does_not_hold_and_metrics_of_another_split(results: Path):
    summary = write(
        results / "summary.json", {"untrained": {}, "sft": {"loop1/val/IoU": 0.5}, "rl": row(0.6)}
    )
    further = write(results / "some-test-further-seed2.json", row(0.7))
    with pytest.raises(SystemExit, match=r"no row 'further sft'; it has \['rl', 'sft', 'untrained'\]"):
        wordless.add("some", "further sft", summary, 2)
    with pytest.raises(SystemExit, match=r"no row 'rl'; it has \['further sft'\]"):
        wordless.add("some", "rl, kl 0.2", further, 2)
    with pytest.raises(SystemExit, match=r"the row for 'sft' has no \['loop1/test/IoU'.*evaluate.split=test"):
        wordless.add("some", "sft", summary, 2)
    assert not (results / "some-seed2.json").exists()


def test_the_seed_is_that_of_the_files_name_or_of_the_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(wordless, "load", lambda path: type("Settings", (), {"seed": 7}))
    assert wordless.seed_of(Path("perf/results/tiny-test-further-seed12.json")) == 12
    assert wordless.seed_of(Path("metrics/summary.json")) == 7
