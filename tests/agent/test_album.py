"""Played episodes as the page shows them: pictures of every turn, masks, and the rewards that RFT pays."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from ans_core.agent.album import STILL_WIDTH, STILLS, WIDTH, AlbumEntry, album_entry, write_album
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import outcome_of, request_of
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.policy import add_call_tokens
from ans_core.agent.practice import AgentPractice
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.world import Question, draw_question
from ans_core.config import Config, Optim
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.config.rft import PhaseEnd, RewardPhases, Rft
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.pictures.overlay import COLOURS, OPACITY
from ans_core.stages import agent_report
from ans_core.types import RLE
from tests.browser import found_by_probe

LIMITS = EpisodeSettings(turn_tokens=2)
NOT_CYAN = 2
"""Index of a clip whose thing has another colour than its mask."""
TRACK_OF_NOTHING = Call(name="track_object", arguments={"mask": "mask_1"})


def asked(family: str, index: int = 0) -> Question:
    return draw_question(family, seed=0, split="val", index=index, tile=64)


@pytest.fixture
def model(own_model: Network, colour_sam: None) -> Network:
    add_call_tokens(own_model, OPERATIONS)
    return own_model


def played(model: Network, question: Question, *plans: list[str]) -> list[PlayedEpisode]:
    """Play an episode for each plan. A random model says nothing that makes sense: what counts is given."""
    with Toolbox(model) as toolbox:
        return play(model, toolbox, [request_of(question)] * len(plans), limits=LIMITS, plans=plans)


def plan_of(question: Question) -> list[str]:
    return [*map(call_text, question.plan), question.answer]


def entry(question: Question, own: PlayedEpisode, number: int = 0) -> AlbumEntry:
    return album_entry(number, outcome_of(question, own), own)


def opened(encoded: bytes) -> Image.Image:
    return Image.open(io.BytesIO(encoded)).convert("RGB")


def pixels(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture.convert("RGB"), float)


def plain(frame: bytes, width: int) -> np.ndarray:
    """Return a square frame as the page would show it without a mask."""
    return pixels(Image.open(io.BytesIO(frame)).resize((width, width), Image.Resampling.LANCZOS))


def truth(mask: RLE, width: int) -> np.ndarray:
    return np.asarray(Image.fromarray(rle.decode(mask)).resize((width, width), Image.Resampling.NEAREST))


def tint(drawn: np.ndarray, before: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the colour that was laid over a mask, its edge left out."""
    inside = ndimage.binary_erosion(mask, iterations=4)
    return np.asarray(((drawn - (1 - OPACITY) * before)[inside] / OPACITY).mean(0))


def test_a_track_is_shown_in_a_few_frames_with_its_mask_where_the_thing_is(model: Network) -> None:
    question = asked("moves", NOT_CYAN)
    made = entry(question, played(model, question, plan_of(question))[0])
    first, second, answer = made.record["turns"]
    assert [still["label"] for still in first["masks"]] == ["mask_1, frame 0"]
    assert max(opened(made.pictures[first["masks"][0]["picture"]]).size) == WIDTH
    shown = (0, 1, 3, 4, 6, 7)
    assert [still["label"] for still in second["masks"]] == [f"frame {f}" for f in shown]
    assert len(shown) == STILLS
    assert "masks" not in answer
    for frame, still in zip(shown, second["masks"], strict=True):
        drawn = pixels(opened(made.pictures[still["picture"]]))
        mask = truth(question.targets[0].masks[frame], STILL_WIDTH)
        assert tint(drawn, plain(question.frames[frame], STILL_WIDTH), mask) == pytest.approx(
            np.array(COLOURS[0]), abs=40
        )


@pytest.mark.slow
def test_every_mask_is_shown_in_the_turn_that_made_it_and_in_a_colour_of_its_own(model: Network) -> None:
    question = asked("larger")
    made = entry(question, played(model, question, plan_of(question))[0])
    before, turns = plain(question.frames[0], WIDTH), made.record["turns"]
    assert [[still["label"] for still in turn["masks"]] for turn in turns[:3]] == [["mask_1"], ["mask_2"], []]
    for number, (turn, target) in enumerate(zip(turns[:2], question.targets, strict=True)):
        drawn = pixels(opened(made.pictures[turn["masks"][0]["picture"]]))
        assert tint(drawn, before, truth(target.masks[0], WIDTH)) == pytest.approx(
            np.array(COLOURS[number]), abs=40
        )
        assert np.abs(drawn - before)[truth(question.targets[1 - number].masks[0], WIDTH)].mean() < 5
    assert np.abs(pixels(opened(made.pictures["000.webp"])) - before).mean() < 3


@pytest.mark.slow
def test_what_came_back_is_shown_and_every_picture_is_named_once(model: Network) -> None:
    question = asked("pattern")
    made = entry(
        question,
        played(model, question, [call_text(question.plan[0]), "<tool_call>{</tool_call>", question.answer])[
            0
        ],
        number=7,
    )
    looked, refused, _ = made.record["turns"]
    assert (len(looked["pictures"]), looked["masks"], refused["pictures"], refused["masks"]) == (
        1,
        [],
        [],
        [],
    )
    assert refused["error"] == "broken_call"
    assert set(made.pictures) == {"007.webp", *looked["pictures"]}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["easy", "pattern", "larger", "moves"])
def test_the_rewards_are_those_that_rft_pays(model: Network, family: str) -> None:
    """Of the shortest plan, an answer at once, calls too many, and a mask asked about before there is one."""
    question = asked(family)
    look = call_text(asked("pattern").plan[0])
    plans = [
        plan_of(question),
        ["no"],
        [look, look, look, look, question.answer],
        [call_text(TRACK_OF_NOTHING), question.answer],
    ]
    end = PhaseEnd(threshold=2.0, slope=-9.0, steps=9)
    with Toolbox(model) as toolbox:
        practice = AgentPractice(
            model, toolbox, question=lambda name: question, ask=request_of, families=[family], limits=LIMITS,
            settings=Rft(
                evidence=1.0, coherence=1.0, optim=Optim(steps=1, batch=8, lr=1e-3),
                phases=RewardPhases(base=end, coherence=end, every=1, allowed_loss=0.0),
            ),
        )  # fmt: skip
        practice.steps = 1  # curiosity's bonus is over
    records = []
    for own in played(model, question, *plans):
        record, paid = entry(question, own).record, practice._rewarded(question, own)
        assert record["rewards"]["task"] == paid.rewards["task"]
        names = {"evidence": "evidence", "coherence": "coherence", "price": "curiosity", "penalty": "penalty"}
        assert {name: record["rewards"][name] for name in names} == pytest.approx(
            {name: paid.measured[of] for name, of in names.items()}
        )
        records.append(record)
    best, at_once, repeated, early = records
    assert best["rewards"] | {"coherence": 0} == {
        "task": 1.0,
        "evidence": float(family != "easy"),
        "coherence": 0,
        "price": 0.0,
        "penalty": 0.0,
    }
    assert at_once["rewards"]["task"] == at_once["rewards"]["evidence"] == 0.0
    assert repeated["rewards"]["price"] < 0
    assert repeated["faults"] == ["over_use"]
    assert early["faults"] == ["prerequisite"]


@pytest.mark.slow
def test_an_episode_that_ran_into_a_limit_is_no_lesson(model: Network) -> None:
    question = asked("pattern")
    look = call_text(question.plan[0])
    whole, endless = (
        entry(question, own).record for own in played(model, question, plan_of(question), [look] * 6)
    )
    assert (whole["lesson"], endless["lesson"], endless["ended"]) == (True, False, "calls")
    assert endless["rewards"]["task"] == 0.0
    assert "no_answer" in endless["faults"]


def write_page(model: Network, folder: Path) -> Path:
    """Write the stage's page of an agent that plays the shortest plan of four families, and an answer at
    once."""
    questions = [asked(family) for family in ("easy", "pattern", "larger", "moves")]
    own = [
        (question, one)
        for question in questions
        for one in played(model, question, plan_of(question), ["no"])
    ]
    write_album(folder / "rft/episodes", [entry(*pair, number) for number, pair in enumerate(own)])
    (folder / "rft/metrics.json").write_text(json.dumps({"easy/accuracy": 0.5, "needed/accuracy": 0.5}))
    agent_report.run(
        Config(profile="tiny"),
        inputs={"agent/evaluate/rft": folder / "rft"},
        out=folder,
        scratch=folder,
        log=lambda metrics, step: None,
    )
    return folder / "episodes.html"


@pytest.mark.slow
def test_the_page_shows_masks_and_rewards_of_every_episode(model: Network, tmp_path: Path) -> None:
    page = write_page(model, tmp_path).read_text()
    assert page.count("<article") == page.count('<dl class="rewards">') == 8
    assert page.count('class="track"') == 1
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == [
        "mask_1",
        "mask_2",
        "mask_1, frame 0",
        *(f"frame {f}" for f in (0, 1, 3, 4, 6, 7)),
    ]
    assert page.count("<dt>task</dt><dd>1.000</dd>") == page.count("<dt>task</dt><dd>0.000</dd>") == 4
    assert len(page) < 400_000


PROBE = """<script>
addEventListener("load", () => {
  const seen = (one) => one.checkVisibility() && one.getBoundingClientRect().width > 0;
  const all = (selector) => [...document.querySelectorAll(selector)];
  const found = {
    pictures: all("article img").map((one) => seen(one) && one.naturalWidth > 0 && one.complete),
    rewards: all("dl.rewards").filter(seen).map((one) => one.innerText.replace(/\\s+/g, " ")),
    row: new Set(all(".track .stills figure").map((one) => one.getBoundingClientRect().top)).size,
    wide: document.documentElement.scrollWidth - innerWidth,
  };
  document.body.insertAdjacentHTML("beforeend", '<pre id="found"></pre>');
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_shows_pictures_and_rewards_without_an_error(
    model: Network, tmp_path: Path, width: int
) -> None:
    page = write_page(model, tmp_path)
    page.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    found = found_by_probe(page.as_uri(), tmp_path, f"--window-size={width},900")
    assert len(found["pictures"]) == 8 + 1 + 2 + 1 + 6
    assert all(found["pictures"])
    assert len(found["rewards"]) == 8
    assert found["rewards"][0].startswith("task 1.000 evidence 0.000")
    assert found["wide"] <= 0
    assert found["row"] == (1 if width == 1280 else 2)
