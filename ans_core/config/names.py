"""Names that settings may hold and that other packages register. They are repeated here so that reading
settings loads no model code; tests/test_config.py compares them with the registries."""

from typing import Annotated, Literal

from pydantic import AfterValidator, WithJsonSchema

from ans_core.config.section import nearest


def one_of(names: tuple[str, ...]) -> AfterValidator:
    def checked(name: str) -> str:
        if name not in names:
            raise ValueError(f"no such name{nearest(name, names)}; there are {list(names)}")
        return name

    return AfterValidator(checked)


STILL_KINDS = ("referring", "region_caption", "grounded_caption")
DATA_KINDS = (*STILL_KINDS, "video", "extra")
"""ans_core/data: the role of a data set in a mixture."""
FORMATS = (
    "annotations", "chat_univi", "coco", "coco_video", "davis", "ego4d", "fineweb", "flickr_gcg", "grandf",
    "grefcoco", "llava", "mathvista", "mevis", "osprey", "partimagenet", "reasonseg", "ref_davis17",
    "ref_sav", "ref_youtube_vos", "refcoco", "refcocog_gcg", "region_arrow", "regions", "revos", "sa1b",
    "sav", "shards", "starqa", "videos", "virl39k", "youtube_vis",
)  # fmt: skip
"""ans_core/data/formats."""
BENCHMARKS = (*STILL_KINDS, "video", "loops")
"""ans_core/benchmarks, and the two loops."""
DISTRIBUTED = ("memory", "sft", "rl", "agent_sft", "rft")
SHARED = ("evaluate", "cota", "agent_evaluate")
SEVERAL_NODES = ("prepare", *DISTRIBUTED, *SHARED)
GPU_STAGES = ("base", *DISTRIBUTED, *SHARED, "online")
JOB_STAGES = ("prepare", *GPU_STAGES)
"""tasks/stages.py: the stages whose processes train together, that share samples, that may be on several nodes, that
want a GPU, and that may be a cluster's jobs."""
FAMILIES = ("easy", "pattern", "text", "larger", "moves")
"""ans_core/agent/world/families."""

PUBLIC = (
    "davis17", "detailed_captions", "dlc_bench", "ferret_bench", "gar_bench", "gcg", "grefcoco",
    "grounded_caption",
    "infographicsvqa", "mathvista", "mevis", "mevis_v2", "mm_vet", "mmbench", "mme", "mmmu_val", "mose",
    "reasonseg",
    "ref_davis17", "ref_youtube_vos", "refcoco", "refcoco+", "refcocog", "refcocog_captions", "referring",
    "region_caption",
    "revos", "sav", "seed_bench", "tallyqa_complex", "video", "virl39k", "vos", "vstar",
)  # fmt: skip
"""ans_core/benchmarks/registry.py: those that `ans eval` runs a model on."""

FILES_ALONE = ("captions", "coco_boxes", "mask_pairs", "mmmu_pro_vision", "saco_veval")
"""Those that it only scores files of."""
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
    "infovqa": "infographicsvqa",
    "mathvista_testmini": "mathvista",
    "mmmu": "mmmu_val",
    "mmmu_pro": "mmmu_pro_vision",
    "mmvet": "mm_vet",
    "tallyqa": "tallyqa_complex",
    "vstar_bench": "vstar",
}
"""What else people call them."""
SCORED = tuple(sorted({*PUBLIC, *FILES_ALONE} - OTHER_NAMES.keys()))
"""All of them, each by one name."""

StillKind = Annotated[str, one_of(STILL_KINDS), WithJsonSchema({"type": "string", "enum": STILL_KINDS})]
FormatName = Annotated[str, one_of(FORMATS), WithJsonSchema({"type": "string", "enum": FORMATS})]
JobStage = Annotated[str, one_of(JOB_STAGES), WithJsonSchema({"type": "string", "enum": JOB_STAGES})]
PublicName = Annotated[str, one_of(PUBLIC), WithJsonSchema({"type": "string", "enum": PUBLIC})]
BenchmarkName = Annotated[str, one_of(BENCHMARKS), WithJsonSchema({"type": "string", "enum": BENCHMARKS})]
FamilyName = Annotated[str, one_of(FAMILIES), WithJsonSchema({"type": "string", "enum": FAMILIES})]
Reader = Literal["rapidocr", "template"]
"""Of READ_TEXT (ans_core/agent/ocr.py)."""
LoopName = Literal["caption", "mask", "refer", "ground", "describe", "vqa", "agent"]
RewardName = Literal["iou", "soft_iou", "meteor", "meteor_nltk", "format", "confidence", "cider"]
GroundRewardName = Literal["iou", "meteor", "meteor_nltk", "cider"]
TextRewardName = Literal["meteor", "meteor_nltk", "format", "cider"]


def benchmark_named(name: str) -> str:
    """Return the public benchmark that people mean. Raises ValueError naming those there are."""
    plain = name.lower().replace("-", "_")
    plain = OTHER_NAMES.get(plain, plain)
    if plain not in SCORED:
        raise ValueError(
            f"no benchmark {name!r} to score{nearest(plain, (*SCORED, *OTHER_NAMES))}; there are "
            f"{', '.join(SCORED)}"
        )
    return plain
