"""Every benchmark by name: how a model is asked, and how its answers are scored. A new one is a file and a
line here.

What needs the pipeline's own four alone takes BENCHMARKS of ans_core/benchmarks: a stage that imports this
file has every benchmark in the hash of its code.
"""

from __future__ import annotations

from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.public import (
    captions,
    coco_boxes,
    detailed_captions,
    dlc_bench,
    ferret_bench,
    gar_bench,
    gcg,
    grefcoco,
    infographicsvqa,
    mask_pairs,
    mathvista,
    mevis,
    mm_vet,
    mmbench,
    mme,
    mmmu_pro_vision,
    mmmu_val,
    reasonseg,
    ref_davis17,
    ref_youtube_vos,
    refcoco,
    refcocog_captions,
    revos,
    saco_veval,
    seed_bench,
    tallyqa_complex,
    virl39k,
    vos,
    vstar,
)
from ans_core.benchmarks.public.asked import Runner
from ans_core.benchmarks.public.scored import Scorer
from ans_core.config.names import benchmark_named

PUBLIC = (
    captions, coco_boxes, detailed_captions, dlc_bench, ferret_bench, gar_bench, gcg, grefcoco,
    infographicsvqa, mask_pairs,
    mathvista, mevis, mm_vet, mmbench, mme, mmmu_pro_vision, mmmu_val, reasonseg, ref_davis17,
    ref_youtube_vos, refcoco,
    refcocog_captions, revos, saco_veval, seed_bench, tallyqa_complex, virl39k, vos, vstar,
)  # fmt: skip
SCORERS: dict[str, Scorer] = {
    **BENCHMARKS,
    **{module.__name__.rpartition(".")[2]: module.SCORER for module in PUBLIC},
}
CONVENTIONS = {"mose": "mose", "sav": "mose"}
"""Of vos, by the name that it is called; else davis."""


def scorer_of(name: str) -> Scorer:
    """Return the scorer that people mean. Raises ValueError naming those there are."""
    return SCORERS[benchmark_named(name)]


def runnable(name: str) -> tuple[Scorer, Runner]:
    """Return how a benchmark is scored and how a model is run on it. Raises ValueError for a benchmark of
    files alone."""
    scorer = scorer_of(name)
    if scorer.runner is None:
        names = ", ".join(sorted(n for n, s in SCORERS.items() if s.runner))
        raise ValueError(
            f"{name} scores files alone (`ans eval score {name}`); a model can be run on {names}"
        )
    return scorer, scorer.runner


def module_of(name: str) -> str:
    """Return the module of a benchmark."""
    module = benchmark_named(name)
    return f"ans_core.benchmarks.{module}" if module in BENCHMARKS else f"ans_core.benchmarks.public.{module}"
