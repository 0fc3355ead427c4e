"""Public benchmarks: scored from files, whoever made the predictions, and asked of a model. A new one is a file and a line here."""

from ans_core.benchmarks.public import (
    captions,
    detailed_captions,
    dlc_bench,
    ferret_bench,
    gar_bench,
    gcg,
    grefcoco,
    mask_pairs,
    mevis,
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
    vos,
    vstar,
)
from ans_core.benchmarks.public.asked import Answerer, Item, Runner, UnscoredError
from ans_core.benchmarks.public.scored import Given, Scored, Scorer

SCORERS: dict[str, Scorer] = {
    "captions": captions.SCORER,
    "detailed_captions": detailed_captions.SCORER,
    "dlc_bench": dlc_bench.SCORER,
    "ferret_bench": ferret_bench.SCORER,
    "gar_bench": gar_bench.SCORER,
    "gcg": gcg.SCORER,
    "grefcoco": grefcoco.SCORER,
    "mask_pairs": mask_pairs.SCORER,
    "mevis": mevis.SCORER,
    "mmbench": mmbench.SCORER,
    "mme": mme.SCORER,
    "mmmu_pro_vision": mmmu_pro_vision.SCORER,
    "mmmu_val": mmmu_val.SCORER,
    "reasonseg": reasonseg.SCORER,
    "ref_davis17": ref_davis17.SCORER,
    "ref_youtube_vos": ref_youtube_vos.SCORER,
    "refcoco": refcoco.SCORER,
    "refcocog_captions": refcocog_captions.SCORER,
    "revos": revos.SCORER,
    "saco_veval": saco_veval.SCORER,
    "seed_bench": seed_bench.SCORER,
    "vos": vos.SCORER,
    "vstar": vstar.SCORER,
}
OTHER_NAMES = {
    "refcoco+": "refcoco",
    "refcocog": "refcoco",
    "coco": "gcg",
    "mevis_v2": "mevis",
    "davis17": "vos",
    "davis_osvos": "vos",
    "mose": "vos",
    "sav": "vos",
    "coco100": "gcg",
    "nlg_eval": "captions",
    "captions_magic": "captions",
    "mmmu": "mmmu_val",
    "mmmu_pro": "mmmu_pro_vision",
}
"""What else people call them."""
CONVENTIONS = {"mose": "mose", "sav": "mose"}
"""Of vos, by the name that it is called; else davis."""

__all__ = ["CONVENTIONS", "OTHER_NAMES", "SCORERS", "Answerer", "Given", "Item", "Runner", "Scored", "Scorer", "UnscoredError"]
