from __future__ import annotations

import hashlib
import time
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from ans_core.data.conversation import pretraining_turn, turn
from ans_core.data.mixture import Mixture, Source, apportion
from ans_core.types import Masklet, Sample
from tests import tiny

SHARES = {"referring": 0.5, "region_caption": 0.3, "video": 0.2}


def referring(count: int, per_image: int = 2, start: int = 0) -> list:  # type: ignore[type-arg]
    return [
        tiny.sample(start + i, text=f"thing {start + i} {k}") for i in range(count) for k in range(per_image)
    ]


def regions(count: int) -> list:  # type: ignore[type-arg]
    return [tiny.region(i, text=f"a region {i}") for i in range(count)]


def drawn(**changes: object) -> Mixture:
    sources = [
        Source(name="one", kind="referring", samples=referring(6)),
        Source(name="two", kind="region_caption", samples=regions(6)),
        Source(name="clips", kind="video", samples=[tiny.clip(i) for i in range(3)]),
    ]
    return mixture(sources, **changes)


def mixture(sources: list[Source], shares: dict[str, float] = SHARES, **changes: object) -> Mixture:
    return Mixture(sources, shares, **({"questions": 2, "frames": 2, "seed": 0, "turn": turn} | changes))  # type: ignore[arg-type]


def stills(count: int, **changes: object) -> Mixture:
    return mixture(
        [Source(name="one", kind="referring", samples=referring(count))], {"referring": 1.0}, **changes
    )


def test_rows_depend_on_seed_and_number_alone():
    one, again, other = drawn(), drawn(), drawn(seed=1)
    rows = [one.row(n) for n in range(30)]
    assert [again.row(n) for n in reversed(range(30))][::-1] == rows
    assert [other.row(n) for n in range(30)] != rows


def test_a_step_has_the_rows_of_its_numbers_in_one_micro_batch_or_in_several():
    one = drawn()
    whole = one.rows(3, 0, batch=4, micros=1)
    assert whole == [one.row(n) for n in (12, 13, 14, 15)]
    parts = [one.rows(3, micro, batch=4, micros=2) for micro in (0, 1)]
    assert [r for pair in zip(*parts, strict=True) for r in pair] == whole


@pytest.mark.parametrize("micros", [1, 2])
def test_the_rows_of_two_processes_together_are_those_of_one(monkeypatch: pytest.MonkeyPatch, micros: int):
    alone = [
        row.name + str(row.turns)
        for micro in range(micros)
        for row in drawn().rows(5, micro, batch=8, micros=micros)
    ]
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        for micro in range(micros):
            rows = drawn().rows(5, micro, batch=8, micros=micros)
            assert len(rows) == 8 // 2 // micros
            shared += [row.name + str(row.turns) for row in rows]
    assert sorted(shared) == sorted(alone)


def test_every_image_comes_once_per_epoch_in_another_order_each_time():
    one = stills(10)
    epochs = [[one.row(n).name for n in range(10 * e, 10 * e + 10)] for e in range(3)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.slow
def test_shares_are_honoured():
    """Pictures .5 + .3 against clips .2; within pictures with one question each, referring .5 of .8. Three
    standard deviations."""
    one = drawn(questions=1)
    rows = [one.row(n) for n in range(2000)]
    clips = sum(len(row.frames) > 1 for row in rows)
    assert abs(clips / 2000 - 0.2) < 3 * (0.2 * 0.8 / 2000) ** 0.5
    told = [row.turns[0] for row in rows if len(row.frames) == 1]
    asked = sum(bool(t.masks) for t in told)
    assert abs(asked / len(told) - 0.5 / 0.8) < 3 * (0.25 / len(told)) ** 0.5


def test_data_sets_that_show_the_same_picture_share_its_rows():
    row = next(r for r in (drawn(questions=5).row(n) for n in range(20)) if len(r.frames) == 1)
    # all that is asked about it, each once
    assert Counter(bool(t.masks) for t in row.turns) == {True: 2, False: 1}
    assert len({t.question for t in row.turns}) > 1


def test_questions_of_a_row_are_different_samples_and_at_most_so_many():
    one = stills(4, questions=5, turn=lambda sample, rng: turn(sample, rng))
    assert {len(one.row(n).turns) for n in range(20)} == {2}
    assert {len(stills(4, questions=1).row(n).turns) for n in range(20)} == {1}


def test_the_frames_of_a_clip_are_drawn_sorted_and_go_with_their_masks():
    one = mixture([Source(name="clips", kind="video", samples=[tiny.clip(0)])], {"video": 1.0})
    rows = [one.row(n) for n in range(40)]
    assert {row.mask_frames for row in rows} == {(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)}
    assert all(row.frames == tuple(tiny.clip(0).frames[f] for f in row.mask_frames) for row in rows)


def test_regions_are_marked_in_the_first_frame_of_a_clip_which_is_then_always_among_the_chosen():
    asked = tiny.clip(0, task="conversation", question="What is region1?", text="A square.")
    one = mixture([Source(name="clips", kind="video", samples=[asked])], {"video": 1.0})
    rows = [one.row(n) for n in range(20)]
    assert {row.frames[0] for row in rows} == {asked.frames[0]}
    assert all(row.turns[0].regions == (asked.masks[0][0],) for row in rows)
    assert all(len(set(row.frames)) == 2 for row in rows)


def test_a_users_data_set_that_is_named_has_its_own_share():
    """Drawn pictures 1.0, own data 3.0: three quarters of every block; repeats don't count beside it."""
    own = [tiny.sample(i, dataset="mine", text="mine") for i in (90, 91)]
    sources = [
        Source(name="one", kind="referring", samples=referring(6)),
        Source(name="mine", kind="extra", samples=own, repeats=5),
    ]
    found = names_of(mixture(sources, {"referring": 1.0, "extra": 0.1, "mine": 3.0}), range(64))
    assert Counter(found["mine"]) == {"mine/i90": 24, "mine/i91": 24}


def test_a_mixture_that_gives_nothing_a_share_is_refused():
    phrases = Source(name="mine", kind="extra", samples=[tiny.sample(1, task="phrase", masks=())])
    with pytest.raises(
        ValueError,
        match="'mine' has a share of the mixture, and no sample of it has both a text and what it is about",
    ):
        mixture([phrases], {"mine": 1.0, "extra": 1.0})
    with pytest.raises(
        ValueError, match=r"gives no share to any of the data sets \[\('one', 'referring'\)\]"
    ):
        mixture([Source(name="one", kind="referring", samples=referring(1))], {"video": 1.0})
    with pytest.raises(ValueError, match="gives no share"):
        mixture([Source(name="one", kind="referring", samples=[])], {"referring": 1.0})


def owned(**changes: object) -> Mixture:
    """Two data sets of the user's, of 30 and 7 images, the second with repeats 3, beside 5 drawn images and 3
    drawn clips."""
    sources = [
        Source(name="drawn", kind="referring", samples=referring(5)),
        Source(name="clips", kind="video", samples=[tiny.clip(i) for i in range(3)]),
        Source(
            name="large", kind="extra", samples=[tiny.sample(i, dataset="large") for i in range(200, 230)]
        ),
        Source(
            name="small",
            kind="extra",
            samples=[tiny.sample(i, dataset="small") for i in range(300, 307)],
            repeats=3,
        ),
    ]
    return mixture(sources, {"referring": 0.5, "video": 0.125, "extra": 0.375}, **changes)


def names_of(one: Mixture, rows: range) -> dict[str, list[str]]:
    """By data set, in order; drawn clips under `clips`."""
    found: dict[str, list[str]] = {}
    for n in rows:
        row = one.row(n)
        found.setdefault("clips" if len(row.frames) > 1 else row.name.partition("/")[0], []).append(row.name)
    return found


def test_rows_are_those_that_cached_bases_were_trained_on():
    """Hashes of the rows of pre-training and SFT: a change of order makes all results anew, and is not to happen
    unseen."""

    def seen(sample: Sample, n: int) -> Sample:
        return replace(sample, frames=(Path(f"{n}.png"),))

    def masks(n: int, k: int) -> tuple[Masklet, ...]:
        return ((tiny.square(n, 2 * n, n + 20, 2 * n + 9),),) if k < 2 else ()

    expressions = [
        seen(tiny.sample(n, text=f"thing {n} {k}", masks=masks(n, k)), n) for n in range(7) for k in range(3)
    ]
    told = [seen(tiny.region(n, text=f"a region {n} {k}"), n) for n in range(6) for k in range(2)]
    grounded = [
        seen(tiny.sample(n, task="grounded_caption", text="a cat", phrases=((0, 5),)), n) for n in range(7)
    ]
    sources = [
        Source(name="one", kind="referring", samples=expressions),
        Source(name="two", kind="region_caption", samples=told),
        Source(name="three", kind="grounded_caption", samples=grounded),
    ]
    hashes = []
    for make in (pretraining_turn, turn):
        one = mixture(
            sources,
            {"referring": 0.6, "region_caption": 0.3, "grounded_caption": 0.1},
            questions=4,
            frames=1,
            seed=3,
            turn=make,
        )
        rows = [(r.name, r.frames, r.turns, r.mask_frames) for r in map(one.row, (*range(40), 1000, 123456))]
        hashes.append(hashlib.sha256(repr(rows).encode()).hexdigest()[:16])
    assert hashes == ["c7f7d304639f0046", "cc2ba609391bd063"]


def test_every_image_of_every_pool_comes_once_per_epoch_of_its_pool():
    found = names_of(owned(), range(1000))
    for name, images in {"drawn": 5, "clips": 3, "large": 30, "small": 7}.items():
        epochs = [found[name][i : i + images] for i in range(0, len(found[name]) - images + 1, images)]
        assert len(epochs) >= 5
        assert all(len(set(epoch)) == images for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 1


def test_every_block_holds_the_shares_and_data_sets_of_the_users_divide_theirs_by_images_and_repeats():
    """Of 64 rows: drawn 32, clips 8; large : small = 30 x 1 : 7 x 3 of 24."""
    one = owned()
    for block in range(20):
        counts = {name: len(rows) for name, rows in names_of(one, range(64 * block, 64 * block + 64)).items()}
        assert (counts["drawn"], counts["clips"]) == (32, 8)
        assert abs(counts["large"] - 24 * 30 / 51) < 1
        assert abs(counts["small"] - 24 * 21 / 51) < 1
    epochs = {row.name: row.epochs for row in one.table(6400)}
    assert epochs["small"] / epochs["large"] == pytest.approx(3, rel=0.02)


def test_the_table_counts_what_the_rows_take():
    one = owned()
    for rows in (5, 64, 200):
        table = {row.name: row for row in one.table(rows)}
        counted = names_of(one, range(rows))
        assert {name: row.rows for name, row in table.items()} == {
            "images": len(counted.get("drawn", [])), **{name: len(counted.get(name, [])) for name in ("clips", "large", "small")}
        }  # fmt: skip
    assert (table["images"].datasets, table["images"].images, table["images"].samples) == (("drawn",), 5, 10)
    assert table["small"].epochs == table["small"].rows / 7


def test_a_million_rows_in_any_order_are_cheap():
    one, start_s = owned(), time.process_time()
    far = [one.row(n) for n in (10**9, 10**6, 10**9 + 1, 3)]
    assert time.process_time() - start_s < 1
    assert [owned().row(n) for n in (10**9, 10**6, 10**9 + 1, 3)] == far


@pytest.mark.slow
@pytest.mark.parametrize("shares", [(1,), (1, 1), (5, 3, 1), (997, 2, 1), (1,) * 40 + (60,), (3, 3, 1, 1, 1)])
def test_rows_are_shared_out_one_by_one(shares: tuple[int, ...]):
    """Against giving every row in turn to the share with the smallest (rows + 1/2) / share."""
    exact = [Fraction(share, sum(shares)) for share in shares]
    counts = [0] * len(shares)
    for rows in range(300):
        assert apportion(exact, rows) == counts
        counts[min(range(len(shares)), key=lambda i: Fraction(2 * counts[i] + 1, shares[i]))] += 1
    far = apportion(exact, 10**6)
    assert sum(far) == 10**6
    assert max(abs(count - 10**6 * share) for count, share in zip(far, exact, strict=True)) < 2
