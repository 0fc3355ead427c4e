"""Questions about several pictures: what is read in which order, which picture a call means, and how such
questions are practised."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ans_core import prompts
from ans_core.agent import ask, tokens
from ans_core.agent.album import album_entry
from ans_core.agent.crops import Crop, CropFeatures
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import outcome_of, request_of
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.workspace import Workspace
from ans_core.agent.world.bank import QuestionBank, write_questions
from ans_core.agent.world.question import Question
from ans_core.agent.world.question_sets import pictures
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.inference.prefill import prompt, visible
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.pictures import transforms
from ans_core.rl.rollout import Group, Reader, pack, token_logps
from ans_core.types import Request, Sample
from flows import cli
from tests import tiny
from tests.agent import test_practice
from tests.agent.test_ask import workspace as asking_workspace  # noqa: F401
from tests.agent.test_practice import GROUP, loops
from tests.golden import GOLDEN
from tests.rl.test_observed_pictures import model_of

KINDS = pytest.mark.parametrize(
    "kind",
    [
        "internvl",
        *(
            pytest.param(
                kind,
                marks=[
                    pytest.mark.slow,
                    pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference outputs"),
                ],
            )
            for kind in ("qwen2_5_vl", "qwen3_vl")
        ),
    ],
)
LIMITS = EpisodeSettings(turn_tokens=6)


def picture(number: int, width: int, height: int) -> bytes:
    """PNG of noise, with a red square in its lower right quarter."""
    pixels = np.random.default_rng(number).integers(60, 120, (height, width, 3), dtype=np.uint8)
    pixels[height * 5 // 8 : height * 7 // 8, width * 5 // 8 : width * 7 // 8] = (220, 30, 40)
    encoded = io.BytesIO()
    Image.fromarray(pixels).save(encoded, "PNG")
    return encoded.getvalue()


WIDE, TALL, SMALL = picture(1, 160, 64), picture(2, 70, 130), picture(3, 40, 40)


def request(*frames: bytes, text: str = "Which is larger, <Image-1> or <Image-2>?") -> Request:
    first = tokens.first_question(text, pictures=len(frames))
    return Request(frames=frames, text=first, stills=len(frames) > 1)


def zoom(image: str, box: list[int]) -> str:
    return call_text(Call(name="zoom_in", arguments={"bbox_2d": box, "image": image}))


@KINDS
def test_each_picture_is_cut_as_it_is_alone_and_the_text_has_them_in_order(kind: str) -> None:
    model = model_of(kind)
    opened = [transforms.open_image(frame) for frame in (WIDE, TALL)]
    wide, tall = (visible(model, [one]) for one in opened)
    both = visible(model, opened)
    assert torch.equal(both.pixels, torch.cat([wide.pixels, tall.pixels]))
    assert both.grids == wide.grids + tall.grids
    assert both.tokens == wide.tokens + tall.tokens
    asked = request(WIDE, TALL)
    assert asked.text == ("image_1: <image>\nimage_2: <image>\nWhich is larger, image_1 or image_2?")
    ids = tokens.opening_ids(model, asked.text, [wide.grids, tall.grids])
    marks = model.backbone.marks
    runs = "".join(
        f"image_{n}: {marks.start}{marks.slot * sum(views.tokens)}{marks.end}\n"
        for n, views in enumerate((wide, tall), start=1)
    )
    assert ids == model.tokenizer.encode(
        prompts.TEMPLATES[model.config.template].user.format(
            input=f"{runs}Which is larger, image_1 or image_2?"
        )
    )
    # what the language model reads: those ids, the pictures' features in order
    prompted = prompt(model, [asked])
    embeds = tiny.embeds_of(prompted)
    assert len(embeds) == len(ids)
    features = ImageFeatures.joined([model.project(model.vision_features([v])) for v in (wide, tall)])
    slots = torch.tensor(ids) == model.image_token_id
    assert torch.allclose(embeds[slots], features.values.to(embeds.dtype), atol=1e-4)


def test_what_does_not_fit_several_pictures_is_refused(tiny_model: Network) -> None:
    with pytest.raises(ValueError, match=r"1 <image> for 2 pictures: .*; write it once for each"):
        prompt(tiny_model, [Request(frames=(WIDE, TALL), text="<image>\nWhich?", stills=True)])
    marked = replace(request(WIDE, TALL), mask_prompts=({"size": [64, 160], "counts": "P"},))
    with pytest.raises(ValueError, match="mask prompts are of one picture, and the question has several"):
        prompt(tiny_model, [marked])
    with pytest.raises(ValueError, match=r"differ in size \(160 x 64, 70 x 130\)"):
        prompt(tiny_model, [Request(frames=(WIDE, TALL), text="<image>\nWhich?", clip=True)])


@pytest.mark.usefixtures("colour_sam")
def test_calls_name_a_picture_and_measure_in_its_own_size(tiny_model: Network) -> None:
    place = Workspace.of((WIDE, TALL, SMALL), stills=True)
    assert (place.names("image"), place.clip) == (["image_1", "image_2", "image_3"], False)

    def called(name: str, **arguments: Any) -> Any:
        nonlocal place
        observation, place = toolbox.call(place, Call(name=name, arguments=arguments))
        return observation

    with Toolbox(tiny_model, reader="template") as toolbox:
        assert called("zoom_in", bbox_2d=[500, 500, 1000, 1000], image="image_2").text == (
            "image_4: [500, 500, 1000, 1000]"
        )
        assert place.picture("image_4").size == (35, 65)
        assert np.array_equal(
            np.asarray(place.picture("image_4")), np.asarray(transforms.open_image(TALL))[65:, 35:]
        )
        found = called("segment_object_at", point_2d=[750, 750], image="image_2")
        # the square of 70 x 130: columns 43 to 61, rows 81 to 113
        assert found.values["bbox_2d"] == [614, 623, 871, 869]
        assert place.pixels("mask_1").shape == (130, 70)
        assert called("segment_object_at", point_2d=[750, 750]).ok
        assert place.pixels("mask_2").shape == (64, 160)
        measured = called("get_properties", masks=["mask_1"], properties=["box", "colour"])
        assert measured.values["mask_1"] == {"box": [614, 623, 871, 869], "colour": "red"}
        around = called("zoom_in", mask="mask_1")
        assert place.image(around.values["image"]).frame == 1
        for name, arguments in (("track_object", {"mask": "mask_1"}), ("select_frames", {"frames": [1]})):
            refused = called(name, **arguments)
            assert (refused.error, refused.text) == (
                "not_a_clip",
                f"{name} needs a clip, and there is none here",
            )


@pytest.mark.slow
@KINDS
def test_episodes_about_several_pictures_are_learned_as_they_were_sampled(
    kind: str, toolbox: Toolbox
) -> None:
    model = model_of(kind)
    reader = Reader(temperature=1.0, forbidden=[model.image_token_id], guard="guard")
    plans = [[], [zoom("image_2", [500, 500, 1000, 1000])], [zoom("image_1", [0, 0, 500, 1000])]]
    episodes = play(
        model, toolbox, [request(WIDE, TALL)] * 3, limits=LIMITS, reader=reader, seeds=[1, 2, 3], plans=plans
    )
    assert [len(episode.crops) for episode in episodes] == [2, 3, 3]
    assert episodes[1].crops[2] == Crop(frame=TALL, box=(35, 65, 70, 130))
    # alone, and beside a question about one picture
    beside, _ = play(
        model, toolbox, [request(WIDE, TALL), request(SMALL)], limits=LIMITS, reader=reader, seeds=[2, 9],
        plans=[plans[1], []],
    )  # fmt: skip
    assert [turn.ids for turn in beside.turns] == [turn.ids for turn in episodes[1].turns]
    group = Group(prefix=episodes[0].prefix, rollouts=tuple(episode.rollout for episode in episodes))
    crops = [*episodes[0].overviews, *(crop for episode in episodes for crop in episode.crops[2:])]
    image = ImageFeatures.joined([model.project(f) for f in CropFeatures(model).of(crops)])
    packed = Packed(**dict[str, Any](pack([group], pad_id=0)[0]))
    logps, _ = token_logps(model, packed, model.hidden_states(packed, [image]), reader)
    sampled = [p for episode in episodes for p in episode.logps]
    assert torch.allclose(logps, torch.tensor(sampled), atol=1e-4)


def test_pictures_of_the_question_count_in_the_limit(tiny_model: Network, toolbox: Toolbox) -> None:
    limits = EpisodeSettings(turn_tokens=4, pictures=2)
    (played,) = play(
        tiny_model, toolbox, [request(WIDE, TALL)], limits=limits, plans=[[zoom("image_2", [0, 0, 900, 900])]]
    )
    assert played.ended == "pictures"


def compared(number: int, *frames: bytes) -> Sample:
    width, height = transforms.image_size(frames[0])
    return Sample(
        sample_id=f"s/{number}", image_id="pair", frames=frames, stills=True, width=width, height=height,
        task="conversation", question="Is <Image-2> taller?", text="yes",
    )  # fmt: skip


def written(folder: Path) -> list[Question]:
    """Questions of a set about two and three pictures, which begin with the same one."""
    made = pictures([compared(1, WIDE, TALL), compared(2, WIDE, TALL, SMALL)], name="mine")
    assert write_questions(made, folder / "train", seed=0) == {"qa_mine": 2}
    bank = QuestionBank.of_cota([], folder, seed=0, tile=64)
    return sorted(
        (bank.question("qa_mine", "train", index) for index in range(2)), key=lambda q: len(q.frames)
    )


def test_a_set_of_comparisons_is_written_read_back_played_and_shown(
    tmp_path: Path, tiny_model: Network, toolbox: Toolbox
) -> None:
    two, three = written(tmp_path)
    assert [transforms.image_size(frame) for frame in three.frames] == [(160, 64), (70, 130), (40, 40)]
    assert (two.stills, len(two.frames), request_of(three).stills) == (True, 2, True)
    assert request_of(two).text == "image_1: <image>\nimage_2: <image>\nIs image_2 taller?"
    plan = [zoom("image_2", [0, 0, 500, 500]), "yes"]
    (played,) = play(tiny_model, toolbox, [request_of(two)], limits=LIMITS, plans=[plan])
    outcome = outcome_of(two, played)
    assert (outcome.right, outcome.valid_calls) == (True, 1)
    entry = album_entry(7, outcome, played)
    assert entry.record["pictures"] == ["007.webp", "007_image_2.webp"]
    assert set(entry.record["pictures"]) < set(entry.pictures)


@pytest.mark.slow
def test_rft_learns_from_questions_about_several_pictures(
    tmp_path: Path, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a question about one picture; what was sampled is what is learned."""
    names = ("easy/train/0", "easy/train/1")
    two, three = (
        replace(question, family="easy", question_id=name)
        for question, name in zip(written(tmp_path), names, strict=True)
    )
    asked = {
        "easy/train/0": two,
        "easy/train/1": three,
        "pattern/train/0": test_practice.question("pattern/train/0"),
    }
    monkeypatch.setattr(test_practice, "question", asked.__getitem__)
    plans = [[], [zoom("image_2", [0, 0, 500, 500])], [zoom("image_1", [0, 0, 500, 500])], [], [], []]
    started: Any = test_practice.practices.play
    monkeypatch.setattr(
        test_practice.practices,
        "play",
        lambda *a, **k: partial(started, plans=plans * (len(a[2]) // GROUP))(*a, **k),
    )
    module = loops(toolbox)
    assert module.practice is not None
    module.practice.ask = request_of  # type: ignore[attr-defined]
    module.practice.question = asked.__getitem__  # type: ignore[attr-defined]
    (moved,) = module.begin_step([test_practice.batch(module.model, names=tuple(asked))])
    done = module.waiting[0]["agent"]
    assert done.observed[0][0] == (1, (0, 0, 35, 65))
    assert done.observed[2][0][0] == 0  # of one picture, image_2 is a crop that is not there yet
    loss, found = module(moved)
    loss.backward()
    assert found["agent/sampling_gap"] < 1e-4


def test_ans_ask_takes_several_pictures(
    asking_workspace: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = asking_workspace
    for name, content in (("wide.png", WIDE), ("tall.png", TALL)):
        (root / name).write_bytes(content)
    seen: list[Request] = []

    def planned(*given: Any, **options: Any) -> list[PlayedEpisode]:
        seen.extend(given[2])
        return play(*given, **options, plans=[[zoom("image_2", [500, 500, 1000, 1000]), "yes"]])

    monkeypatch.setattr(ask, "play", planned)
    words = [
        "ask",
        str(root / "wide.png"),
        str(root / "tall.png"),
        "Is image_2 taller?",
        "--out",
        str(root / "out"),
    ]
    assert ask.ask(cli.parse(words), root) == 0
    assert "image_3: [500, 500, 1000, 1000]" in capsys.readouterr().out
    assert seen[0].text.startswith("image_1: <image>\nimage_2: <image>\n")
    with Image.open(root / "out/turn_1/image_3.png") as crop:
        assert crop.size == (35, 65)
    told = json.loads((root / "out/episode.json").read_text())
    assert told["source"] == f"{root / 'wide.png'} {root / 'tall.png'}"
    (root / "clip").mkdir()
    for name in ("0.png", "1.png"):
        (root / "clip" / name).write_bytes(WIDE)
    with pytest.raises(ValueError, match="clip is a clip; a question is about one clip, or about pictures"):
        ask.ask(cli.parse(["ask", str(root / "wide.png"), str(root / "clip"), "Is it?"]), root)
