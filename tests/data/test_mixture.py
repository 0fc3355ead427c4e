from __future__ import annotations

from collections import Counter

import pytest

from ans_core.data.collate import Row
from ans_core.data.conversation import turn
from ans_core.data.mixture import Mixture, Source
from tests import tiny

SHARES = {"referring": 0.5, "region_caption": 0.3, "video": 0.2}


def referring(count: int, per_image: int = 2, start: int = 0) -> list:  # type: ignore[type-arg]
    return [tiny.sample(start + i, text=f"thing {start + i} {k}") for i in range(count) for k in range(per_image)]


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
    return mixture([Source(name="one", kind="referring", samples=referring(count))], {"referring": 1.0}, **changes)


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
    alone = [row.name + str(row.turns) for micro in range(micros) for row in drawn().rows(5, micro, batch=8, micros=micros)]
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


def test_with_several_pools_an_image_comes_at_most_once_per_epoch():
    one = drawn()
    for epoch in range(20):
        names = [row.name for row in (one.row(n) for n in range(6 * epoch, 6 * epoch + 6)) if len(row.frames) == 1]
        assert len(names) == len(set(names))


def test_shares_are_honoured():
    """Pictures .5 + .3 against clips .2; within pictures with one question each, referring .5 of .8. Three standard deviations."""
    one = drawn(questions=1)
    rows = [one.row(n) for n in range(2000)]
    clips = sum(len(row.frames) > 1 for row in rows)
    assert abs(clips / 2000 - 0.2) < 3 * (0.2 * 0.8 / 2000) ** 0.5
    told = [row.turns[0] for row in rows if len(row.frames) == 1]
    asked = sum(bool(t.masks) for t in told)
    assert abs(asked / len(told) - 0.5 / 0.8) < 3 * (0.25 / len(told)) ** 0.5


def test_data_sets_that_show_the_same_picture_share_its_rows():
    row = next(r for r in (drawn(questions=5).row(n) for n in range(20)) if len(r.frames) == 1)
    assert Counter(bool(t.masks) for t in row.turns) == {True: 2, False: 1}  # all that is asked about it, each once
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


def test_a_users_data_set_has_its_own_pool_whose_share_counts_its_repeats():
    """Drawn pictures 1.0, own data .1 x 5: a third of the rows. Its 2 images come evenly."""
    own = [tiny.sample(i, dataset="mine", text="mine") for i in (90, 91)]

    def names(rows: list[Row]) -> Counter[str]:
        return Counter(row.name for row in rows)

    sources = [Source(name="one", kind="referring", samples=referring(6)), Source(name="mine", kind="extra", samples=own, repeats=5)]
    one = mixture(sources, {"referring": 1.0, "extra": 0.1})
    found = names([one.row(n) for n in range(1500)])
    mine = found["mine/i90"] + found["mine/i91"]
    assert abs(mine / 1500 - 1 / 3) < 3 * (2 / 9 / 1500) ** 0.5
    assert abs(found["mine/i90"] / mine - 0.5) < 3 * (0.25 / mine) ** 0.5
    named = mixture(sources, {"referring": 1.0, "extra": 0.1, "mine": 3.0})
    found = names([named.row(n) for n in range(1000)])
    assert abs((found["mine/i90"] + found["mine/i91"]) / 1000 - 0.75) < 3 * (0.75 * 0.25 / 1000) ** 0.5


def test_a_mixture_that_gives_nothing_a_share_is_refused():
    with pytest.raises(ValueError, match=r"gives no share to any of the data sets \[\('one', 'referring'\)\]"):
        mixture([Source(name="one", kind="referring", samples=referring(1))], {"video": 1.0})
    with pytest.raises(ValueError, match="gives no share"):
        mixture([Source(name="one", kind="referring", samples=[])], {"referring": 1.0})
