"""What the page of `ans demo` computes: uploads, answers, regions, colours and downloads. Needs no gradio."""

from __future__ import annotations

import io
import json
import socket
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import av
import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.demo import exports, pictures, samples, words
from ans_core.demo.chat import Answer, Chat, Turn
from ans_core.demo.checkpoints import offered
from ans_core.demo.serve import serve
from ans_core.demo.sources import Source, of_sample, read_upload
from ans_core.demo.tab import Tab
from ans_core.inference.answer import save_video
from ans_core.inference.clicks import mask_by_points
from ans_core.inference.options import PredictOptions
from ans_core.inference.predict import answers, follow
from ans_core.inference.prefill import prompt
from ans_core.inference.requests import request_of
from ans_core.inference.sa2va import Sa2VA
from ans_core.metrics.grounding import phrases
from ans_core.model.network import Network
from ans_core.pictures import overlay, rle, video_file
from ans_core.types import Request
from tests import tiny

QUESTION = "Please segment the red square in this image."


@pytest.fixture
def clip(tmp_path: Path) -> Source:
    """Four frames in files."""
    frames, folder = [], tmp_path / "clip"
    folder.mkdir()
    for number, frame in enumerate(tiny.clip(0).frames):
        assert isinstance(frame, bytes)
        frames.append(folder / f"{number:03d}.png")
        frames[-1].write_bytes(frame)
    return Source(name="clip", frames=tuple(frames), size=(tiny.SIDE, tiny.SIDE), is_clip=True)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("notes.txt", b"hello", "notes.txt is neither a picture .* nor a clip"),
        ("cut.png", tiny.picture(0)[:200], "cannot read the image cut.png: "),
        ("words.jpg", b"no picture", "cannot read the image words.jpg: "),
        ("empty.mp4", b"", "cannot read the video empty.mp4: "),
        ("cut.mp4", b"\0\0\0\x18ftypmp42" + b"\0" * 100, "cannot read the video cut.mp4: "),
    ],
)
def test_a_bad_upload_gets_a_sentence_without_this_machines_folders(
    tmp_path: Path, name: str, content: bytes, sentence: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=sentence) as told:
        read_upload(tmp_path / name)
    assert str(tmp_path) not in str(told.value)


def test_a_clip_of_sound_alone_is_told_so(tmp_path: Path) -> None:
    with av.open(tmp_path / "sound.mp4", "w") as container:
        stream = container.add_stream("aac", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        sound.rate = 8000
        for packet in [*stream.encode(sound), *stream.encode()]:
            container.mux(packet)
    with pytest.raises(ValueError, match=r"cannot read the video sound\.mp4: it holds no picture"):
        read_upload(tmp_path / "sound.mp4")


def test_a_stop_before_the_first_frame_promises_no_clip(clip: Source, tmp_path: Path) -> None:
    tab = Tab(
        folder=tmp_path,
        loads={},
        current=Chat(source=clip, turns=[Turn(question=QUESTION, answers={"m": Answer(text="no")})]),
    )
    assert tab.stopped() == ""
    tab.chat.stop.set()
    assert tab.stopped() == "Stopped: no frame was followed."


def test_files_pictures_and_clips_that_are_too_large_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "heavy.mp4").open("wb") as file:
        file.truncate(210_000_000)
    with pytest.raises(ValueError, match=r"heavy\.mp4 has 210 MB, the page takes up to 200"):
        read_upload(tmp_path / "heavy.mp4")
    assert not (tmp_path / "heavy.mp4").exists()
    (tmp_path / "large.png").write_bytes(tiny.picture(0))
    monkeypatch.setattr("ans_core.demo.sources.MOST_PIXELS", 4000)
    with pytest.raises(
        ValueError, match=r"large\.png is 64 x 64 pixels, the page takes up to 4,000 in all: scale it down"
    ):
        read_upload(tmp_path / "large.png")
    save_video([Image.new("RGB", (16, 16))] * 7, tmp_path / "long.mp4", fps=5.0)
    monkeypatch.setattr("ans_core.demo.sources.MOST_FRAMES", 6)
    with pytest.raises(ValueError, match=r"long\.mp4 has 7 frames, the page takes up to 6"):
        read_upload(tmp_path / "long.mp4")
    monkeypatch.undo()
    source = read_upload(tmp_path / "long.mp4")
    assert (source.is_clip, len(source.frames), source.size, source.fps) == (True, 7, (16, 16), 5)


def test_turns_before_go_into_the_question_and_each_checkpoint_hears_its_own(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(
        model: Network, requests: list[Request], options: PredictOptions, *, max_tokens: int
    ) -> list[SimpleNamespace]:
        asked.extend((request.text, request.past) for request in requests)
        return [SimpleNamespace(text=f"answer {len(asked)}", masks=[])]

    monkeypatch.setattr("ans_core.demo.chat.answers", answer)
    chat = Chat(source=of_sample(tiny.sample()))
    list(chat.ask({"one": own_model, "other": own_model}, "first?"))
    list(chat.ask({"one": own_model, "other": own_model}, "second?"))
    assert asked == [
        ("<image>\nfirst?", ()),
        ("<image>\nfirst?", ()),
        ("second?", (("<image>\nfirst?", "answer 1"),)),
        ("second?", (("<image>\nfirst?", "answer 2"),)),
    ]
    with pytest.raises(ValueError, match="the question is empty"):
        next(chat.ask({"one": own_model}, "  "))
    assert len(chat.turns) == 2


@pytest.mark.slow
def test_a_pictures_answer_is_the_models_with_its_regions(tiny_model: Network) -> None:
    chat = Chat(source=of_sample(tiny.sample()), regions=[tiny.square(8, 8, 24, 24)])
    *_, (name, answer) = chat.ask({"tiny": tiny_model}, QUESTION, max_tokens=12)
    request = request_of(text=f"<image>\n{QUESTION}", image=tiny.picture(0), mask_prompts=chat.regions)
    (expected,) = answers(tiny_model, [request], PredictOptions(), max_tokens=12)
    assert (name, answer.text) == ("tiny", expected.text)
    assert answer.masks == [[rle.encode(masks[0])] for masks in expected.masks]


@pytest.mark.slow
def test_a_clip_is_followed_as_the_model_does_and_stops_where_it_is_told(
    own_model: Network, clip: Source, tmp_path: Path
) -> None:
    mode: Literal["sa2va-i"] = "sa2va-i"
    own_model.keep_original_decoder()
    _say_seg(own_model)
    request = request_of(text=f"<image>\n{QUESTION}")
    text, found = follow(own_model, request, clip.frames, PredictOptions(mode=mode), max_tokens=1)
    expected = [[rle.encode(mask) for mask in masks] for _, masks in found]
    chat = Chat(source=clip)
    steps = [
        answer.followed
        for _, answer in chat.ask({"tiny": own_model}, QUESTION, video_mode=mode, max_tokens=1)
    ]
    answer = chat.last("tiny")
    assert answer is not None
    assert (answer.text, steps) == (text, [0, 1, 2, 3, 4])
    assert [list(frame) for frame in zip(*answer.masks, strict=True)] == expected

    for _, answer in chat.ask(
        {"tiny": own_model, "other": own_model}, QUESTION, video_mode=mode, max_tokens=1
    ):
        if answer.followed == 2:
            chat.stop.set()
    assert {name: one.followed for name, one in chat.turns[-1].answers.items()} == {"tiny": 2}
    assert len(list(video_file.shots(pictures.write_clip(clip, answer, tmp_path / "stopped.mp4")))) == 2


def test_clicks_boxes_and_strokes_become_regions(tiny_model: Network) -> None:
    chat = Chat(source=of_sample(tiny.sample()))
    with pytest.raises(ValueError, match="no region is marked"):
        chat.region_question()
    chat.mark(tiny_model, "brush", [(10.0, 20.0), (30.0, 20.0)])
    painted = rle.decode(chat.regions[0])
    assert painted[20, 10:31].all()
    assert not painted[20, 34:].any()
    assert not painted[:17].any()
    assert not painted[24:].any()
    picture = chat.source.picture(0)
    for kind, labels in (
        ("click", [(20 / 64, 12 / 64, 1)]),
        ("box", [(8 / 64, 6 / 64, 2), (24 / 64, 30 / 64, 3)]),
    ):
        before = len(chat.regions)
        mask, _ = mask_by_points(tiny_model, picture, labels)
        # dragged from the upper right corner
        points = [(20.0, 12.0)] if kind == "click" else [(24.0, 6.0), (9.0, 9.0), (8.0, 30.0)]
        if mask.any():
            chat.mark(tiny_model, kind, points)  # type: ignore[arg-type]
            assert chat.regions[before:] == [rle.encode(mask)]
        else:
            with pytest.raises(ValueError, match="SAM2 finds no object"):
                chat.mark(tiny_model, kind, points)  # type: ignore[arg-type]
    assert f"region{len(chat.regions)}" in chat.region_question()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("It is [SEG].", [("It is ", None), ("mask 1", 0), (".", None)]),
        ("<p> a cat </p> [SEG] on <p> a mat </p> [SEG]", [("a cat", 0), (" on ", None), ("a mat", 1)]),
        (
            "<p> a </p> <p> b </p> [SEG] [SEG]",
            [("a", None), (" ", None), ("b", 0), (" ", None), ("mask 2", 1)],
        ),
        ("<p> open [SEG]", [("<p> open ", None), ("mask 1", 0)]),
        ("no mask", [("no mask", None)]),
    ],
)
def test_every_phrase_gets_the_number_of_its_mask(text: str, pieces: list[tuple[str, int | None]]) -> None:
    assert words.pieces(text) == pieces
    assert [name or f"mask {n + 1}" for n, name in enumerate(phrases(text))] == [
        name for name, n in pieces if n is not None
    ]


def test_answers_are_escaped_and_marked_in_the_colour_of_the_overlay() -> None:
    turn = Turn(question="<b>?", answers={"tiny": Answer(text="<p> <i>cat </p> [SEG] & [SEG]")})
    page = words.chat_html([turn])
    assert "&lt;b&gt;?" in page
    assert '<mark data-mask="1" style="--object: rgb(0, 215, 255)">&lt;i&gt;cat</mark> &amp; ' in page
    assert '<mark data-mask="2" style="--object: rgb(255, 40, 200)">mask 2</mark>' in page
    assert overlay.COLOURS[:2] == ((0, 215, 255), (255, 40, 200))


def test_a_mask_that_is_switched_off_leaves_the_picture_as_it_was() -> None:
    source = of_sample(tiny.sample())
    answer = Answer(text="[SEG] [SEG]", masks=[[tiny.square(8, 8, 24, 24)], [tiny.square(40, 40, 60, 60)]])
    plain, both = (np.asarray(pictures.frame_picture(source, 0, masks)) for masks in ([], answer.shown(0)))
    answer.hidden = {0}
    one = np.asarray(pictures.frame_picture(source, 0, answer.shown(0)))
    assert plain.shape == (640, 640, 3)
    left, right = (slice(60, 260),) * 2, (slice(380, 620),) * 2
    assert (one[left] == plain[left]).all()
    assert (both[left] != plain[left]).any()
    assert (one[right] == both[right]).all()
    assert (one[right] != plain[right]).any()


def test_a_region_is_outlined_and_a_large_picture_is_reduced() -> None:
    assert [pictures.shown_size(size) for size in ((100, 50), (700, 300), (2560, 1000))] == [
        (600, 300),
        (700, 300),
        (1280, 500),
    ]
    shown = np.asarray(pictures.frame_picture(of_sample(tiny.sample()), 0, [], [tiny.square(8, 8, 24, 24)]))
    assert (shown[160, 80:83] == 255).all()  # inside the left edge of 8 x 10 pixels
    assert (shown[160, 83:85] == 0).all()


def test_downloads_hold_every_mask(tmp_path: Path) -> None:
    square, empty = tiny.square(8, 8, 24, 24), rle.empty(tiny.SIDE, tiny.SIDE)
    answer = Answer(text="<p> a cat </p> [SEG] and [SEG]", masks=[[square], [empty]])
    (tmp_path / "still.png").write_bytes(tiny.picture(0))
    files = exports.write_all(read_upload(tmp_path / "still.png"), "what?", answer, tmp_path / "out")
    with zipfile.ZipFile(files["PNG"]) as packed:
        assert packed.namelist() == ["object1_frame00000.png", "object2_frame00000.png"]
        assert (
            np.asarray(Image.open(io.BytesIO(packed.read("object1_frame00000.png")))) == rle.decode(square)
        ).all()
    assert json.loads(files["RLE"].read_text()) == {
        "source": "still.png",
        "asked": "what?",
        "text": answer.text,
        "masks": answer.masks,
    }


def test_a_runs_own_checkpoints_and_held_out_pictures_are_on_offer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared, model = tmp_path / "run/data", tmp_path / "run/model"
    for folder in (prepared / "own", model, tmp_path / "run/base/base", tmp_path / "run/sft"):
        folder.mkdir(parents=True)
    records: list[dict] = []
    for number, split in enumerate(("train", "val", "val", "val")):
        (prepared / f"own/{number}.png").write_bytes(tiny.picture(number))
        record = {"image": f"{number}.png", "split": split, "masks": [tiny.square(8, 8, 24, 24)]}
        records += [
            record | {"text": "the square", "task": "referring"},
            record | {"text": "a red square", "task": "region_caption"},
        ]
    records[2], records[3] = records[3], records[2]
    (prepared / "own/annotations.json").write_text(json.dumps(records))
    entry = {"format": "annotations", "kind": "referring", "repeats": 1}
    entries = [{"name": "own", "path": "own", "split": split} for split in ("train", "val")] + [
        {"name": "gone", "path": "gone", "split": "test"}
    ]
    (prepared / "datasets.json").write_text(json.dumps([entry | one for one in entries]))
    examples = samples.held_out(model)
    assert [(e.question, len(e.regions), e.caption) for e in examples] == [
        (
            "Please give me a short description of the region in the picture marked by region1.",
            1,
            "describe a region",
        ),
        ("Please segment the square in this image.", 0, "the square"),
        ("Please segment the square in this image.", 0, "the square"),
    ]
    assert "no samples of gone: data set 'gone': " in capsys.readouterr().err
    assert samples.held_out(tmp_path) == []

    assert list(offered(str(model), ["their/model"], device="cpu")) == ["run/model", "base", "their/model"]
    (tmp_path / "run/sft/delta.json").write_text("{}")
    assert list(offered(str(model), [], device="cpu")) == ["run/model", "before RL", "base"]
    with pytest.raises(ValueError, match="device_map 'foo' is no device"):
        offered(str(model), [], device="foo")
    assert list(offered(str(tmp_path), [], device="cpu")) == ["/".join(tmp_path.parts[-2:])]


def test_checkpoints_of_the_same_name_in_two_places_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of two checkouts are. Each name loads its own folder."""
    folders = [tmp_path / place / "runs/tiny/model" for place in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    monkeypatch.setattr(Sa2VA, "from_pretrained", lambda path, device_map: str(path))
    loads = offered(str(folders[0]), [str(folders[1])], device="cpu")
    assert {name: load() for name, load in loads.items()} == {
        "one/runs/tiny/model": str(folders[0]),
        "other/runs/tiny/model": str(folders[1]),
    }
    assert list(offered(str(folders[0]), [str(folders[0])], device="cpu")) == ["tiny/model"]


def test_an_open_host_needs_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--host 0\.0\.0\.0 opens the page to the network: give --auth"):
        serve("model", [], host="0.0.0.0", port=0, auth=None, device="cpu")
    monkeypatch.delenv("ANS_DEMO_PASSWORD", raising=False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: (_ for _ in ()).throw(EOFError))
    with pytest.raises(ValueError, match="nobody is there to type a password; set ANS_DEMO_PASSWORD"):
        serve("model", [], host="0.0.0.0", port=0, auth="me", device="cpu")


def test_an_address_that_is_taken_or_not_there_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANS_DEMO_PASSWORD", "secret")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host, number in (("127.0.0.1", port), ("127.0.0.1", 99_999), ("198.51.100.7", 7860)):
            with pytest.raises(
                ValueError, match=f"--host {host} --port {number} can't be had .*; give another port"
            ):
                serve(
                    "nothing/there",
                    [],
                    host=host,
                    port=number,
                    auth=None if host == "127.0.0.1" else "me",
                    device="cpu",
                )


def _say_seg(model: Network) -> None:
    """Make the model answer `[SEG]` alone."""
    with torch.no_grad():
        prompted = prompt(model, [Request(frames=tiny.clip(0).frames, text=f"<image>\n{QUESTION}")])
        state = model.internvl.model.language_model(
            inputs_embeds=tiny.embeds_of(prompted)[None]
        ).last_hidden_state[0, -1]
        model.internvl.lm_head.weight.zero_()
        model.internvl.lm_head.weight[model.seg_token_id] = state
