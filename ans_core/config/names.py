"""Names that settings may hold and that other packages register. They are repeated here so that reading settings loads no model code;
tests/test_config.py compares them with the registries."""

from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from ans_core.config.section import nearest


def one_of(names: tuple[str, ...]) -> AfterValidator:
    def known(name: str) -> str:
        if name not in names:
            raise ValueError(f"no such name{nearest(name, names)}; there are {list(names)}")
        return name

    return AfterValidator(known)


STILL_KINDS = ("referring", "region_caption", "grounded_caption")
DATA_KINDS = (*STILL_KINDS, "video", "extra")
"""ans_core/data: the role of a data set in a mixture."""
FORMATS = (
    "annotations", "chat_univi", "coco", "coco_video", "davis", "ego4d", "fineweb", "flickr_gcg", "grandf", "grefcoco", "llava",
    "mathvista", "mevis", "osprey", "partimagenet", "reasonseg", "ref_davis17", "ref_sav", "ref_youtube_vos", "refcoco", "refcocog_gcg",
    "region_arrow", "regions", "revos", "sa1b", "sav", "starqa", "videos", "youtube_vis",
)  # fmt: skip
"""ans_core/data/formats."""
BENCHMARKS = (*STILL_KINDS, "video", "loops")
"""ans_core/benchmarks, and the two loops."""
FAMILIES = ("easy", "pattern", "text", "larger", "moves")
"""ans_core/agent/world/families."""

PUBLIC = (
    "davis17", "detailed_captions", "dlc_bench", "ferret_bench", "gar_bench", "gcg", "grefcoco", "infographicsvqa", "mathvista", "mevis",
    "mevis_v2", "mm_vet", "mmbench", "mme", "mmmu_val", "mose", "reasonseg", "ref_davis17", "ref_youtube_vos", "refcoco", "refcoco+",
    "refcocog", "refcocog_captions", "revos", "sav", "seed_bench", "tallyqa_complex", "virl39k", "vos", "vstar",
)  # fmt: skip
"""ans_core/benchmarks/public: those that a model is run on."""

StillKind = Annotated[str, one_of(STILL_KINDS), WithJsonSchema({"type": "string", "enum": STILL_KINDS})]
FormatName = Annotated[str, one_of(FORMATS), WithJsonSchema({"type": "string", "enum": FORMATS})]
PublicName = Annotated[str, one_of(PUBLIC), WithJsonSchema({"type": "string", "enum": PUBLIC})]
BenchmarkName = Annotated[str, one_of(BENCHMARKS), WithJsonSchema({"type": "string", "enum": BENCHMARKS})]
FamilyName = Annotated[str, one_of(FAMILIES), WithJsonSchema({"type": "string", "enum": FAMILIES})]
LoopName = Literal["caption", "mask", "refer", "ground", "describe", "vqa", "agent"]
RewardName = Literal["iou", "soft_iou", "meteor", "meteor_nltk", "format", "confidence", "cider"]
GroundRewardName = Literal["iou", "meteor", "meteor_nltk", "cider"]
TextRewardName = Literal["meteor", "meteor_nltk", "format", "cider"]
