"""Public benchmarks scored from files, whoever made the predictions. A new one is a file and a line here."""

from ans_core.benchmarks.public import captions, gcg, mask_pairs, vos
from ans_core.benchmarks.public.scored import Given, Scored, Scorer

SCORERS: dict[str, Scorer] = {
    "captions": captions.SCORER,
    "gcg": gcg.SCORER,
    "mask_pairs": mask_pairs.SCORER,
    "vos": vos.SCORER,
}
OTHER_NAMES = {
    "davis17": "vos",
    "davis_osvos": "vos",
    "mose": "vos",
    "sav": "vos",
    "coco100": "gcg",
    "nlg_eval": "captions",
    "captions_magic": "captions",
}
"""What else people call them."""

__all__ = ["OTHER_NAMES", "SCORERS", "Given", "Scored", "Scorer"]
