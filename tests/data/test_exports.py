"""Exports written by hand in the formats that COCO, CVAT and Label Studio document -> annotations.json."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from ans_core import rle, transforms
from ans_core.data.exports import import_export
from ans_core.data.exports.label_studio import brush
from ans_core.data.formats import FORMATS, plain
from ans_core.data.formats.checks import DataError
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
    samples = [sample for split in plain.splits(out) for sample in plain.read(out, name="d", split=split)]
    found = {}
    for sample in samples:
        masks = [rle.decode(mask) for (mask,) in sample.masks]
        boxes = [[*np.flatnonzero(m.any(1))[[0, -1]], *np.flatnonzero(m.any(0))[[0, -1]], m.sum()] for m in masks]
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


def test_a_zip_of_cvat_becomes_records_by_label_text_and_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
        ('name="a/cat.png"', 'name="b/dog.png"', r"the picture 'b/dog\.png' is not in .*export with the pictures"),
        ('label="dog" source="semi', 'label="cow" source="semi', r"shapes of one group have the labels \['cow', 'dog'\]"),
        ("</annotations>", "", r"annotations\.xml: line 13: no XML"),
        ("<image id=", "<track id='0'/><image id=", "is of CVAT for video; export the task as"),
        ('xtl="2.00"', 'xtl="two"', "box 0: xtl 'two' is no number"),
        ('rotation="90.0"', 'rotation=""', "box 1: rotation '' is no number"),
        ('left="15"', 'left="inf"', "mask 3: left 'inf' is no number"),
        ('encoding="utf-8"', 'encoding="utf-9"', "unknown encoding: utf-9; export it again"),
    ],
)
def test_a_fault_of_cvat_is_named_by_file_and_place_and_nothing_is_written(tmp_path: Path, before: str, after: str, match: str):
    assert before in CVAT
    file = write(tmp_path, "annotations.xml", CVAT.replace(before, after), "images/a/cat.png", "images/empty.png")
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
    (sample,) = (s for split in plain.splits(tmp_path / "out") for s in FORMATS["annotations"](tmp_path / "out", name="d", split=split))
    ((mask,),) = sample.masks
    assert np.array_equal(rle.decode(mask), shown)
    assert np.array_equal(np.asarray(transforms.open_image(sample.frames[0]))[..., 0] > 0, shown)


def packed(total: int, *runs: tuple[int, int] | list[int]) -> list[int]:
    """Bytes by the description of thi.ng/rle-pack: a run is (length, value), or a list of values one by one; up to 8."""
    bits = f"{total:032b}" + f"{7:05b}" + "".join(f"{size - 1:04b}" for size in (3, 4, 8, 16))
    for run in runs:
        length, values = (len(run), run) if isinstance(run, list) else (run[0], run[1:])
        bits += f"{int(isinstance(run, tuple))}{0:02b}{length - 1:03b}" + "".join(f"{value:08b}" for value in values)
    bits += "0" * (-len(bits) % 8)
    return [int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)]


def test_a_brush_mask_of_label_studio_is_decoded():
    """Pixels of 3 x 2: 0 1 1 / 0 0 1, four channels each."""
    content = packed(24, (4, 0), (8, 255), (8, 0), (4, 255))
    assert brush(content, height=2, width=3, where="here").tolist() == [[False, True, True], [False, False, True]]
    assert content[:7] == [0, 0, 0, 24, 0b00111001, 0b00011011, 0b11111100]  # as exports of Label Studio begin, with 8, 3, 4, 8 and 16 bits
    assert brush(packed(4, [0, 0, 0, 255]), height=1, width=1, where="here").tolist() == [[True]]
    for wrong, match in (
        (content[:-2], "cut or garbled"),
        (packed(20, (4, 0)), "has 20 values; RGBA of 3 x 2"),
        ("x", "not a list of bytes"),
    ):
        with pytest.raises(DataError, match=match):
            brush(wrong, height=2, width=3, where="here")


def region(number: int, kind: str, value: dict, **more: object) -> dict:
    return {"id": f"r{number}", "type": kind, "original_width": W, "original_height": H, "image_rotation": 0, "value": value, **more}


def task(*results: dict, image: str = "/data/upload/1/0a1b2c3d-cat.png", **more: object) -> dict:
    return {"id": 7, "data": {"image": image}, "annotations": [{"id": 1, "was_cancelled": False, "result": list(results)}], **more}


TASKS = [
    task(
        region(0, "rectanglelabels", {"x": 10, "y": 10, "width": 20, "height": 30, "rotation": 0, "rectanglelabels": ["cat"]}),
        region(1, "polygonlabels", {"points": [[50, 0], [70, 0], [70, 20], [50, 20]], "polygonlabels": ["cat"]}),
        region(2, "polygonlabels", {"points": [[80, 0], [90, 0], [90, 20], [80, 20]], "polygonlabels": ["dog"]}),
        region(2, "textarea", {"points": [[80, 0], [90, 0], [90, 20], [80, 20]], "text": ["a dog that sleeps"]}, from_name="caption"),
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
    assert told[1:3] == ["left out: 1 of type keypointlabels, which has no pixels", "left out: 1 tasks without an annotation"]
    twice = TASKS[0] | {"annotations": TASKS[0]["annotations"] * 2}
    for content, match in (
        (twice, "task 7: 2 annotations; mark one of them as ground truth"),
        (task(region(0, "polygonlabels", {"points": [[0, 0], [1]], "polygonlabels": ["a"]})), "region r0: no rectangle, polygon"),
        (task(region(0, "polygonlabels", {"points": [[0, 0], [50, 0], [50, 50]]})), r"region r0: labels \[\] and texts of \[\]"),
        (task(region(0, "polygonlabels", {"points": []}) | {"image_rotation": 90}), "turned by 90 degrees"),
        (TASKS[0] | {"annotations": [None]}, r"task 7: annotations is \[None\], not a list of objects"),
        (TASKS[0] | {"annotations": [{"result": "x"}]}, "task 7, annotation: result is 'x', not a list of objects"),
        (task({"id": "r0", "type": None, "value": None}), r"region r0: value is \['None'\], not an object"),
        (task(region(0, "textarea", {"x": 1, "y": 1, "width": 9, "height": 9, "text": [3]}, from_name="text")), "region r0, text"),
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
    assert imported(tmp_path / "coco", tmp_path / "a") == {("images/cat.png", "referring", "cat"): [[1, 3, 2, 5, 12]]}
    assert "left out: 1 objects without a pixel" in import_export(tmp_path / "coco", tmp_path / "b")
    coco["annotations"].append({"image_id": 1, "category_id": 3, "segmentation": [], "bbox": [10, 2, 4, 3]})  # a rectangle of Label Studio
    write(tmp_path / "coco", "annotations/instances_default.json", coco)
    assert imported(tmp_path / "coco", tmp_path / "e")["images/cat.png", "referring", "cat"] == [[1, 3, 2, 5, 12], [2, 4, 10, 13, 12]]
    coco["annotations"][-1]["bbox"] = [1, 2, None, 3]
    write(tmp_path / "coco", "annotations/instances_default.json", coco)
    with pytest.raises(DataError, match=r"annotation 2: it has no segmentation, and its bbox is .*None.*, not"):
        import_export(tmp_path / "coco", tmp_path / "f")
    upstream = [{"image": "cat.png", "mask": [square, square], "text": ["the cat", "it"]}]
    write(tmp_path / "upstream", "annotations.json", upstream, "images/cat.png")
    assert imported(tmp_path / "upstream", tmp_path / "c") == {
        ("images/cat.png", "referring", text): [[1, 3, 2, 5, 12]] for text in ("the cat", "it")
    }
    write(tmp_path / "upstream", "other.json", coco)
    with pytest.raises(DataError, match=r"holds 2 files with annotations \(annotations\.json, other\.json\)"):
        import_export(tmp_path / "upstream", tmp_path / "d")
    write(tmp_path / "nothing", "readme.json", {})
    with pytest.raises(DataError, match=r"holds no annotations, only \['readme\.json'\]"):
        import_export(tmp_path / "nothing", tmp_path / "d")


def test_a_zip_is_named_by_itself_and_not_by_where_it_was_unpacked(tmp_path: Path):
    def packed_zip(**files: str) -> Path:
        with zipfile.ZipFile(tmp_path / "export.zip", "w") as archive:
            for name, content in files.items():
                archive.writestr(name.replace("_", "."), content)
        return tmp_path / "export.zip"

    with pytest.raises(DataError, match=rf"^{tmp_path}/export\.zip/annotations\.xml: image '0' .* is not in {tmp_path}/export\.zip/images"):
        import_export(packed_zip(annotations_xml=CVAT), tmp_path / "out")
    with pytest.raises(DataError, match=rf"^{tmp_path}/export\.zip holds no annotations, .*of a zip: unpack it first"):
        import_export(packed_zip(a_txt="x"), tmp_path / "out")
    locked = bytearray(packed_zip(annotations_xml=CVAT).read_bytes())
    locked[6] |= 1  # the flag of a password, in both headers
    locked[locked.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "export.zip").write_bytes(locked)
    with pytest.raises(DataError, match=r"export\.zip: .* is encrypted.*; unpack it and give the folder"):
        import_export(tmp_path / "export.zip", tmp_path / "out")
