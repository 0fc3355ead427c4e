"""Traces: how they are mixed, what of them is a target, and what the reader refuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import ExifTags, Image

from ans_core.agent import protocol, rows
from ans_core.agent.episode import Episode, Toolbox
from ans_core.agent.workspace import Workspace
from ans_core.agent.world import FAMILIES, draw_question
from ans_core.agent.world.bank import QuestionBank
from ans_core.agent.world.trace_file import SHARES, Trace, check_mix, mix, read_traces, readers_of
from ans_core.agent.world.traces import kinds_of, trace, write_synthetic_traces
from ans_core.model.network import Network
from ans_core.stages.cota import warn_of_lost
from flows import cli


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, toolbox: Toolbox) -> Path:
    folder = tmp_path_factory.mktemp("traces")
    written = write_synthetic_traces(
        folder,
        QuestionBank(("easy", "pattern", "text"), seed=2, tile=toolbox.tile),
        {"easy": 20, "pattern": 24, "text": 16},
        split="train",
        toolbox=toolbox,
        provenance={"ocr": "template"},
    )
    assert written.kinds.total() + written.dropped.total() == 60
    assert written.dropped.total() <= 4
    assert set(written.dropped) <= {"text/wrong_conclusion", "text/call_failed"}
    return folder


def test_kinds_are_60_20_20_of_what_needs_an_operation_and_the_rest_is_golden() -> None:
    families = [family for family in FAMILIES for _ in range(20)]
    kinds = kinds_of(families)
    operated = [kind for kind, family in zip(kinds, families, strict=True) if family != "easy"]
    assert Counter(operated) == {"golden": 48, "trap": 16, "self_correction": 16}
    assert Counter(kinds) == {"golden": 68, "trap": 16, "self_correction": 16}
    by_family = Counter(family for kind, family in zip(kinds, families, strict=True) if kind == "trap")
    assert set(by_family.values()) == {4}
    assert kinds_of(["easy"] * 3) == ["golden"] * 3


@pytest.mark.slow
def test_what_is_written_is_read_and_keeps_its_mix(folder: Path) -> None:
    traces = read_traces(folder)
    operated = [t for t in traces if t.family != "easy"]
    wanted = kinds_of([t.family or "" for t in traces])
    wanted = [kind for kind, t in zip(wanted, traces, strict=True) if t.family != "easy"]
    check_mix(operated, wanted)
    assert mix(operated) == pytest.approx(SHARES, abs=0.05)
    assert {t.provenance["source"] for t in traces} == {"drawn"}
    with pytest.raises(ValueError, match=r"instead of 0\.20"):
        check_mix([t for t in operated if t.kind != "trap"], wanted)
    with pytest.raises(
        ValueError, match=f"no trace is left of {len(wanted)} questions that need an operation"
    ):
        check_mix([], wanted)


@pytest.mark.slow
def test_who_read_the_text_is_known_of_traces_that_read_some(folder: Path) -> None:
    traces = read_traces(folder)
    assert readers_of(traces) == {"template"}
    assert readers_of(rows.direct(t) for t in traces if t.kind != "trap") == set()
    assert readers_of(t for t in traces if t.family != "text") == set()
    assert readers_of(t.model_copy(update={"provenance": {"source": "mine"}}) for t in traces) == set()


def test_nothing_is_overwritten_and_an_empty_result_is_an_error(
    folder: Path, tmp_path: Path, tiny_model: Network
) -> None:
    with Toolbox(tiny_model) as toolbox:  # untrained: its masks answer nothing

        def write(where: Path) -> object:
            bank = QuestionBank(["larger"], seed=0, tile=toolbox.tile)
            return write_synthetic_traces(
                where, bank, {"larger": 2}, split="train", toolbox=toolbox, provenance={}
            )

        with pytest.raises(ValueError, match="exists; write into another folder"):
            write(folder)
        with pytest.raises(ValueError, match=r"no trace is left of 2 questions; dropped: \{'larger/"):
            write(tmp_path)
    assert not (tmp_path / "traces.jsonl").exists()


def test_ans_data_check_reads_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = cli.parse(["data", "check", str(folder), "--format", "traces"])
    assert arguments.function(arguments) == 0
    assert "60 traces (golden 0.73, trap 0.13, self_correction 0.13)" in capsys.readouterr().out


def test_traps_are_no_targets_and_of_a_correction_only_the_last_call_and_the_answer_are(folder: Path) -> None:
    seen = set()
    for t in read_traces(folder):
        said = [turn for turn in t.turns if turn.role == "assistant"]
        flags = [turn.trainable for turn in said]
        seen.add((t.kind, t.family))
        if t.kind == "trap":
            assert not any(flags)
            assert t.final_answer != t.answer
            assert t.fault == "perceptual"
        elif t.kind == "golden":
            assert all(flags)
            assert t.final_answer == t.answer
        else:
            assert flags == [False] * (len(said) - 2) + [True, True]
            assert said[1].text.startswith("That is not the ")
        assert not any(turn.trainable for turn in t.turns if turn.role == "user")
    assert {kind for kind, family in seen if family == "pattern"} == set(SHARES)


def test_observations_are_what_the_operations_give_again(folder: Path, toolbox: Toolbox) -> None:
    """Text and pixels, from the stored native picture."""
    for t in read_traces(folder)[::6]:
        episode = Episode(toolbox, Workspace.of([folder / frame for frame in t.frames]))
        for said, came in zip(t.turns[1:-1:2], t.turns[2::2], strict=True):
            observation = episode.turn(said.text)
            assert observation is not None
            assert observation.turn() == came.text
            for name, file in zip(observation.pictures, came.pictures, strict=True):
                assert (
                    episode.workspace.picture(name, least=toolbox.tile).tobytes()
                    == Image.open(folder / file).tobytes()
                )


@pytest.mark.parametrize("kind", ["golden", "self_correction"])
def test_a_plan_of_four_calls_or_more_is_hard(toolbox: Toolbox, kind: Any) -> None:
    """As a family of one's own may have; with the call about another thing there are six."""
    question = draw_question("pattern", seed=0, split="train", index=0, tile=64)
    found = trace(replace(question, plan=question.plan * 5), kind, toolbox, seed=0, provenance={})
    assert not isinstance(found, str)
    assert found[0].difficulty == "hard"
    assert sum("<tool_call>" in turn.text for turn in found[0].turns) == (
        6 if kind == "self_correction" else 5
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", ["larger", "moves"])
@pytest.mark.parametrize("kind", SHARES)
def test_traces_of_families_that_need_masks(
    tiny_model: Network, colour_sam: None, family: str, kind: Any
) -> None:
    with Toolbox(tiny_model) as toolbox:
        made = [
            trace(
                draw_question(family, seed=0, split="train", index=i, tile=96),
                kind,
                toolbox,
                seed=0,
                provenance={},
            )
            for i in range(3)
        ]
    kept = [found[0] for found in made if not isinstance(found, str)]
    assert len(kept) == 3
    for t in kept:
        assert (t.fault == "logical") == (kind == "trap")
        assert t.difficulty == {"larger": "hard", "moves": "medium"}[family]
        last = protocol.parse(t.turns[-3].text)[1]
        assert last is not None
        if family == "moves":
            assert last.arguments == {"mask": "mask_2" if kind == "self_correction" else "mask_1"}


@pytest.mark.slow
def test_a_trace_whose_observations_do_not_give_the_answer_is_dropped(tiny_model: Network) -> None:
    """An untrained model's masks: the filter's rules, not the scene, decide."""
    with Toolbox(tiny_model) as toolbox:
        found = [
            trace(
                draw_question("larger", seed=0, split="train", index=i, tile=64),
                "golden",
                toolbox,
                seed=0,
                provenance={},
            )
            for i in range(4)
        ]
    assert set(found) <= {"call_failed", "wrong_conclusion", "no_evidence"}


GOLDEN: dict[str, Any] = {
    "trace_id": "mine/1",
    "kind": "golden",
    "question": "Which pattern is on the red square?",
    "answer": "checked",
    "frames": ["1.png"],
    "turns": [
        {"role": "user", "text": "<image>\nWhich pattern is on the red square?", "pictures": ["1.png"]},
        {
            "role": "assistant",
            "text": protocol.call_text(
                protocol.Call(name="zoom_in", arguments={"bbox_2d": [0, 0, 500, 500]})
            ),
            "trainable": True,
        },
        {"role": "user", "text": "<image>\nimage_2: [0, 0, 500, 500]", "pictures": ["2.png"]},
        {"role": "assistant", "text": "Checked.", "trainable": True},
    ],
    "provenance": {"source": "by hand"},
}


def called(record: dict[str, Any], name: str, **arguments: object) -> None:
    """Put another call into the place of the first."""
    record["turns"][1]["text"] = protocol.call_text(protocol.Call(name=name, arguments=arguments))


def read(folder: Path, *records: dict[str, Any]) -> list[Trace]:
    for name in ("1.png", "2.png"):
        Image.new("RGB", (40, 30)).save(folder / name)
    (folder / "traces.jsonl").write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return read_traces(folder)


def test_a_trace_written_by_hand_is_read(tmp_path: Path) -> None:
    (found,) = read(tmp_path, GOLDEN)
    assert (found.final_answer, found.kind, len(found.turns)) == ("Checked.", "golden", 4)


def test_a_call_names_what_an_earlier_turn_told_of(tmp_path: Path) -> None:
    """In a clip: a mask, its track, a frame, and a box of that frame, which is smaller than 8 pixels as one
    of image_1 would be."""
    calls: list[tuple[str, dict[str, Any], str]] = [
        ("segment_object_at", {"point_2d": [500, 500]}, "mask_1: [0, 0, 500, 500]"),
        ("track_object", {"mask": "mask_1"}, "track_1: right"),
        ("select_frames", {"frames": [1]}, "image_2: frame 1"),
        ("zoom_in", {"bbox_2d": [0, 0, 100, 100], "image": "image_2"}, "image_3: [0, 0, 100, 100]"),
    ]
    turns = [GOLDEN["turns"][0]]
    for name, arguments, told in calls:
        turns.append(
            {
                "role": "assistant",
                "text": protocol.call_text(protocol.Call(name=name, arguments=arguments)),
                "trainable": True,
            }
        )
        turns.append({"role": "user", "text": told})
    record = GOLDEN | {"frames": ["1.png", "2.png"], "turns": [*turns, GOLDEN["turns"][3]]}
    assert len(read(tmp_path, record)) == 1
    record["turns"][6]["text"] = "frame 1"
    with pytest.raises(
        ValueError, match=r"turn 7: no turn before it tells of 'image_2'; there is image_1, mask_1, track_1"
    ):
        read(tmp_path, record)
    called(record, "select_frames", frames=[2])
    with pytest.raises(ValueError, match=r"turn 1: frames \[2\]: the clip has frames 0 to 1"):
        read(tmp_path, record)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda r: r.update(colour="red"), "colour: Extra inputs"),
        (lambda r: r.pop("answer"), "answer: Field required"),
        (lambda r: r.update(kind="silver"), "kind: Input should be 'golden'"),
        (lambda r: r.update(provenance={}), 'provenance needs a "source"'),
        (lambda r: r.update(frames=["3.png"]), "3.png does not exist"),
        (lambda r: r.update(frames=["../1.png"]), "'../1.png' is no file inside"),
        (lambda r: r["turns"][2].update(pictures=["/1.png"]), "turn 2: '/1.png' is no file inside"),
        (lambda r: r.update(family="patern"), "no family named 'patern'; there are easy, pattern"),
        (lambda r: r.update(family="patern"), "did you mean 'pattern'?"),
        (lambda r: r.update(family="nonsense"), "or leave it out"),
        (lambda r: r.update(question="Which colour?"), "turn 0 asks 'Which pattern is on the red square?'"),
        (
            lambda r: [turn.pop("trainable", None) for turn in r["turns"]],
            "nothing of it is trainable, so nothing can be learned; mark turns (of 1, 3)",
        ),
        (lambda r: r["turns"][2].update(pictures=[]), "turn 2 has 1 <image> and 0 pictures"),
        (
            lambda r: r["turns"][0].update(text=r["question"], pictures=[]),
            "turn 0 shows []; a question shows the first of its frames",
        ),
        (
            lambda r: r["turns"][0].update(
                text="<image>" + r["turns"][0]["text"], pictures=["1.png", "2.png"]
            ),
            "turn 0 shows ['1.png', '2",
        ),
        (
            lambda r: r["turns"][0].update(pictures=["2.png"]),
            "turn 0 shows ['2.png']; a question shows the first of its frames",
        ),
        (
            lambda r: r["turns"][1].update(text="<image>" + r["turns"][1]["text"], pictures=["2.png"]),
            "turn 1 is the model's and shows",
        ),
        (
            lambda r: r["turns"][2].update(text="<image>\n<IMG_CONTEXT>"),
            "turn 2: the text holds '<IMG_CONTEXT>'",
        ),
        (lambda r: r["turns"][3].update(text="[SEG]"), "turn 3: the text holds '[SEG]'"),
        (
            lambda r: (r.update(question=" "), r["turns"][0].update(text="<image>")),
            "the question is ' '; write it",
        ),
        (lambda r: r.update(answer=""), "the answer is ''; write it"),
        (lambda r: r["turns"][2].update(trainable=True), "turn 2 is the user's and trainable"),
        (lambda r: r["turns"].pop(1), "turn 1 is the user's; turns alternate"),
        (lambda r: r["turns"].pop(3), "ends with the answer"),
        (lambda r: r["turns"][1].update(text="<tool_call>zoom</tool_call>"), "turn 1: the call is no JSON"),
        (
            lambda r: r["turns"][1].update(text=r["turns"][1]["text"].replace("zoom_in", "zoom")),
            "there is no operation 'zoom'",
        ),
        (
            lambda r: called(r, "zoom_in", bbox_2d=[650, 550, 250, 150]),
            "turn 1: bbox_2d [650, 550, 250, 150] is empty",
        ),
        (
            lambda r: called(r, "zoom_in", bbox_2d=[0, 0, 2500, 1500]),
            "turn 1: bbox_2d [0, 0, 2500, 1500] reaches outside of image_1",
        ),
        (
            lambda r: called(r, "zoom_in", bbox_2d=[0, 0, 100, 500]),
            "turn 1: the box is 4 x 15 pixels; it needs 8",
        ),
        (
            lambda r: called(r, "zoom_in", bbox_2d=[0, 0, 500, 500], image="image_2"),
            "no turn before it tells of 'image_2'; there is im",
        ),
        (lambda r: called(r, "zoom_in", mask="mask_7"), "turn 1: no turn before it tells of 'mask_7'"),
        (
            lambda r: called(r, "get_properties", masks=["mask_7"], properties=["rank"]),
            "turn 1: no turn before it tells of 'mask_7'",
        ),
        (lambda r: called(r, "zoom_in"), "turn 1: zoom_in takes bbox_2d (and an image), or a mask"),
        (
            lambda r: called(r, "zoom_in", mask="mask_1", image="image_1"),
            "turn 1: zoom_in takes a mask without an image",
        ),
        (
            lambda r: called(r, "segment_object_at"),
            "turn 1: segment_object_at takes point_2d, bbox_2d or text",
        ),
        (
            lambda r: called(r, "segment_object_at", point_2d=[1, 1], text="a cup"),
            "turn 1: segment_object_at takes point_2d, bbox_2d or text",
        ),
        (lambda r: called(r, "get_properties", masks=["image_1"]), "turn 1: 'image_1' is no mask"),
        (
            lambda r: called(r, "read_text", image="image_1", mask="mask_1"),
            "turn 1: image and mask are given",
        ),
        (
            lambda r: (
                (r["turns"][0].update(text="<image>\nmask_1?"), r.update(question="mask_1?"))
                and called(r, "read_text", image="mask_1")
            ),
            "turn 1: 'mask_1' is no image",
        ),
        (
            lambda r: called(r, "segment_object_at", point_2d=[500, 1200]),
            "turn 1: point_2d [500, 1200] is outside",
        ),
        (
            lambda r: called(r, "select_frames", frames=[0]),
            "turn 1: select_frames needs a clip; the trace has a single frame",
        ),
        (
            lambda r: r["turns"][3].update(text="checked<|im_end|>"),
            "turn 3 holds '<|im_end|>', which begins or ends a turn",
        ),
        (lambda r: r["turns"][1].update(text="Let me see."), "turn 1: no call, but turns follow"),
        (lambda r: r["turns"][3].update(text=r["turns"][1]["text"]), "ends with an answer, not with a call"),
        (lambda r: r["turns"][2].update(error="bad_box"), "turn 1: a call that failed is trainable"),
        (lambda r: r["turns"][3].update(text="diagonal"), "ends in 'diagonal', the answer is 'checked'"),
        (lambda r: r.update(kind="trap"), "a trap ends in a wrong answer"),
        (
            lambda r: (r.update(kind="trap"), r["turns"][3].update(text="diagonal")),
            "nothing of it is trainable",
        ),
        (lambda r: r.update(kind="self_correction"), "two calls at least"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_with_its_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], told: str
) -> None:
    wrong = json.loads(json.dumps(GOLDEN | {"trace_id": "mine/2"}))
    change(wrong)
    with pytest.raises(ValueError, match=r"traces.jsonl: line 2") as error:
        read(tmp_path, GOLDEN, wrong)
    assert told in str(error.value)


def test_every_wrong_record_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"traces\.jsonl: 2 faults") as error:
        read(
            tmp_path,
            GOLDEN | {"answer": "dotted"},
            GOLDEN | {"trace_id": "mine/2"},
            GOLDEN | {"trace_id": "mine/3", "kind": "silver"},
        )
    assert "line 1 (mine/1): ends in 'Checked.'" in str(error.value)
    assert "line 3: kind: Input should be 'golden'" in str(error.value)


def test_ans_data_check_decodes_the_pictures_of_traces_and_names_those_that_are_shown_turned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(*more: str) -> str:
        arguments = cli.parse(["data", "check", str(tmp_path), "--format", "traces", *more])
        assert arguments.function(arguments) == 0
        return capsys.readouterr().out

    read(tmp_path, GOLDEN)
    assert "turns them" not in check()
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (40, 30)).save(tmp_path / "2.png", exif=exif)
    assert "1 pictures have an EXIF tag that turns them (as 2.png)" in check()
    (tmp_path / "2.png").write_bytes((tmp_path / "2.png").read_bytes()[:-20])
    assert "no fault found" in check("--headers-only")
    with pytest.raises(ValueError, match=r"trace mine/1: cannot read the image .*2\.png"):
        check()
    with pytest.raises(ValueError, match="ans data show takes no traces"):
        cli.parse(words := ["data", "show", str(tmp_path), "--format", "traces"]).function(cli.parse(words))


def test_an_answer_with_a_full_stop_is_the_answer(tmp_path: Path) -> None:
    for answer in ("Checked.", "checked", " CHECKED. "):
        assert len(read(tmp_path, GOLDEN | {"answer": answer})) == 1


def test_a_failed_call_may_stand_in_a_trace_if_it_is_no_target(tmp_path: Path) -> None:
    record = json.loads(json.dumps(GOLDEN))
    record["turns"][1:1] = [
        {"role": "assistant", "text": "<tool_call>zoom</tool_call>"},
        {"role": "user", "text": "Error: the call is no JSON", "error": "broken_call"},
    ]
    assert len(read(tmp_path, record)[0].turns) == 6


def test_ids_are_unique_and_lines_are_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 2 \(mine/1\): this trace_id stands in an earlier line"):
        read(tmp_path, GOLDEN, GOLDEN)
    (tmp_path / "traces.jsonl").write_text(json.dumps(GOLDEN)[:-5])
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_traces(tmp_path)
    (tmp_path / "traces.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no record"):
        read_traces(tmp_path)


def test_a_family_that_gave_hardly_a_trace_is_named(caplog: pytest.LogCaptureFixture) -> None:
    dropped = {"moves/wrong_conclusion": 7, "moves/call_failed": 1, "text/wrong_conclusion": 5}
    warn_of_lost(dropped, {"moves": 10, "text": 10, "easy": 4})
    (warning,) = caplog.messages
    assert warning.startswith("8 of 10 questions of moves gave no trace: wrong_conclusion 7, call_failed 1;")
