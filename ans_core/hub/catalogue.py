"""Names of the family's published data sets and weights: where each is on the Hugging Face hub, which of its
files are needed.

Sizes are asked of the hub when something is fetched; so is the licence, where the repository's card states
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One data set or release. `files`: patterns of the files that are needed (none: all)."""

    repo: str
    files: tuple[str, ...] = ()
    licence: str = UNKNOWN
    """Where the hub's card says nothing."""
    into: str
    """Folder, from the checkout."""
    then: str = ""
    """What to do with it once it is there."""

    @property
    def kind(self) -> Literal["dataset", "model"]:
        return "dataset" if self.into.partition("/")[0] == "data" else "model"


def _upstream(archive: str) -> Published:
    unpack = f"unzip -n 'data/{archive}' -d data; the profiles sa2va-* read it there"
    return Published(repo="Dense-World/Sa2VA-Training", files=(archive,), into="data", then=unpack)


DATA: dict[str, Published] = {
    "sa2va-training": Published(
        repo="Dense-World/Sa2VA-Training", files=("*.zip",), into="data",
        then="unzip every archive in data; SA-V is not among them"
    ),
    "refcoco": _upstream("ref_seg_coco.zip"),
    "refcoco+": _upstream("ref_seg_coco_+.zip"),
    "refcocog": _upstream("ref_seg_coco_g.zip"),
    "mevis": _upstream("video_datas_mevis.zip"),
    "ref-youtube-vos": _upstream("video_datas_rvos.zip"),
    "sa2va-finetune-example": Published(repo="bitersun/Sa2VA-finetune-example", into="data/sa2va-finetune-example"),
    "grandf": Published(
        repo="MBZUAI/GranD-f", files=("*.json",), into="data/grandf",
        then="its pictures are COCO's, Flickr30k's and GranD's own"
    ),
    "osprey-724k": Published(
        repo="AntGroup-MI/Osprey-724K", files=("*.json",), into="data/osprey-724k/Osprey-724K",
        then="its pictures are COCO's and others'"
    ),
    "llava-instruct": Published(
        repo="liuhaotian/LLaVA-Instruct-150K",
        files=("llava_v1_5_mix665k.json",),
        into="data/llava_data/LLaVA-Instruct-150K",
        then="its pictures are COCO's, GQA's, OCR-VQA's, TextVQA's and Visual Genome's",
    ),
    "describe-anything": Published(
        repo="nvidia/describe-anything-dataset", licence="NVIDIA Noncommercial", into="data/describe-anything"
    ),
    "grasp-any-region": Published(repo="HaochenWang/Grasp-Any-Region-Dataset", into="data/grasp-any-region"),
    "dlc-bench": Published(repo="nvidia/DLC-Bench", licence="CC BY-NC-SA 4.0", into="data/dlc-bench"),
}  # fmt: skip

MODEL_FILES = ("*.json", "*.safetensors", "*.txt", "*.model")


def _release(repo: str, then: str) -> Published:
    folder = f"weights/{repo.partition('/')[2]}"
    return Published(repo=repo, files=MODEL_FILES, into=folder, then=then.format(folder=folder))


BASE = "ans profile sa2va-1b base.internvl={folder}"
WHOLE = "ans predict PICTURE TEXT --model {folder}, or as a base: base.internvl={folder} base.sam2=''"

WEIGHTS: dict[str, Published] = {
    **{
        f"sa2va-{size}": _release(f"ByteDance/Sa2VA-{size.upper()}", WHOLE)
        for size in ("1b", "4b", "8b", "26b")
    },
    **{
        f"sa2va-i-{size}": _release(f"kumuji/Sa2VA-i-{size.upper()}", WHOLE)
        for size in ("1b", "4b", "8b", "26b")
    },
    **{
        f"sa2va-internvl3-{size}": _release(f"ByteDance/Sa2VA-InternVL3-{size.upper()}", WHOLE)
        for size in ("2b", "8b", "14b")
    },
    **{
        f"sa2va-qwen2.5-vl-{size}": _release(f"ByteDance/Sa2VA-Qwen2_5-VL-{size.upper()}", WHOLE)
        for size in ("3b", "7b")
    },
    **{
        f"sa2va-qwen3-vl-{size}": _release(f"ByteDance/Sa2VA-Qwen3-VL-{size.upper()}", WHOLE)
        for size in ("2b", "4b")
    },
    **{
        f"internvl2.5-{size}": _release(f"OpenGVLab/InternVL2_5-{size.upper()}", BASE)
        for size in ("1b", "4b", "8b", "26b")
    },
    "sam2-hiera-large": Published(
        repo="facebook/sam2-hiera-large",
        files=("sam2_hiera_large.pt",),
        into="weights/sam2-hiera-large",
        then="ans profile sa2va-1b base.sam2=weights/sam2-hiera-large/sam2_hiera_large.pt",
    ),
}
