"""COCO-video and YouTube-VIS files -> one referring sample per clip and category: the category's name,
meaning all its instances.

COCO-video: `images` with video_id and frame_id (or order_in_video, frame_index), one annotation per object
and image. An object's identity is its instance_id (or track_id); annotations without one are joined to one
masklet of their category, which `meta["joined"]` names. An image without any annotation is not annotated
(None), unless it says `is_det_keyframe`. YouTube-VIS: `videos` with file_names, `segmentations` with a mask
or null (absent) per frame. Crowd regions are left out. The pictures lie in `<split>/JPEGImages/`, `<split>/`,
`images/`, `JPEGImages/` or beside the file.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks, clip_files, coco
from ans_core.data.formats.coco import category_names, first_of_name, outline_or_box
from ans_core.data.formats.files import file_of, missing, url_of
from ans_core.data.formats.media import Media
from ans_core.pictures import rle
from ans_core.types import RLE, Frames, Masklet, Sample

SPLIT = re.compile(r"(?<![a-z])(train|valid|val|test)(?![a-z])")
LAYOUT = "*.json, annotations/*.json or <split>/instances.json"


class Source(checks.Record):
    categories: checks.Filled[Any]
    annotations: list[Any] | None = None
    videos: list[Any] = []
    images: list[Any] = []


class Video(checks.Record):
    id: checks.Id
    name: str | None = None
    file_names: checks.Filled[str] | None = None
    height: checks.Integer | None = None
    width: checks.Integer | None = None


class Picture(coco.Picture):
    video_id: checks.Id
    frame_id: checks.Integer | None = None
    order_in_video: checks.Integer | None = None
    frame_index: checks.Integer | None = None
    is_det_keyframe: bool = False

    @property
    def order(self) -> int | None:
        numbers = (self.frame_id, self.order_in_video, self.frame_index)
        return next((number for number in numbers if number is not None), None)


class Annotation(checks.Record):
    id: checks.Id
    category_id: checks.Id
    iscrowd: Any = 0


class FrameAnnotation(Annotation):
    """COCO-video's: one object in one image."""

    image_id: checks.Id
    instance_id: checks.Id = None
    track_id: checks.Id = None
    segmentation: Any
    bbox: Any = None

    @property
    def number(self) -> Any:
        """Return the object's number in the clip, None for one without identity."""
        return self.track_id if self.instance_id is None else self.instance_id


class MaskletAnnotation(Annotation):
    """YouTube-VIS': one object in one video."""

    video_id: checks.Id
    segmentations: list[Any]


@dataclass(kw_only=True)
class Clip:
    """A video while its annotations are collected."""

    name: str
    media: Media
    annotated: list[bool]
    category: dict[Any, Any] = field(default_factory=dict)
    """Object -> category, in the order of the annotations."""
    masks: dict[Any, dict[int, RLE]] = field(default_factory=lambda: defaultdict(dict))
    """Object -> masks by frame."""
    joined: set[Any] = field(default_factory=set)
    """Objects that are all of a category."""

    def masklet(self, number: Any) -> Masklet:
        absent, masks = rle.empty(*self.media.size), self.masks[number]
        return tuple(
            masks.get(place, absent) if annotated else None for place, annotated in enumerate(self.annotated)
        )


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file = splits(path)[split]
    source = checks.load(Source, file)
    if not source.annotations:
        raise checks.DataError(
            f"{file} has no annotations; those of this split are on the benchmark's server"
        )
    roots = [
        path / split / "JPEGImages",
        path / split,
        path / "images",
        path / "JPEGImages",
        file.parent,
        path,
    ]
    faults = checks.Faults(file)
    words = category_names(source.categories, file, spelt=lambda name: name.replace("_", " "))
    first_of = first_of_name(words, faults)
    clips: dict[Any, Clip] = {}
    video_of: dict[Frames, Any] = {}
    places: dict[Any, tuple[Clip, int]] = {}
    for video, pictures, where in (_of_images if source.images else _of_videos)(source, file, faults):
        with faults:
            clip = _clip(video, pictures, roots, where)
            if (other := video_of.setdefault(clip.media.frames, video.id)) != video.id:
                raise checks.DataError(
                    f"{where} has the frames of video {rle.short(other)}; give the annotations of both one "
                    "video_id"
                )
            clips[video.id] = clip
            places |= {picture.id: (clip, place) for place, picture in enumerate(pictures)}
    owner = "image" if source.images else "video"
    owners = {checks.as_id(record["id"]) for record in source.images or source.videos}
    form: type[FrameAnnotation | MaskletAnnotation] = FrameAnnotation if source.images else MaskletAnnotation
    for number, value in checks.by_id(source.annotations, f"{file}: annotation").items():
        with faults:
            where = f"{file}: annotation {rle.short(number)}"
            annotation = checks.record(form, value, where)
            if annotation.category_id not in words:
                raise checks.DataError(
                    f"{where}: category_id {rle.short(annotation.category_id)} is not in categories"
                )
            if (of := getattr(annotation, f"{owner}_id")) not in owners:
                raise checks.DataError(f"{where}: {owner}_id {rle.short(of)} is not in {owner}s")
            if annotation.iscrowd:
                continue
            category = first_of[annotation.category_id]
            # that a clip or picture has a fault is noted already
            if isinstance(annotation, FrameAnnotation) and of in places:
                _add_mask(annotation, category, *places[of], where, faults=faults)
            elif isinstance(annotation, MaskletAnnotation) and of in clips:
                _add_masklet(annotation, category, clips[of], where, faults=faults)
    for clip in clips.values():
        with faults:
            yield from _samples(clip, words, file=file)
    faults.tell()


def splits(path: Path) -> dict[str, Path]:
    """Return the file of every split: `<split>/instances.json`, or files named by their split
    (`youtube_vis_train.json`) there or in `annotations/`. A file whose name tells none is a split of that
    name, if no other does."""
    files: dict[str, Path] = {file.parent.name: file for file in sorted(path.glob("*/instances.json"))}
    others = sorted([*path.glob("*.json"), *path.glob("annotations/*.json")])
    named = [(names[-1] if (names := SPLIT.findall(file.stem.lower())) else None, file) for file in others]
    if not files and all(split is None for split, _ in named):
        named = [(file.stem, file) for file in others]
    for split, file in named:
        if split in files:
            raise checks.DataError(f"{path}: {files[split]} and {file} are both of split {split!r}; keep one")
        if split is not None:
            files[split] = file
    return dict(sorted(files.items()))


ClipRecord = tuple[Video, list[Picture], str]
"""Record, pictures in order and place in the file of a video."""


def _of_videos(source: Source, file: Path, faults: checks.Faults) -> Iterator[ClipRecord]:
    for key, value in checks.by_id(source.videos, f"{file}: video").items():
        with faults:
            where = f"{file}: video {rle.short(key)}"
            video = checks.record(Video, value, where)
            if video.file_names is None:
                raise checks.DataError(
                    f"{where}: no file_names, and the file has no images; one of them must name the frames"
                )
            pictures = [
                Picture(id=n, file_name=name, video_id=key) for n, name in enumerate(video.file_names)
            ]
            yield video, pictures, where


def _of_images(source: Source, file: Path, faults: checks.Faults) -> Iterator[ClipRecord]:
    listed_videos = checks.by_id(source.videos, f"{file}: video")
    videos: dict[Any, list[Picture]] = defaultdict(list)
    for number, value in checks.by_id(source.images, f"{file}: image").items():
        with faults:
            where = f"{file}: image {rle.short(number)}"
            picture = checks.record(Picture, value, where)
            if listed_videos and picture.video_id not in listed_videos:
                raise checks.DataError(f"{where}: video_id {rle.short(picture.video_id)} is not in videos")
            videos[picture.video_id].append(picture)
    for key, pictures in videos.items():
        with faults:
            where = f"{file}: video {rle.short(key)}"
            video = checks.record(Video, listed_videos.get(key, {"id": key}), where)
            orders = [picture.order for picture in pictures]
            if None in orders or len(set(orders)) != len(orders):
                raise checks.DataError(
                    f"{where}: frame_id (or order_in_video, frame_index) is missing or comes twice; it "
                    "numbers the images"
                )
            yield video, sorted(pictures, key=lambda picture: picture.order), where  # type: ignore[arg-type, return-value]


def _clip(video: Video, pictures: Sequence[Picture], roots: Sequence[Path], where: str) -> Clip:
    names = [picture.file_name for picture in pictures]
    if len(set(names)) != len(names):
        raise checks.DataError(f"{where}: a file comes twice among its frames")
    root = next(
        (r for r in roots if url_of(r, names[0]) or checks.inside(r, names[0], where=where).is_file()),
        None,
    )
    if root is None:
        raise missing("frame", names[0], roots, where=where)
    files = tuple(file_of(root, name, where=where) for name in names)
    media = clip_files.clip_of(files, where, stated=(video.height, video.width))
    for picture in pictures:
        sides = ((picture.height, media.height), (picture.width, media.width))
        if any(stated not in (None, -1, 0, side) for stated, side in sides):
            raise checks.DataError(
                f"{where}: image {rle.short(picture.id)} is said to be of {[picture.height, picture.width]}, "
                f"the frames are of {[media.height, media.width]} (height, width)"
            )
    name = str(video.id) if video.name is None else video.name
    return Clip(name=name, media=media, annotated=[picture.is_det_keyframe for picture in pictures])


def _add_masklet(
    annotation: MaskletAnnotation, category: Any, clip: Clip, where: str, *, faults: checks.Faults
) -> None:
    masks, frames = annotation.segmentations, len(clip.media.frames)
    if len(masks) != frames:
        raise checks.DataError(f"{where}: {len(masks)} segmentations for {frames} frames of {clip.name}")
    clip.annotated = [True] * frames
    clip.category[annotation.id] = category
    for place, mask in enumerate(masks):
        if mask is not None:
            here = f"{where}, frame {place}"
            clip.masks[annotation.id][place] = _mask(mask, clip, here, faults=faults)


def _add_mask(
    annotation: FrameAnnotation, category: Any, clip: Clip, place: int, where: str, *, faults: checks.Faults
) -> None:
    number, shown = annotation.number, rle.short(annotation.number)
    is_joined = number is None
    if is_joined:
        number = f"category {category}"
        clip.joined.add(number)
    if clip.category.setdefault(number, category) != category:
        raise checks.DataError(f"{where}: instance {shown} of {clip.name} had another category_id before")
    shape = outline_or_box(annotation.segmentation, annotation.bbox, where, faults=faults)
    mask = _mask(shape, clip, where, faults=faults)
    if (earlier := clip.masks[number].get(place)) is not None:
        if not is_joined:
            raise checks.DataError(
                f"{where}: instance {shown} comes twice in image {rle.short(annotation.image_id)}"
            )
        mask = rle.union([earlier, mask])
    clip.annotated[place] = True
    clip.masks[number][place] = mask


def _mask(segmentation: Any, clip: Clip, where: str, *, faults: checks.Faults) -> RLE:
    """Decode a mask; one without any outline is empty, as that of an absent object, and counted."""
    try:
        return clip.media.some_mask(segmentation, where, faults=faults)
    except checks.NoPixelError:
        faults.notes["masks have no outline: the object counts as absent"] += 1
        return rle.empty(*clip.media.size)


def _samples(clip: Clip, words: dict[Any, str], *, file: Path) -> list[Sample]:
    by_category: dict[Any, dict[Any, Masklet]] = defaultdict(dict)
    for number, category in clip.category.items():
        where = f"{file}: video {rle.short(clip.name)}, object {rle.short(number)}"
        by_category[category][number] = clip_files.visible(clip.masklet(number), where)
    samples = []
    for category, masklets in by_category.items():
        joined = [place for place, number in enumerate(masklets) if number in clip.joined]
        samples.append(
            clip.media.sample(
                sample_id=f"{clip.name}_{category}",
                image_id=clip.name,
                task="referring",
                text=words[category],
                masks=tuple(masklets.values()),
                meta={"category": words[category], "object_ids": list(masklets)}
                | ({"joined": joined} if joined else {}),
            )
        )
    return samples
