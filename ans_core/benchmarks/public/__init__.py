"""Public benchmarks: scored from files, whoever made the predictions, and asked of a model. A new one is a file and a line here."""

from ans_core.benchmarks.public import (
    captions,
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
    "infographicsvqa": infographicsvqa.SCORER,
    "mask_pairs": mask_pairs.SCORER,
    "mathvista": mathvista.SCORER,
    "mevis": mevis.SCORER,
    "mm_vet": mm_vet.SCORER,
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
    "tallyqa_complex": tallyqa_complex.SCORER,
    "virl39k": virl39k.SCORER,
    "vos": vos.SCORER,
    "vstar": vstar.SCORER,
}
CONVENTIONS = {"mose": "mose", "sav": "mose"}
"""Of vos, by the name that it is called; else davis."""

__all__ = ["CONVENTIONS", "SCORERS", "Answerer", "Given", "Item", "Runner", "Scored", "Scorer", "UnscoredError"]
