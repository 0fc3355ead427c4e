"""From neighbours and votes to what is learned: similarity, votes, independent paths, the gate."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core.agent import frozen
from ans_core.agent.episode import Toolbox
from ans_core.agent.world import FAMILIES, Question, draw_question, oracle
from ans_core.inference import clicks
from ans_core.model.network import Network
from ans_core.online.admission import Gate, Marginal
from ans_core.online.neighbours import Neighbours, hybrid
from ans_core.online.retention import forget
from ans_core.online.store import Task
from ans_core.online.verifiers import confirmed_answer, form_of
from ans_core.online.voting import Decision, Vote, decide, entropy, shares
from ans_core.pictures import rle
from tests.online.test_store import experience, opened

RNG = np.random.default_rng(0)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_similarity_is_seven_parts_of_what_is_seen_and_three_of_what_is_asked() -> None:
    (v, w), (t, u) = RNG.normal(size=(2, 5)), RNG.normal(size=(2, 9))
    assert float(hybrid(v, t) @ hybrid(w, u)) == pytest.approx(
        0.7 * cosine(v, w) + 0.3 * cosine(t, u), abs=1e-6
    )
    assert float(hybrid(v, t) @ hybrid(3 * v, t)) == pytest.approx(1.0, abs=1e-6)
    assert float(hybrid(np.zeros(5), t) @ hybrid(v, t)) == pytest.approx(0.3, abs=1e-6)


def test_the_nearest_are_those_of_a_full_sort_and_forgotten_ones_are_gone(tmp_path: Path) -> None:
    vectors = RNG.normal(size=(300, 16)).astype(np.float32)
    found = Neighbours()
    assert found.search(vectors[0], 3) == []
    for first in range(0, 300, 70):
        found.add(np.arange(first, min(first + 70, 300)) + 1, vectors[first : first + 70])
    asked = vectors[7] + 0.1
    order = np.argsort(-(vectors @ asked), kind="stable")[:5]
    assert found.search(asked, 5) == [
        (int(i) + 1, pytest.approx(float(vectors[i] @ asked), abs=1e-4)) for i in order
    ]
    found.keep(set(range(1, 301)) - {int(order[0]) + 1})
    assert [number for number, _ in found.search(asked, 4)] == [int(i) + 1 for i in order[1:]]
    assert found.vector(int(order[0]) + 1) is None
    with opened(tmp_path) as store:
        own = Neighbours()
        for i in range(3):
            store.add(experience(i), vectors[i])
        own.follow(store)
        forget(store, 2)
        store.add(experience(9), vectors[9])
        own.follow(store)
        assert [own.vector(n) is not None for n in (1, 2, 3, 4)] == [True, False, True, True]
        assert len(own) == 3


def test_ten_thousand_experiences_are_searched_in_five_milliseconds() -> None:
    found = Neighbours()
    found.add(np.arange(10_000) + 1, RNG.normal(size=(10_000, 256)).astype(np.float32))
    times = []
    for _ in range(20):
        start = time.perf_counter()
        found.search(RNG.normal(size=256).astype(np.float32), 5)
        times.append(time.perf_counter() - start)
    assert min(times) < 5e-3  # the fastest of 20: others use the machine, too


VOTES = [
    Vote(source="rollout 0", answer="Vertical."),
    Vote(source="rollout 1", answer="vertical"),
    Vote(source="rollout 2", answer="checked", verified=True),
    Vote(source="rollout 3", answer=None),
]


def test_votes_are_counted_in_two_ways_and_abstentions_count_against_all() -> None:
    """By hand: 2 : 1 of 4; 2 : 6 of 9. The abstention is 1 of each."""
    assert shares(VOTES, "majority") == {"vertical": 0.5, "checked": 0.25}
    assert shares(VOTES, "weighted") == pytest.approx({"vertical": 2 / 9, "checked": 6 / 9})
    by_majority, weighted = decide(VOTES, "majority"), decide(VOTES, "weighted")
    assert (by_majority.label, by_majority.verified) == ("vertical", False)
    assert (weighted.label, weighted.share, weighted.verified) == ("checked", pytest.approx(6 / 9), True)
    assert weighted.provenance()[2] == {
        "source": "rollout 2", "answer": "checked", "verified": True, "by": "",
        "strategy": "weighted",
    }  # fmt: skip
    assert decide(VOTES[3:], "majority") == Decision(
        label=None, share=0.0, verified=False, strategy="majority", votes=tuple(VOTES[3:])
    )
    equal = [Vote(source="a", answer="b"), Vote(source="b", answer="a")]
    assert decide(equal, "majority").label == decide(equal[::-1], "majority").label == "a"


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (["a", "A.", " a "], 0.0),
        (["a", "b", "c", "d"], 1.0),
        (["a", "a", "b", "b"], 0.5),  # log 2 / log 4
        (["a", "a", "a", "b"], (3 * math.log(4 / 3) + math.log(4)) / 4 / math.log(4)),
        (["a", "b", None, None], 1.0),
        (["a", None], None),
    ],
)
def test_the_entropy_of_answers_is_a_share_of_what_so_many_votes_can_have(
    answers: list[str | None], expected: float | None
) -> None:
    found = entropy([Vote(source=str(n), answer=answer, verified=n == 0) for n, answer in enumerate(answers)])
    assert found == (None if expected is None else pytest.approx(expected))


def task(**changes: object) -> Task:
    values: dict[str, object] = {
        "experience": 1, "request": "r", "question": "q", "frames": (), "clip": False, "form": "pattern",
        "policy": 0, "label": None, "verdict": None, "visits": 0, "flips": 0,
    }  # fmt: skip
    return Task(**(values | changes))


def decision(label: str | None = "a", share: float = 1.0, verified: bool = True) -> Decision:
    return Decision(label=label, share=share, verified=verified, strategy="weighted", votes=())


def test_the_gate_admits_what_is_agreed_on_verified_and_stays() -> None:
    gate = Gate()
    assert gate.verdict(task(), decision()) == "admitted"
    assert gate.verdict(task(), decision(share=0.69)) == "below_gate"
    assert gate.verdict(task(), decision(verified=False)) == "not_verified"
    assert Gate(verification=False).verdict(task(), decision(verified=False)) == "admitted"
    assert gate.verdict(task(), decision(None, 0.0, False)) == "no_answer"
    assert gate.verdict(task(label="b", visits=1), decision()) == "flipped"
    assert gate.verdict(task(label="b", visits=2), decision()) == "admitted"  # one flip in three visits
    assert gate.verdict(task(label="a", visits=2, flips=2), decision()) == "flipped"


def test_a_label_that_becomes_the_only_one_loses_its_weight() -> None:
    """Of two labels, one of which has nearly all, the weights are clip(1 / (2 m), .2, 2)."""
    marginal = Marginal()
    assert marginal.weight("pattern", "a") == 1.0
    marginal.add("pattern", "a")
    marginal.add("pattern", "b")
    assert marginal.counts["pattern"] == pytest.approx({"a": 0.98, "b": 1.0})
    # of two labels that came once each, none is common
    assert marginal.weight("pattern", "a") == pytest.approx(1.98 / (2 * 0.98))
    assert marginal.weight("pattern", "b") == pytest.approx(1.98 / 2)
    assert marginal.largest() == pytest.approx(1 / 1.98)
    for _ in range(500):
        marginal.add("pattern", "b")
    assert sum(marginal.counts["pattern"].values()) == pytest.approx(1 / 0.02, rel=1e-3)
    assert marginal.weight("pattern", "b") < marginal.weight("pattern", "a") == 2.0
    assert Marginal.of(marginal.state()) == marginal


def test_the_first_labels_lose_no_weight_because_others_have_not_come_yet() -> None:
    """The weights of what comes average 1 for one label, for two and for four; a form's labels are its
    own."""
    marginal = Marginal()
    for _ in range(30):
        assert marginal.weight("pattern", "a") == 1.0
        marginal.add("pattern", "a")
    marginal.add("larger", "yes")
    assert marginal.weight("pattern", "a") == marginal.weight("pattern", "b") == 1.0
    for counts in ({"a": 2.0, "b": 1.0}, {"a": 4.0, "b": 3.0, "c": 2.0, "d": 2.0}):
        marginal = Marginal(counts={"pattern": counts})
        mean = sum(count * marginal.weight("pattern", label) for label, count in counts.items()) / sum(
            counts.values()
        )
        assert mean == pytest.approx(1.0)


@pytest.fixture(scope="module")
def tools(tiny_model: Network) -> Iterator[Toolbox]:
    with Toolbox(tiny_model, seconds=60.0) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_verifier_answers_right_where_words_find_the_thing(
    family: str, tools: Toolbox, toolbox: Toolbox, monkeypatch: pytest.MonkeyPatch, colour_sam: None
) -> None:
    """It never sees the answer; where words find nothing, it has none."""
    asked: list[Question] = []

    def true_mask(model: Network, picture: Image.Image, words: str) -> tuple[np.ndarray, float]:
        last = len(asked[0].frames) - 1  # `moves` asks in the last frame
        masks = {target.phrase: target.masks[last] for target in asked[0].targets}
        return rle.decode(masks[words]), 1.0

    def mask_there(
        model: Network, picture: Image.Image, points: list[tuple[float, float, int]]
    ) -> tuple[np.ndarray, float]:
        x, y = (sum(point[i] for point in points) / len(points) for i in (0, 1))
        masks = [rle.decode(target.masks[0]) for target in asked[0].targets]
        return max(masks, key=lambda mask: mask[int(y * picture.height), int(x * picture.width)]), 1.0

    monkeypatch.setattr(frozen, "mask_by_words", true_mask)
    monkeypatch.setattr(clicks, "mask_by_points", mask_there)
    right = []
    for index in range(3):
        asked[:] = [draw_question(family, seed=0, split="train", index=index, tile=96)]
        assert form_of(asked[0].text) == family
        right.append(confirmed_answer(asked[0].text, asked[0].workspace(), tools) == asked[0].answer)
    assert sum(right) >= 2
    episode = oracle(asked[0], tools)
    by_place = confirmed_answer(asked[0].text, asked[0].workspace(), tools, looked=episode.workspace)
    assert by_place == (None if family in ("easy", "moves", "larger") else asked[0].answer)
    monkeypatch.setattr(frozen, "mask_by_words", lambda *_: (np.zeros((384, 384), bool), 0.0))
    # the tools remember what they found for the others
    asked[:] = [draw_question(family, seed=0, split="train", index=3, tile=96)]
    assert confirmed_answer(asked[0].text, asked[0].workspace(), tools) is None
    assert confirmed_answer("How many are there?", asked[0].workspace(), tools) is None
    assert confirmed_answer(asked[0].text, asked[0].workspace(), toolbox) is None  # no model, no masks
