"""Exports written by hand in the formats that COCO, CVAT and Label Studio document -> annotations.json."""

from __future__ import annotations

import base64
import csv
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from ans_core.data.exports import import_export
from ans_core.data.exports.label_studio import brush
from ans_core.data.formats import FORMATS, SPLITS, infer, plain, training_format
from ans_core.data.formats.checks import DataError
from ans_core.pictures import rle, transforms
from flows import cli

W, H = 20, 10


def write(folder: Path, name: str, content: str | list | dict, *pictures: str) -> Path:
    for picture in pictures:
        (folder / picture).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (W, H), "grey").save(folder / picture)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / name


def imported(source: Path, out: Path) -> dict[tuple[str, str, str], list[list[int]]]:
    """(picture, task, text) -> of each mask [top, bottom, left, right, pixels]."""
    import_export(source, out)
    samples = [sample for split in plain.splits(out) for sample in plain.read(out, split=split)]
    found = {}
    for sample in samples:
        masks = [rle.decode(mask) for (mask,) in sample.masks]
        boxes = [
            [*np.flatnonzero(m.any(1))[[0, -1]], *np.flatnonzero(m.any(0))[[0, -1]], m.sum()] for m in masks
        ]
        found[sample.image_id, sample.task, sample.text] = [[int(number) for number in box] for box in boxes]
    return found


CVAT = """<?xml version="1.0" encoding="utf-8"?>
<annotations><version>1.1</version><meta><task><name>zoo</name></task></meta>
 <image id="0" name="a/cat.png" subset="Validation" width="20" height="10">
  <box label="cat" source="manual" occluded="0" xtl="2.00" ytl="1.00" xbr="6.00" ybr="4.00" z_order="0"></box>
  <box label="cat" source="manual" occluded="0" xtl="4.00" ytl="4.00" xbr="12.00" ybr="6.00" rotation="90.0" z_order="0"></box>
  <polygon label="dog" source="manual" occluded="0" points="10.00,0.00;14.00,0.00;14.00,2.00;10.00,2.00" group_id="1" z_order="0">
   <attribute name="text">the dog behind the fence</attribute></polygon>
  <mask label="dog" source="semi-auto" occluded="0" rle="1, 2, 1, 2" left="15" top="7" width="3" height="2" group_id="1" z_order="0"></mask>
  <points label="eye" points="3.00,2.00" z_order="0"></points>
 </image>
 <image id="1" name="empty.png" width="20" height="10"></image>
</annotations>
"""


def test_a_zip_of_cvat_becomes_records_by_label_text_and_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The turned box covers x 7..9, y 1..9; the mask's run lengths are .## / .## in a box of 3 x 2."""
    write(tmp_path / "cvat", "annotations.xml", CVAT, "images/a/cat.png", "images/empty.png")
    with zipfile.ZipFile(tmp_path / "zoo.zip", "w") as archive:
        for file in (tmp_path / "cvat").rglob("*.*"):
            archive.write(file, file.relative_to(tmp_path / "cvat"))
    arguments = cli.parse(["data", "import", str(tmp_path / "zoo.zip"), "--out", str(tmp_path / "zoo")])
    assert arguments.function(arguments) == 0
    told = capsys.readouterr().out
    assert "1 pictures, 2 referring records, 3 masks" in told
    assert "left out: 1 of type points, which has no pixels" in told
    assert "left out: 1 pictures without a shape" in told
    records = json.loads((tmp_path / "zoo/annotations.json").read_text())
    assert [(record["text"], record["split"], len(record["masks"])) for record in records] == [
        ("cat", "val", 2), ("the dog behind the fence", "val", 1),
    ]  # fmt: skip
    first, second = (rle.decode(mask) for mask in records[0]["masks"])
    assert (first.sum(), first[1:4, 2:6].sum()) == (12, 12)
    assert (second.sum(), second[1:9, 7:9].sum()) == (16, 16)
    (pieces,) = (rle.decode(mask) for mask in records[1]["masks"])
    assert (pieces.sum(), pieces[0:2, 10:14].sum(), pieces[7:9, 16:18].sum()) == (12, 8, 4)
    with pytest.raises(DataError, match="zoo exists; give another folder"):
        import_export(tmp_path / "zoo.zip", tmp_path / "zoo")


@pytest.mark.parametrize(
    ("before", "after", "match"),
    [
        (
            'rle="1, 2, 1, 2"',
            'rle="1, 2, 1, 1"',
            r"image '0' \(a/cat\.png\), mask 3: the lengths of its rle add up to 5, its box has 3 x 2",
        ),
        (
            'width="20" height="10">\n  <box',
            'width="30" height="10">\n  <box',
            r"annotations are of a picture of .*\[10, 30\], the file has",
        ),
        (
            'name="a/cat.png"',
            'name="b/dog.png"',
            r"the picture 'b/dog\.png' is in none of .*export with the pictures",
        ),
        (
            'label="dog" source="semi',
            'label="cow" source="semi',
            r"shapes of one group have the labels \['cow', 'dog'\]",
        ),
        ("</annotations>", "", r"annotations\.xml: no XML .*line 13"),
        ("<image id=", "<track id='0'/><image id=", "is of CVAT for video; export the task as"),
        ('xtl="2.00"', 'xtl="two"', "box 0: xtl 'two' is no number"),
        ('rotation="90.0"', 'rotation=""', "box 1: rotation '' is no number"),
        ('left="15"', 'left="inf"', "mask 3: left 'inf' is no number"),
        ('encoding="utf-8"', 'encoding="utf-9"', "unknown encoding: utf-9.*; export it again"),
    ],
)
def test_a_fault_of_cvat_is_named_by_file_and_place_and_nothing_is_written(
    tmp_path: Path, before: str, after: str, match: str
):
    assert before in CVAT
    file = write(
        tmp_path, "annotations.xml", CVAT.replace(before, after), "images/a/cat.png", "images/empty.png"
    )
    with pytest.raises(DataError, match=match):
        import_export(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_masks_drawn_on_a_picture_that_cvat_shows_upright_lie_right(tmp_path: Path, orientation: int):
    """A white square near a corner of a stored picture of 20 x 10, outlined where CVAT shows it."""
    stored = np.zeros((10, 20), np.uint8)
    stored[1:4, 2:6] = 255
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    (tmp_path / "images").mkdir()
    Image.fromarray(stored).save(tmp_path / "images/a.png", exif=exif)
    shown = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "images/a.png"))) > 0
    rows, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
    box = f'xtl="{columns[0]}" ytl="{rows[0]}" xbr="{columns[-1] + 1}" ybr="{rows[-1] + 1}"'
    height, width = shown.shape
    image = f'<image id="0" name="a.png" width="{width}" height="{height}"><box label="dog" {box}/></image>'
    file = write(tmp_path, "annotations.xml", f"<annotations>{image}</annotations>")
    lines = import_export(file, tmp_path / "out")
    assert any("turned or mirrored by an EXIF tag" in line for line in lines) == (orientation in (2, 3, 4))
    (sample,) = (
        s
        for split in plain.splits(tmp_path / "out")
        for s in FORMATS["annotations"](tmp_path / "out", name="d", split=split)
    )
    ((mask,),) = sample.masks
    assert np.array_equal(rle.decode(mask), shown)
    assert np.array_equal(np.asarray(transforms.open_image(sample.frames[0]))[..., 0] > 0, shown)


def packed(total: int, *runs: tuple[int, int] | list[int]) -> list[int]:
    """Bytes by the description of thi.ng/rle-pack: a run is (length, value), or a list of values one by one;
    up to 8."""
    bits = f"{total:032b}" + f"{7:05b}" + "".join(f"{size - 1:04b}" for size in (3, 4, 8, 16))
    for run in runs:
        length, values = (len(run), run) if isinstance(run, list) else (run[0], run[1:])
        bits += f"{int(isinstance(run, tuple))}{0:02b}{length - 1:03b}" + "".join(
            f"{value:08b}" for value in values
        )
    bits += "0" * (-len(bits) % 8)
    return [int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)]


def test_a_brush_mask_of_label_studio_is_decoded():
    """Pixels of 3 x 2: 0 1 1 / 0 0 1, four channels each."""
    content = packed(24, (4, 0), (8, 255), (8, 0), (4, 255))
    assert brush(content, height=2, width=3, where="here").tolist() == [
        [False, True, True],
        [False, False, True],
    ]
    # as exports of Label Studio begin, with 8, 3, 4, 8 and 16 bits
    assert content[:7] == [0, 0, 0, 24, 0b00111001, 0b00011011, 0b11111100]
    assert brush(packed(4, [0, 0, 0, 255]), height=1, width=1, where="here").tolist() == [[True]]
    for wrong, match in (
        (content[:-2], "cut or garbled"),
        (packed(20, (4, 0)), "has 20 values; RGBA of 3 x 2"),
        ("x", "not a list of bytes"),
    ):
        with pytest.raises(DataError, match=match):
            brush(wrong, height=2, width=3, where="here")


def region(number: int, kind: str, value: dict, **more: object) -> dict:
    return {
        "id": f"r{number}",
        "type": kind,
        "original_width": W,
        "original_height": H,
        "image_rotation": 0,
        "value": value,
        **more,
    }


def task(*results: dict, image: str = "/data/upload/1/0a1b2c3d-cat.png", **more: object) -> dict:
    return {
        "id": 7,
        "data": {"image": image},
        "annotations": [{"id": 1, "was_cancelled": False, "result": list(results)}],
        **more,
    }


TASKS = [
    task(
        region(
            0,
            "rectanglelabels",
            {"x": 10, "y": 10, "width": 20, "height": 30, "rotation": 0, "rectanglelabels": ["cat"]},
        ),
        region(
            1, "polygonlabels", {"points": [[50, 0], [70, 0], [70, 20], [50, 20]], "polygonlabels": ["cat"]}
        ),
        region(
            2, "polygonlabels", {"points": [[80, 0], [90, 0], [90, 20], [80, 20]], "polygonlabels": ["dog"]}
        ),
        region(
            2,
            "textarea",
            {"points": [[80, 0], [90, 0], [90, 20], [80, 20]], "text": ["a dog that sleeps"]},
            from_name="caption",
        ),
        region(3, "keypointlabels", {"x": 10, "y": 10, "width": 1, "keypointlabels": ["eye"]}),
    ),
    {"id": 8, "data": {"image": "none.png"}, "annotations": []},
]


def test_label_studio_becomes_records_with_texts_of_regions_and_names_of_uploads(tmp_path: Path):
    file = write(tmp_path / "project", "project-1.json", TASKS, "images/cat.png")
    assert imported(file, tmp_path / "out") == {
        ("images/cat.png", "referring", "cat"): [[1, 3, 2, 5, 12], [0, 1, 10, 13, 8]],
        ("images/cat.png", "region_caption", "a dog that sleeps"): [[0, 1, 16, 17, 4]],
    }
    told = import_export(file, tmp_path / "again")
    assert told[1:3] == [
        "left out: 1 of type keypointlabels, which has no pixels",
        "left out: 1 tasks without an annotation",
    ]
    twice = TASKS[0] | {"annotations": TASKS[0]["annotations"] * 2}
    for content, match in (
        (twice, "task 7: 2 annotations; mark one of them as ground truth"),
        (
            task(region(0, "polygonlabels", {"points": [[0, 0], [1]], "polygonlabels": ["a"]})),
            "region r0: no rectangle, polygon",
        ),
        (
            task(region(0, "polygonlabels", {"points": [[0, 0], [50, 0], [50, 50]]})),
            r"region r0: labels \[\] and texts of \[\]",
        ),
        (task(region(0, "polygonlabels", {"points": []}) | {"image_rotation": 90}), "turned by 90 degrees"),
        (TASKS[0] | {"annotations": [None]}, r"task 7: annotations is \[None\], not a list of objects"),
        (
            TASKS[0] | {"annotations": [{"result": "x"}]},
            "task 7, annotation: result is 'x', not a list of objects",
        ),
        (task({"id": "r0", "type": None, "value": None}), r"region r0: value is \['None'\], not an object"),
        (
            task(
                region(
                    0, "textarea", {"x": 1, "y": 1, "width": 9, "height": 9, "text": [3]}, from_name="text"
                )
            ),
            "region r0, text",
        ),
    ):
        with pytest.raises(DataError, match=match):
            import_export(write(tmp_path / "project", "project-1.json", [content]), tmp_path / "wrong")


def test_coco_and_upstreams_file_become_what_their_readers_read(tmp_path: Path):
    """As a COCO zip of CVAT is laid out; the second object has no pixel."""
    square = [[2, 1, 6, 1, 6, 4, 2, 4]]
    coco = {
        "images": [{"id": 1, "file_name": "cat.png", "width": W, "height": H}],
        "categories": [{"id": 3, "name": "cat"}],
        "annotations": [
            {"id": number, "image_id": 1, "category_id": 3, "segmentation": shape, "iscrowd": 0}
            for number, shape in enumerate((square, {"size": [H, W], "counts": [H * W]}))
        ],
    }
    write(tmp_path / "coco", "annotations/instances_default.json", coco, "images/default/cat.png")
    assert imported(tmp_path / "coco", tmp_path / "a") == {
        ("images/cat.png", "referring", "cat"): [[1, 3, 2, 5, 12]]
    }
    assert "left out: 1 objects without a pixel" in import_export(tmp_path / "coco", tmp_path / "b")
    # a rectangle of Label Studio
    coco["annotations"].append({"image_id": 1, "category_id": 3, "segmentation": [], "bbox": [10, 2, 4, 3]})
    write(tmp_path / "coco", "annotations/instances_default.json", coco)
    assert imported(tmp_path / "coco", tmp_path / "e")["images/cat.png", "referring", "cat"] == [
        [1, 3, 2, 5, 12],
        [2, 4, 10, 13, 12],
    ]
    del coco["annotations"][-1]["segmentation"]  # boxes alone
    write(tmp_path / "coco", "annotations/instances_default.json", coco)
    import_export(tmp_path / "coco", tmp_path / "g")
    boxes, before = ((tmp_path / name / "annotations.json").read_text() for name in "ge")
    assert boxes == before
    box = coco["annotations"][-1].pop("bbox")
    write(tmp_path / "coco", "annotations/instances_default.json", coco)
    with pytest.raises(DataError, match="annotation 2: it has neither segmentation nor bbox"):
        import_export(tmp_path / "coco", tmp_path / "f")
    coco["annotations"][-1]["bbox"] = [*box[:2], None, 3]
    write(tmp_path / "coco", "annotations/instances_default.json", coco)
    with pytest.raises(
        DataError, match=r"annotation 2: it has no segmentation, and its bbox is .*None.*, not"
    ):
        import_export(tmp_path / "coco", tmp_path / "f")
    upstream = [{"image": "cat.png", "mask": [square, square], "text": ["the cat", "it"]}]
    write(tmp_path / "upstream", "annotations.json", upstream, "images/cat.png")
    assert imported(tmp_path / "upstream", tmp_path / "c") == {
        ("images/cat.png", "referring", text): [[1, 3, 2, 5, 12]] for text in ("the cat", "it")
    }
    write(tmp_path / "upstream", "other.json", coco)
    with pytest.raises(
        DataError,
        match=r"labels of 2 layouts: finetune \(annotations\.json\), coco \(other\.json\); name one with --format",
    ):
        import_export(tmp_path / "upstream", tmp_path / "d")
    write(tmp_path / "nothing", "readme.json", {})
    with pytest.raises(DataError, match=r"holds no labels of coco, .*let the annotation tool export COCO"):
        import_export(tmp_path / "nothing", tmp_path / "d")


def test_a_zip_is_named_by_itself_and_not_by_where_it_was_unpacked(tmp_path: Path):
    def packed_zip(**files: str) -> Path:
        with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name.replace("_", "."), content)
        return tmp_path / "export.zip"

    with pytest.raises(
        DataError,
        match=rf"^{tmp_path}/export\.zip/annotations\.xml: image '0' .* is in none of {tmp_path}/export\.zip/images",
    ):
        import_export(packed_zip(annotations_xml=CVAT), tmp_path / "out")
    with pytest.raises(DataError, match=rf"^{tmp_path}/export\.zip holds no labels of"):
        import_export(packed_zip(a_txt="x"), tmp_path / "out")
    locked = bytearray(packed_zip(annotations_xml=CVAT).read_bytes())
    locked[6] |= 1  # the flag of a password, in both headers
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "export.zip").write_bytes(locked)
    with pytest.raises(DataError, match=r"export\.zip: .* is encrypted.*; unpack it and give the folder"):
        import_export(tmp_path / "export.zip", tmp_path / "out")


CAT, DOG = [2, 1, 6, 1, 6, 4, 2, 4], [10, 0, 14, 0, 14, 2, 10, 2]
"""Rows 1 to 3 of columns 2 to 5; rows 0 and 1 of columns 10 to 13."""
SPLIT_NAMES = ("train", "valid", "test")


def pairs(polygon: list[int]) -> list[list[int]]:
    return [list(point) for point in zip(polygon[::2], polygon[1::2], strict=True)]


def png(array: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(array).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def values(cat: int = 1, dog: int = 2) -> np.ndarray:
    drawn = np.zeros((H, W), np.uint8)
    drawn[1:4, 2:6], drawn[0:2, 10:14] = cat, dog
    return drawn


def save(file: Path, array: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(file)


def coco_content(name: str) -> dict:
    shapes = enumerate((CAT, DOG))
    return {
        "images": [{"id": 0, "file_name": name, "width": W, "height": H}],
        "categories": [
            {"id": 0, "name": "animals", "supercategory": "none"},
            {"id": 1, "name": "cat"},
            {"id": 2, "name": "dog"},
        ],
        "annotations": [
            {"id": n, "image_id": 0, "category_id": n + 1, "segmentation": [p], "iscrowd": 0}
            for n, p in shapes
        ],
    }


def roboflow(folder: Path) -> None:
    for split in SPLIT_NAMES:
        write(
            folder,
            f"{split}/_annotations.coco.json",
            coco_content(f"{split}_jpg.rf.1.jpg"),
            f"{split}/{split}_jpg.rf.1.jpg",
        )


def cvat_project(folder: Path) -> None:
    for subset in ("Train", "Validation", "Test"):
        write(folder, f"annotations/instances_{subset}.json", coco_content("a.jpg"), f"images/{subset}/a.jpg")


def cvat_xml(folder: Path) -> None:
    images = [
        f'<image id="{n}" name="a.png" subset="{subset}" width="20" height="10"><polygon label="cat" points="2,1;6,1;6,4;2,4"/>'
        '<mask label="dog" rle="0, 8" left="10" top="0" width="4" height="2"/></image>'
        for n, subset in enumerate(("Train", "Validation", "Test"))
    ]
    places = [f"images/{subset}/a.png" for subset in ("Train", "Validation", "Test")]
    write(folder, "annotations.xml", f"<annotations>{''.join(images)}</annotations>", *places)


def labelme(folder: Path, *, flat: bool = False) -> None:
    """In folders pictures lie elsewhere, by paths of Windows; the dog is a mask of its box, in pieces of one
    group."""
    for split in SPLIT_NAMES:
        drawn = [
            {"label": "cat", "points": [[2, 1], [6, 4]], "shape_type": "rectangle", "group_id": None},
            {
                "label": "dog",
                "points": [[10, 0], [11, 1]],
                "shape_type": "mask",
                "mask": png(np.ones((2, 2), np.uint8)),
                "group_id": 4,
            },
            {
                "label": "dog",
                "points": pairs([12, 0, 14, 0, 14, 2, 12, 2]),
                "shape_type": "polygon",
                "group_id": 4,
            },
            {"label": "eye", "points": [[3, 3]], "shape_type": "point"},
        ]
        picture = f"{split}.jpg" if flat else f"..\\\\images\\\\{split}.jpg".replace("\\\\", "\\")
        content = {
            "version": "5.4.1",
            "shapes": drawn,
            "imagePath": picture,
            "imageData": None,
            "imageHeight": H,
            "imageWidth": W,
        }
        write(
            folder,
            f"{split}.json" if flat else f"{split}/{split}.json",
            content,
            f"{split}.jpg" if flat else f"images/{split}.jpg",
        )


def labelme_flat(folder: Path) -> None:
    labelme(folder, flat=True)


def yolo(folder: Path) -> None:
    """As Roboflow writes it, with paths that are one folder too high; the cat is a box."""
    x, y = (np.array(DOG[start::2]) / side for start, side in ((0, W), (1, H)))
    lines = ["0 0.2 0.25 0.2 0.3", " ".join(map(str, [1, *np.stack([x, y], 1).ravel()]))]
    for split in SPLIT_NAMES:
        write(
            folder,
            f"{split}/labels/a.txt",
            "\n".join(lines),
            f"{split}/images/a.jpg",
            f"{split}/images/empty.jpg",
        )
    write(
        folder,
        "data.yaml",
        "train: ../train/images\nval: ../valid/images\ntest: ../test/images\nnc: 2\nnames: [cat, dog]\n",
    )


def ultralytics(folder: Path) -> None:
    for name, split in (("one", "train"), ("two", "val"), ("three", "test")):
        lines = "\n".join(
            f"{n} " + " ".join(str(v / (W, H)[i % 2]) for i, v in enumerate(p))
            for n, p in enumerate((CAT, DOG))
        )
        write(folder, f"labels/{name}/{split}.txt", lines, f"images/{name}/{split}.jpg")
    write(
        folder,
        "data.yaml",
        "path: .\ntrain: images/one\nval: images/two\ntest: images/three\nnames:\n  0: cat\n  1: dog\n",
    )


def voc(folder: Path) -> None:
    """Boxes and lists of the splits; the dog's box is from SegmentationObject."""
    box = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
    for split in ("train", "val", "test"):
        objects = box.format("cat", 3, 2, 6, 4) + box.format("dog", 9, 1, 14, 3)
        text = f"<annotation><filename>old.jpg</filename><size><width>{W}</width><height>{H}</height></size>{objects}</annotation>"
        write(folder, f"Annotations/{split}_1.xml", text, f"JPEGImages/{split}_1.jpg")
        save(folder / f"SegmentationObject/{split}_1.png", values())
        write(folder, f"ImageSets/Main/{split}.txt", f"{split}_1\n")


def masks(folder: Path) -> None:
    drawn = values()
    drawn[9] = 255  # void
    for split in ("train", "val", "test"):
        write(folder, "classes.txt", "background\ncat\ndog\n", f"images/{split}/a.jpg")
        save(folder / f"masks/{split}/a.png", drawn)


def roboflow_masks(folder: Path) -> None:
    for split in SPLIT_NAMES:
        write(
            folder,
            f"{split}/_classes.csv",
            "Pixel Value, Class\n0, background\n1, cat\n2, dog\n",
            f"{split}/a.jpg",
        )
        save(folder / f"{split}/a_mask.png", values())


def supervisely(folder: Path) -> None:
    dog = base64.b64encode(zlib.compress(base64.b64decode(png(np.ones((2, 4), bool))))).decode()
    for split in ("train", "val", "test"):
        objects = [
            {
                "classTitle": "cat",
                "geometryType": "polygon",
                "points": {"exterior": pairs(CAT), "interior": []},
            },
            {"classTitle": "dog", "geometryType": "bitmap", "bitmap": {"data": dog, "origin": [10, 0]}},
            {"classTitle": "eye", "geometryType": "point", "points": {"exterior": [[1, 1]], "interior": []}},
        ]
        labels = {"description": "", "size": {"height": H, "width": W}, "tags": [], "objects": objects}
        write(folder, f"{split}/ann/a.jpg.json", labels, f"{split}/img/a.jpg")
    write(folder, "meta.json", {"classes": [{"title": "cat", "shape": "polygon"}], "tags": []})


def via(folder: Path) -> None:
    """A project (version 2), the exported annotations, and those of version 1."""
    dog = {"name": "rect", "x": 10, "y": 0, "width": 4, "height": 2}
    for split in ("train", "val", "test"):
        drawn = [
            ({"name": "polygon", "all_points_x": CAT[::2], "all_points_y": CAT[1::2]}, {"label": "cat"}),
            (dog, {"label": {"dog": True}}),
        ]
        regions = [
            {"shape_attributes": shape, "region_attributes": attributes} for shape, attributes in drawn
        ]
        pictures = {"a.jpg123": {"filename": "a.jpg", "size": 123, "file_attributes": {}, "regions": regions}}
        if split == "val":
            pictures["a.jpg123"]["regions"] = {str(number): region for number, region in enumerate(regions)}
        content = {"_via_settings": {}, "_via_img_metadata": pictures} if split == "train" else pictures
        write(folder, f"{split}/via_{split}.json", content, f"{split}/a.jpg")


def panoptic(folder: Path) -> None:
    for split in ("train", "val", "test"):
        ids = values(cat=7, dog=9)
        # the dog: 9 + 256
        save(folder / f"annotations/panoptic_{split}2017/a.png", np.stack([ids, ids // 9, ids * 0], 2))
        segments = [{"id": 7, "category_id": 1}, {"id": 9 + 256, "category_id": 2}]
        content = coco_content("a.jpg") | {
            "annotations": [{"image_id": 0, "file_name": "a.png", "segments_info": segments}]
        }
        write(folder, f"annotations/panoptic_{split}2017.json", content, f"{split}2017/a.jpg")


LAYOUTS = (
    roboflow, cvat_project, cvat_xml, labelme, yolo, ultralytics, voc, masks, roboflow_masks, supervisely, via, panoptic
)  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_is_recognised_and_imported_with_its_splits(
    tmp_path: Path, layout: Callable[[Path], None]
):
    layout(tmp_path / "set")
    lines = import_export(tmp_path / "set", tmp_path / "out")
    assert "pictures by split: test 1, train 1, val 1 (as the export has them)" in lines
    for split in ("train", "val", "test"):
        samples = list(plain.read(tmp_path / "out", split=split))
        assert {sample.text: rle.decode(mask).tolist() for sample in samples for (mask,) in sample.masks} == {
            "cat": (values() == 1).tolist(), "dog": (values() == 2).tolist()
        }  # fmt: skip
    if layout in (roboflow, cvat_project):  # training reads it as it is
        assert infer(tmp_path / "set") == training_format(tmp_path / "set") == "coco"
        assert SPLITS["coco"](tmp_path / "set") == ["test", "train", "val"]
        assert [sample.text for sample in FORMATS["coco"](tmp_path / "set", name="d", split="val")] == [
            "cat",
            "dog",
        ]
        return
    with pytest.raises(
        DataError, match=f"layout {infer(tmp_path / 'set')!r}: `ans data import {tmp_path}/set --out DIR`"
    ):
        training_format(tmp_path / "set")
    assert training_format(tmp_path / "out") == "annotations"


def test_a_flat_folder_of_labelme_has_one_picture_in_five_held_out(tmp_path: Path):
    """sha256 of images/train.jpg, valid.jpg and test.jpg, modulo 5."""
    labelme_flat(tmp_path / "set")
    held_out = [
        f"images/{name}.jpg" for name in SPLIT_NAMES if plain.split_by_image(f"images/{name}.jpg") == "val"
    ]
    lines = import_export(tmp_path / "set", tmp_path / "out")
    assert "left out: 3 of type point, which has no pixels" in lines
    val = f", val {len(held_out)}" if held_out else ""
    assert (
        f'pictures by split: train {3 - len(held_out)}{val} (the export has no "val": one picture in five by a hash of its name)'
        in lines
    )


def test_colours_and_objects_of_cvats_segmentation_masks_are_read(tmp_path: Path):
    """Two cats beside each other, which only the colours of SegmentationObject part; the split is in a list
    of ImageSets."""
    classes, objects = np.zeros((H, W, 3), np.uint8), np.zeros((H, W, 3), np.uint8)
    classes[1:4, 2:8], objects[1:4, 2:5], objects[1:4, 5:8] = (250, 50, 83), (1, 0, 0), (0, 1, 0)
    classes[8], objects[8] = (224, 224, 192), (224, 224, 192)
    write(
        tmp_path / "cvat",
        "labelmap.txt",
        "# label:color_rgb:parts:actions\nbackground:0,0,0::\ncat:250,50,83::\n",
        "JPEGImages/a.jpg",
    )
    save(tmp_path / "cvat/SegmentationClass/a.png", classes)
    save(tmp_path / "cvat/SegmentationObject/a.png", objects)
    write(tmp_path / "cvat", "ImageSets/Segmentation/Validation.txt", "a\n")
    assert imported(tmp_path / "cvat", tmp_path / "out") == {
        ("images/a.jpg", "referring", "cat"): [[1, 3, 2, 4, 9], [1, 3, 5, 7, 9]]
    }
    assert plain.splits(tmp_path / "out") == ["val"]


def test_masks_of_0_and_255_mean_the_one_class_and_values_without_a_name_are_faults(tmp_path: Path):
    binary = {("images/a.jpg", "referring", "cat"): [[1, 3, 2, 5, 12]]}
    for number, names in enumerate(("background\ncat\n", "cat\n")):
        write(tmp_path / "set", "classes.txt", names, "images/a.jpg")
        save(tmp_path / "set/masks/a.png", values(cat=255, dog=0))
        assert imported(tmp_path / "set", tmp_path / f"out{number}") == binary
    save(tmp_path / "set/masks/a.png", values(cat=127, dog=255))
    with pytest.raises(
        DataError, match=r"masks/a\.png: values \[127\] are no class of classes\.txt, which has .*cat"
    ):
        import_export(tmp_path / "set", tmp_path / "out")
    (tmp_path / "set/classes.txt").unlink()
    with pytest.raises(
        DataError, match=r"masks: the values of its masks have no names; write classes\.txt beside the folder"
    ):
        import_export(tmp_path / "set", tmp_path / "out")


@pytest.mark.parametrize(
    ("layout", "file", "before", "after", "match"),
    [
        (labelme, "train/train.json", '"cat"', '" "', "shape 0, label: the text is ' '"),
        (labelme, "train/train.json", '[[10, 0], [11, 1]]', '[[19, 0], [20, 1]]', r"shape 1: its box .* at \[19, 0\] leaves"),
        (labelme, "train/train.json", 'train.jpg"', 'gone.jpg"', r"train\.json: the picture 'gone\.jpg' is in none of"),
        (yolo, "valid/labels/a.txt", "0 0.2", "7 0.2", r"valid/labels/a\.txt: line 1: class 7 is not in data\.yaml, which has \[0, 1\]"),
        (yolo, "valid/labels/a.txt", "0.25", "25", "line 1: coordinates from .* shares of the sides"),
        (yolo, "valid/labels/a.txt", " 0.3", "", "line 1: 3 numbers after class 0"),
        (yolo, "data.yaml", "[cat, dog]", "{cat: 0, dog: 1}", "no `names`, a list of the classes, or number: class"),
        (yolo, "data.yaml", "nc: 2", "kpt_shape: [17, 3]", "is of keypoints"),
        (voc, "Annotations/val_1.xml", "<width>20", "<width>30", r"val_1\.xml: the annotations are of a picture of .*30"),
        (supervisely, "val/ann/a.jpg.json", '"origin": [10, 0]', '"origin": [18, 0]', "object 1: its box of .* leaves the picture"),
        (via, "train/via_train.json", '"width": 4', '"width": null', r"'a\.jpg123', region 1: rect has .* not numbers"),
        (via, "train/via_train.json", '{"label": "cat"}', "{}", r"region 0: which of its attributes \[\] is the label"),
        (panoptic, "annotations/panoptic_val2017.json", '"category_id": 1', '"category_id": 5', "annotation 0: category_id 5 is in no"),
    ],
)  # fmt: skip
def test_a_fault_of_a_layout_is_named_by_file_and_place(
    tmp_path: Path, layout: Callable, file: str, before: str, after: str, match: str
):
    layout(tmp_path / "set")
    content = (tmp_path / "set" / file).read_text()
    assert before in content
    (tmp_path / "set" / file).write_text(content.replace(before, after))
    with pytest.raises(DataError, match=match):
        import_export(tmp_path / "set", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_bitmap_of_supervisely_has_a_palette_whose_background_is_transparent(tmp_path: Path):
    """The mask is value 1; as its writer saves it, and as one that paints the object black."""
    for name, palette in (("one", [0, 0, 0, 255, 255, 255]), ("two", [255, 255, 255, 0, 0, 0])):
        picture, file = Image.fromarray(np.array([[1, 0, 1]], np.uint8)), io.BytesIO()
        picture.putpalette(palette)
        picture.save(file, "PNG", transparency=0)
        dog = base64.b64encode(zlib.compress(file.getvalue())).decode()
        drawn = {"classTitle": "dog", "geometryType": "bitmap", "bitmap": {"data": dog, "origin": [10, 0]}}
        labels = {"size": {"height": H, "width": W}, "tags": [], "objects": [drawn]}
        write(tmp_path / name, "train/ann/a.jpg.json", labels, "train/img/a.jpg")
        found = imported(tmp_path / name, tmp_path / f"out_{name}")
        assert list(found.values()) == [[[0, 0, 10, 12, 2]]]


def test_a_box_of_pascal_voc_counts_from_one_and_includes_its_last_pixels(tmp_path: Path):
    """The second is of a tool that counts from 0."""
    box = "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>"
    objects = box.format("all", 1, 1, W, H) + box.format("cat", 0, 0, 3, 2)
    write(tmp_path / "set", "Annotations/a.xml", f"<annotation>{objects}</annotation>", "JPEGImages/a.jpg")
    assert list(imported(tmp_path / "set", tmp_path / "out").values()) == [
        [[0, 9, 0, 19, W * H]],
        [[0, 1, 0, 2, 6]],
    ]


def test_a_picture_that_two_files_of_one_split_label_has_each_object_once(tmp_path: Path):
    for name in ("instances_default.json", "person_keypoints_default.json"):
        write(tmp_path / "set", f"annotations/{name}", coco_content("a.jpg"), "images/a.jpg")
    both = imported(tmp_path / "set", tmp_path / "both")
    assert both == {
        ("images/a.jpg", "referring", "cat"): [[1, 3, 2, 5, 12]],
        ("images/a.jpg", "referring", "dog"): [[0, 1, 10, 13, 8]],
    }


def test_shares_of_a_picture_that_tools_show_turned_are_of_the_shown_sides(tmp_path: Path):
    """EXIF 6: the stored 20 x 10 is shown as 10 x 20, turned clockwise; stored (x, y) is shown at (9 - y,
    x)."""
    write(tmp_path / "set", "data.yaml", "names: [cat]\n", "images/a.jpg")
    write(tmp_path / "set", "labels/a.txt", "0 0.25 0.2 0.3 0.2\n")  # shown: columns 1 to 3 of rows 2 to 5
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (W, H), "grey").save(tmp_path / "set/images/a.jpg", exif=exif)
    assert imported(tmp_path / "set", tmp_path / "out") == {
        ("images/a.jpg", "referring", "cat"): [[6, 8, 2, 5, 12]]
    }


def test_backslashes_in_a_zip_are_folders_and_masks_without_words_are_refused(tmp_path: Path):
    roboflow(tmp_path / "set")
    with zipfile.ZipFile(tmp_path / "windows.zip", "w") as archive:
        for file in (tmp_path / "set").rglob("*.*"):
            archive.write(file, str(file.relative_to(tmp_path / "set")).replace("/", "\\"))
    assert "pictures by split: test 1, train 1, val 1 (as the export has them)" in import_export(
        tmp_path / "windows.zip", tmp_path / "out"
    )
    sam = {"image": {"image_id": 1, "width": W, "height": H, "file_name": "a.jpg"}, "annotations": []}
    write(tmp_path / "sam", "train/a.json", sam, "train/a.jpg")
    for read in (infer, lambda place: import_export(place, tmp_path / "out2")):
        with pytest.raises(
            DataError,
            match=r"train/a\.json has masks without classes or texts.* export COCO segmentation instead",
        ):
            read(tmp_path / "sam")


def test_other_tools_files_are_not_taken_for_formats_of_the_same_file_names(tmp_path: Path):
    write(tmp_path / "coco", "annotations.json", coco_content("a.jpg"), "images/a.jpg")
    write(tmp_path / "splits", "train.json", coco_content("a.jpg"), "train/a.jpg")
    write(tmp_path / "splits", "val.json", coco_content("b.jpg"), "val/b.jpg")
    for name, splits in (("coco", ["train"]), ("splits", ["train", "val"])):
        with pytest.raises(DataError, match=f"layout 'coco': `ans data import {tmp_path / name} --out DIR`"):
            infer(tmp_path / name)
        import_export(tmp_path / name, tmp_path / f"{name}-out")
        assert {*plain.splits(tmp_path / f"{name}-out")} <= {*splits, "val"}
    with pytest.raises(DataError, match="coco-out is in our own format already: `ans data check"):
        import_export(tmp_path / "coco-out", tmp_path / "again")
    # as published beside the instances
    write(tmp_path / "coco", "captions.json", coco_content("a.jpg") | {"categories": []})
    import_export(tmp_path / "coco", tmp_path / "again")
    write(tmp_path / "unknown", "notes.txt", "x", "a.jpg")
    with pytest.raises(
        DataError, match=r"no known annotations in it, but \['a\.jpg', 'notes\.txt'\]"
    ) as caught:
        infer(tmp_path / "unknown")
    assert len(str(caught.value)) < 500 + len(str(tmp_path))


def test_lists_of_classes_belong_to_yolo_or_masks_by_what_is_beside_them(tmp_path: Path):
    """Label Studio's YOLO has classes.txt alone, others put it to the labels; CVAT's Pascal VOC has a
    labelmap.txt without masks."""
    for number, place in enumerate(("classes.txt", "labels/classes.txt")):
        write(tmp_path / f"yolo{number}", "labels/a.txt", "0 0.2 0.25 0.2 0.3\n", "images/a.jpg")
        write(tmp_path / f"yolo{number}", place, "cat\n")
        assert imported(tmp_path / f"yolo{number}", tmp_path / f"out{number}") == {
            ("images/a.jpg", "referring", "cat"): [[1, 3, 2, 5, 12]]
        }
    voc(tmp_path / "voc")
    write(tmp_path / "voc", "labelmap.txt", "background:0,0,0::\ncat:1,2,3::\n")
    assert infer(tmp_path / "voc") == "voc"
    write(tmp_path / "test", "a.json", {"shapes": [], "imagePath": "a.jpg"}, "a.jpg")
    with pytest.raises(DataError, match=r"no mask in it \(1 pictures without a shape"):
        import_export(tmp_path / "test", tmp_path / "out")


def test_a_split_without_objects_does_not_stop_the_others(tmp_path: Path):
    via(tmp_path / "set")
    file = tmp_path / "set/test/via_test.json"
    content = json.loads(file.read_text())
    content["a.jpg123"]["regions"] = []
    file.write_text(json.dumps(content))
    lines = import_export(tmp_path / "set", tmp_path / "out")
    assert "left out: 1 pictures without a region" in lines
    assert "pictures by split: train 1, val 1 (as the export has them)" in lines


def test_what_a_mac_adds_to_an_archive_is_no_label_file(tmp_path: Path):
    write(tmp_path / "yolo", "labels/a.txt", "0 0.2 0.25 0.2 0.3\n", "images/a.jpg")
    write(tmp_path / "yolo", "classes.txt", "cat\n")
    for place in ("__MACOSX/labels/._a.txt", "labels/._a.txt"):
        write(tmp_path / "yolo", place, "\0\5\x16\7")
    assert imported(tmp_path / "yolo", tmp_path / "out") == {
        ("images/a.jpg", "referring", "cat"): [[1, 3, 2, 5, 12]]
    }


def test_an_empty_line_of_classes_is_a_class_without_a_name(tmp_path: Path):
    write(tmp_path / "yolo", "labels/a.txt", "2 0.2 0.25 0.2 0.3\n", "images/a.jpg")
    write(tmp_path / "yolo", "classes.txt", "dog\n\ncat\n\n")
    assert imported(tmp_path / "yolo", tmp_path / "out") == {
        ("images/a.jpg", "referring", "cat"): [[1, 3, 2, 5, 12]]
    }
    masks(tmp_path / "masks")
    write(tmp_path / "masks", "classes.txt", "background\n\ndog\n")
    with pytest.raises(DataError, match=r"a\.png: values \[1\] are no class of classes\.txt"):
        import_export(tmp_path / "masks", tmp_path / "none")


@pytest.mark.parametrize("before", ["images/", "./images/", "/home/u/set/images/", "..\\set\\images\\"])
def test_yolos_lists_of_pictures_tell_the_split(tmp_path: Path, before: str):
    one = tmp_path / "one"
    for name in ("a", "b", "c", "d"):
        write(one, f"labels/{name}.txt", "0 0.2 0.25 0.2 0.3\n", f"images/{name}.jpg")
    write(one, "data.yaml", "train: train.txt\nval: val.txt\ntest: test.txt\nnames: [cat]\n")
    write(one, "train.txt", f"{before}a.jpg\n{before}b.jpg\n")
    with pytest.raises(DataError, match=r"val of data\.yaml is val\.txt, which is not there"):
        import_export(one, tmp_path / "none")
    write(one, "val.txt", f"{before}c.jpg\n")
    lines = import_export(one, tmp_path / "out")
    assert "pictures by split: train 2, val 1 (as the export has them)" in lines
    assert "left out: 1 pictures that no list of data.yaml names" in lines
    assert [sample.image_id for sample in plain.read(tmp_path / "out", split="val")] == ["images/c.jpg"]


def test_masks_of_classes_that_were_smoothed_are_refused(tmp_path: Path):
    """Bilinear scaling draws rims of other classes around each object."""
    write(tmp_path / "set", "classes.txt", "\n".join(["background", *"bcdefghij"]), "images/a.jpg")
    small = np.zeros((H // 2, W // 2), np.uint8)
    small[1:4, 2:7] = 9
    for how, wrong in ((Image.Resampling.BILINEAR, True), (Image.Resampling.NEAREST, False)):
        save(tmp_path / "set/masks/a.png", np.array(Image.fromarray(small).resize((W, H), how)))
        if wrong:
            with pytest.raises(DataError, match=r"a\.png holds .* were scaled with interpolation"):
                import_export(tmp_path / "set", tmp_path / "none")
    assert [text for _, _, text in imported(tmp_path / "set", tmp_path / "out")] == ["j"]


def test_one_mask_of_thin_things_stops_no_set(tmp_path: Path):
    write(tmp_path / "set", "classes.txt", "\n".join(["background", *"bcdefghij"]))
    thick = np.zeros((H, W), np.uint8)
    thick[2:8, 2:8] = 1
    thin = np.zeros((H, W), np.uint8)
    thin[[1, 4, 7]] = [[3], [5], [9]]
    for name, mask in (("a", thick), ("b", thick), ("c", thin)):
        write(tmp_path / "set", "notes.txt", "", f"images/{name}.jpg")
        save(tmp_path / f"set/masks/{name}.png", mask)
    assert {text for _, _, text in imported(tmp_path / "set", tmp_path / "out")} == {"b", "d", "f", "j"}


@pytest.mark.parametrize("suffix", [".gif", ".tif", ".bmp"])
def test_masks_of_other_kinds_than_png_are_read(tmp_path: Path, suffix: str):
    """Carvana's masks are GIFs, `<picture>_mask.gif`."""
    write(tmp_path / "set", "classes.txt", "background\ncat\ndog\n", "images/a.jpg")
    save(tmp_path / f"set/masks/a_mask{suffix}", values())
    assert {text for _, _, text in imported(tmp_path / "set", tmp_path / "out")} == {"cat", "dog"}


def test_vias_csv_says_what_its_json_says(tmp_path: Path):
    via(tmp_path / "json")
    content = json.loads((tmp_path / "json/test/via_test.json").read_text())["a.jpg123"]
    (tmp_path / "csv").mkdir()
    shutil.copy(tmp_path / "json/test/a.jpg", tmp_path / "csv/a.jpg")
    with (tmp_path / "csv/via.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        names = ["filename", "file_size", "file_attributes", "region_count"]
        rows.writerow([*names, "region_id", "region_shape_attributes", "region_attributes"])
        for number, region in enumerate(content["regions"]):
            parts = [json.dumps(region[key]) for key in ("shape_attributes", "region_attributes")]
            rows.writerow(["a.jpg", 123, "{}", 2, number, *parts])
        rows.writerow(["b.jpg", 123, "{}", 0, 0, "{}", "{}"])
    shutil.rmtree(tmp_path / "json/train")
    shutil.rmtree(tmp_path / "json/val")
    expected = imported(tmp_path / "json", tmp_path / "out")
    assert len(expected) == 2
    assert imported(tmp_path / "csv", tmp_path / "out2") == expected
    with (tmp_path / "csv/via.csv").open("a") as file:
        file.write('a.jpg,123,{},2,2,{"name,{}\n')
    with pytest.raises(DataError, match=r"via\.csv: line 5 has no filename, .*export it again"):
        import_export(tmp_path / "csv", tmp_path / "none")
    table = list(csv.reader((tmp_path / "csv/via.csv").read_text().splitlines()[:-1]))
    with (tmp_path / "csv/via.csv").open(
        "w", newline=""
    ) as file:  # as a spreadsheet saves it in many countries
        csv.writer(file, delimiter=";").writerows(table)
    assert imported(tmp_path / "csv", tmp_path / "out3") == expected


def test_labels_whose_pictures_are_missing_are_a_fault(tmp_path: Path):
    ultralytics(tmp_path / "one")
    (tmp_path / "one/images/one/train.jpg").unlink()
    with pytest.raises(DataError, match=r"labels/one/train\.txt and 0 more have no picture of their name"):
        import_export(tmp_path / "one", tmp_path / "out")
    ultralytics(tmp_path / "all")
    shutil.rmtree(tmp_path / "all/images")
    with pytest.raises(DataError, match="3 label files, and no picture; export the pictures, too"):
        import_export(tmp_path / "all", tmp_path / "out")
    masks(tmp_path / "masks")
    (tmp_path / "masks/images/val/a.jpg").unlink()
    with pytest.raises(DataError, match=r"masks/val/a\.png and 0 more masks have no picture of their name"):
        import_export(tmp_path / "masks", tmp_path / "out")


def test_masks_beside_their_pictures_are_read_and_jpeg_masks_are_not(tmp_path: Path):
    write(tmp_path / "beside", "classes.txt", "background\ncat\ndog\n", "a.jpg")
    save(tmp_path / "beside/a_mask.png", values())
    assert {text for _, _, text in imported(tmp_path / "beside", tmp_path / "out")} == {"cat", "dog"}
    write(tmp_path / "jpeg", "classes.txt", "background\ncat\n", "images/a.jpg", "masks/a.jpg")
    with pytest.raises(
        DataError, match=r"no picture has a label file .*masks are PNGs \(not JPEGs\) in masks/"
    ):
        import_export(tmp_path / "jpeg", tmp_path / "none")


def test_notes_beside_the_labels_are_no_fault_of_theirs(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    yolo(tmp_path / "set")
    (tmp_path / "set/notes.json").write_text("// who labelled what\n{}")
    imported(tmp_path / "set", tmp_path / "out")
    assert "not read: " in caplog.text
    assert "notes.json" in caplog.text
