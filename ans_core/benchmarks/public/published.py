"""Figures of other systems, with their sources, to set beside one's own (published.json; percent, as they are
printed there)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

SIZES = {
    "refcoco": {"val": 10834, "testA": 5657, "testB": 5095},
    "refcoco+": {"val": 10758, "testA": 5726, "testB": 4889},
    "refcocog": {"val": 4896, "test": 9602},
    "mevis": {"val_u": 793},
    "ref_davis17": {"val": 244},
    "gar_bench": {"vqa": 424},
    "davis17": {"val": 61},
    "sav": {"val": 293, "test": 278},
    "dlc_bench": {"": 100},
    "ferret_bench": {"refer_desc": 40},
    "mmmu_val": {"": 900},
    "mmmu_pro_vision": {"": 1730},
    "vstar": {"": 191},
    "mme": {"": 2374},
    "infographicsvqa": {"val": 2801},
}
"""Samples of the real benchmarks (expressions; vos: objects): RefCOCO's of the UNC and UMD splits, MeViS',
DAVIS', SA-V's and MME's as their papers say, the others' as their files. Another number means other data in
the same layout, a part, or another release."""
COUNTS = {"gar_bench": "vqa/count", "dlc_bench": "objects", "ferret_bench": "questions", "mme": "questions"}
"""Benchmark -> its metric that holds the number of samples, where that is not the number of the table's
lines."""
IN_PERCENT = {("ferret_bench", "score")}
"""Metrics of ours that are percent already."""
VOS = {"davis17": "DAVIS17", "mose": "MOSE", "sav": "SA-V"}
"""Data sets of vos -> how the splits of its figures begin."""
SPLITS = {"valid_u": "val_u", "valid": "val"}
"""Folder names of splits -> what they are called in tables."""
PROTOCOLS = {
    ("refcoco", "cIoU"): (
        "cIoU_upstream",
        "the published figure leaves out expressions without a mask; ours beside it does, too",
    ),
    ("ref_davis17", "J&F"): (
        "J&F",
        "mean over expressions, as upstream; DAVIS' own script averages over objects",
    ),
}
"""(benchmark, metric) -> the metric of ours that is computed as the published one, and how."""


@dataclass(frozen=True, kw_only=True)
class Published:
    model: str
    benchmark: str
    split: str
    metric: str
    value: float
    source: str
    note: str = ""
    """What differs in the protocol; the judge of a judged figure."""


def published(benchmark: str) -> list[Published]:
    text = (
        resources.files("ans_core.benchmarks.public").joinpath("published.json").read_text(encoding="utf-8")
    )
    return [Published(**row) for row in json.loads(text) if row["benchmark"] == benchmark]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure and ours beside it."""

    figure: Published
    ours: float | None
    """Percent; None: another split, or not the real benchmark."""
    note: str

    def line(self, source: int) -> str:
        f = self.figure
        ours = "" if self.ours is None else f"{self.ours:.1f}"
        return f"{f.model:<20} {f.split:<26} {f.metric:<14} {f.value:>9.1f} {ours:>6}  [{source}]".rstrip()


def comparison(name: str, split: str, metrics: Mapping[str, float], *, samples: int) -> list[Row]:
    """Return the published figures of a benchmark, with ours where `samples` (lines of the table) of
    the split are the real benchmark's number. split "": the one with that number."""
    scorer = "refcoco" if name in ("refcoco+", "refcocog") else "vos" if name in VOS else name
    sizes = SIZES.get(name, {})
    samples = size_of(name, metrics, lines=samples)
    split = split or next((candidate for candidate, size in sizes.items() if size == samples), "")
    real = sizes.get(SPLITS.get(split, split)) == samples
    rows = []
    for figure in published(scorer):
        if scorer == "refcoco" and figure.split.lower() != name:
            continue
        if name in VOS and not figure.split.startswith(VOS[name]):
            continue
        key, protocol = PROTOCOLS.get((scorer, figure.metric), (figure.metric, ""))
        of = figure.split.removeprefix(VOS.get(name, "")).strip()
        same = scorer == "refcoco" or SPLITS.get(of, of).lower() == SPLITS.get(split, split).lower()
        ours = None
        if real and same and key in metrics and _same_convention(name, metrics):
            ours = metrics[key] * (1 if (scorer, key) in IN_PERCENT else 100)
        rows.append(
            Row(
                figure=figure,
                ours=ours,
                note="; ".join(filter(None, (figure.note, protocol if ours is not None else ""))),
            )
        )
    return rows


def size_of(name: str, metrics: Mapping[str, float], *, lines: int) -> int:
    """Return the number of samples that were scored."""
    return int(metrics.get(COUNTS.get(name, ""), lines))


def part(name: str, metrics: Mapping[str, float], *, lines: int) -> list[str]:
    """Return a note where predictions that hold their own truth are of fewer samples than the benchmark has:
    nobody counts what is missing."""
    sizes, size = SIZES.get(name, {}), size_of(name, metrics, lines=lines)
    if not size or size >= min(sizes.values(), default=0):
        return []
    return [
        f"a part of the benchmark: {size} of its {min(sizes.values())} samples; what is missing is not "
        "counted"
    ]


def _same_convention(name: str, metrics: Mapping[str, float]) -> bool:
    """DAVIS17's figures are of the convention davis, which alone has a decay."""
    return name != "davis17" or "J_decay" in metrics


def lines(rows: Sequence[Row]) -> list[str]:
    """Return a table in which sources and notes stand once, below."""
    if not rows:
        return []
    sources = ["; ".join(filter(None, (row.figure.source, row.note))) for row in rows]
    place = {source: number for number, source in enumerate(dict.fromkeys(sources), start=1)}
    head = f"{'published, percent':<20} {'split':<26} {'metric':<14} {'published':>9} {'ours':>6}"
    table = [row.line(place[source]) for row, source in zip(rows, sources, strict=True)]
    return [head, *table, *(f"[{number}] {source}" for source, number in place.items())]
