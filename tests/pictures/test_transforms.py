from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image, ImageOps

from ans_core.pictures import transforms
from tests.golden import GOLDEN, arrays, error, needs_golden


def picture(array: torch.Tensor) -> Image.Image:
    return Image.fromarray(array.numpy())


# Tiling


@needs_golden
def test_tiling_of_all_3252_golden_sizes_equals_upstreams():
    cases = np.load(GOLDEN / "misc" / "tiling_grid_w_h_cols_rows.npy")
    assert len(cases) == 3252
    wrong = [
        case
        for case in cases.tolist()
        if transforms.tiling(case[0], case[1], size=448, max_tiles=12) != (case[2], case[3])
    ]
    assert wrong == []


@needs_golden
def test_tiling_with_other_tile_limits_equals_upstreams():
    cases = json.loads((GOLDEN / "misc" / "dynamic_tiling.json").read_text())
    assert {case["max_num"] for case in cases} == {1, 6, 12}
    for case in cases:
        columns, rows = transforms.tiling(case["width"], case["height"], size=448, max_tiles=case["max_num"])
        assert (columns, rows) == (case["cols"], case["rows"]), case
        assert columns * rows + (columns * rows > 1) == case["n_images"], case


@needs_golden
def test_the_candidate_tilings_come_in_upstreams_order():
    expected = json.loads((GOLDEN / "misc" / "target_ratios_max12_iteration_order.json").read_text())
    assert [list(ratio) for ratio in transforms.tiling_ratios(12)] == expected


def test_tiles_are_cut_row_by_row_with_the_whole_image_last():
    """2 columns x 1 row: a left red and a right blue half, so the tiles are red, blue, and both."""
    image = Image.new("RGB", (8, 4), (255, 0, 0))
    image.paste((0, 0, 255), (4, 0, 8, 4))
    left, right, whole = transforms.tiles(image, size=4, max_tiles=12)
    assert left.getpixel((0, 0)) == (255, 0, 0)
    assert right.getpixel((3, 3)) == (0, 0, 255)
    assert whole.size == (4, 4)
    assert whole.getpixel((0, 0))[0] > 200 > 55 > whole.getpixel((0, 0))[2]


def test_a_square_image_is_one_tile_without_thumbnail():
    assert len(transforms.tiles(Image.new("RGB", (5, 5)), size=4, max_tiles=12)) == 1


# Pixels


@needs_golden
def test_tiles_of_448_are_normalised_as_upstreams():
    golden = arrays("misc/preprocess")
    pixels = transforms.normalise(
        transforms.tiles(picture(golden["image_uint8"]), size=448, max_tiles=12), size=448
    )
    assert len(pixels) == int(golden["n_tiles"])
    assert error(pixels[:, :, ::8, ::8], golden["tiles_ds8"]) < 1e-6
    assert error(pixels.mean((2, 3)), golden["tiles_mean"]) < 1e-5
    assert error(pixels[0, :, 100], golden["tile0_row100"]) < 1e-6
    assert error(pixels[-1, :, 100], golden["thumb_row100"]) < 1e-6


@needs_golden
def test_sam2s_picture_is_resized_as_upstreams():
    golden = arrays("misc/preprocess")
    pixels = transforms.normalise([picture(golden["image_uint8"])], size=1024)[0]
    mean, std = (torch.tensor(c).view(3, 1, 1) for c in (transforms.MEAN, transforms.STD))
    bytes_ = ((pixels * std + mean) * 255).round().to(torch.uint8).permute(1, 2, 0)
    assert torch.equal(bytes_[::8, ::8], golden["direct_resize_1024_ds8"])
    assert torch.equal(bytes_[500], golden["direct_resize_row500"])


@needs_golden
@pytest.mark.parametrize(("constants", "name"), [(torch.float32, "f32const"), (torch.bfloat16, "bf16const")])
def test_both_kinds_of_constants_equal_upstreams(constants: torch.dtype, name: str):
    frame = arrays("qwen2/inputs")["g_frames_uint8"][0].permute(1, 2, 0)
    pixels = transforms.normalise([picture(frame)], size=256, constants=constants)[0]
    assert error(pixels[:, ::4, ::4], arrays("qwen2/outputs")[f"g_pixel_values_{name}_frame0_ds4"]) < 1e-6


@needs_golden
def test_an_image_reaches_both_encoders_as_in_upstreams_prediction():
    inputs, outputs = arrays("qwen2/inputs"), arrays("qwen2/outputs")
    image = picture(inputs["pf_image_uint8"])
    tiles = transforms.normalise(transforms.tiles(image, size=112, max_tiles=12), size=112)
    assert error(tiles[:, :, ::4, ::4], outputs["pf_image_pixel_values_ds4"]) < 1e-6
    for constants, same in ((torch.bfloat16, True), (torch.float32, False)):
        pixels = transforms.normalise([image], size=256, constants=constants)[0, :, ::8, ::8]
        assert (error(pixels, outputs["pf_image_g_pixel_values_0_ds8"]) < 1e-6) == same


def test_a_white_and_a_black_pixel_normalise_to_the_constants():
    white, black = (
        transforms.normalise([Image.new("RGB", (2, 2), c)], size=2)[0, :, 0, 0] for c in ("white", "black")
    )
    assert torch.allclose(black, torch.tensor([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225]))
    assert torch.allclose(white, torch.tensor([0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225]))


@pytest.mark.parametrize("content", [b"", b"no picture"])
def test_an_unreadable_image_is_named(tmp_path: Path, content: bytes):
    file = tmp_path / "photo.jpg"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read the image .*photo\.jpg"):
        transforms.open_image(file)


def test_a_truncated_jpeg_and_a_missing_file_are_named(tmp_path: Path):
    file = tmp_path / "photo.jpg"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"photo\.jpg"):
        transforms.open_image(file)
    with pytest.raises(ValueError, match=r"absent\.png"):
        transforms.open_image(tmp_path / "absent.png")


@pytest.mark.parametrize("kind", ["png", "tiff", "pgm"])
def test_16_bits_of_grey_become_8_instead_of_white(tmp_path: Path, kind: str):
    """A pixel of 0, 255, 256, 25000 and 65535: the high byte is 0, 0, 1, 97 (25000 = 97 * 256 + 168) and
    255."""
    values = np.array([[0, 255, 256, 25000, 65535]], np.uint16)
    file = tmp_path / f"depth.{kind}"
    if kind == "pgm":
        file.write_bytes(b"P5 5 1 65535\n" + values.astype(">u2").tobytes())
    else:
        Image.fromarray(values).save(file)
    with Image.open(file) as stored:
        assert stored.mode == ("I" if kind == "pgm" else "I;16")
    opened = transforms.open_image(file)
    assert opened.mode == "RGB"
    assert np.asarray(opened).tolist() == [[[v] * 3 for v in (0, 0, 1, 97, 255)]]


def test_a_picture_in_floating_point_is_refused_by_name(tmp_path: Path):
    """Values in [0, 1] would be black."""
    Image.fromarray(np.full((4, 5), 0.5, np.float32)).save(tmp_path / "depth.tiff")
    with pytest.raises(
        ValueError,
        match=r"depth\.tiff: its values are floating-point numbers .*\(save it with 8 or 16 bits\)",
    ):
        transforms.check_image(tmp_path / "depth.tiff")


def test_a_truncated_png_of_16_bits_is_named(tmp_path: Path):
    file = tmp_path / "depth.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 65536, (64, 64), dtype=np.uint16)).save(file)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"cannot read the image .*depth\.png"):
        transforms.open_image(file)


@pytest.mark.parametrize("read", [transforms.open_image, transforms.image_size])
def test_a_picture_of_too_many_pixels_is_named_with_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable
):
    """Pillow refuses more than twice its limit: 2 * 8 = 16 pixels, and here are 20."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 8)
    Image.new("L", (5, 4)).save(tmp_path / "map.png")
    with pytest.raises(
        ValueError, match=r"map\.png has more than 16 pixels, the most that are read; scale it down"
    ):
        read(tmp_path / "map.png")


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_opened_upright_as_pillow_shows_it(tmp_path: Path, suffix: str, orientation: int):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)).save(
        tmp_path / f"a.{suffix}", exif=exif
    )
    with Image.open(tmp_path / f"a.{suffix}") as opened:
        expected = ImageOps.exif_transpose(opened).convert("RGB")
    found = transforms.open_image(tmp_path / f"a.{suffix}")
    assert np.array_equal(np.asarray(found), np.asarray(expected))
    assert transforms.image_size(tmp_path / f"a.{suffix}") == expected.size == found.size
    assert found.getexif().get(ExifTags.Base.Orientation, 1) == 1
    raw = transforms.open_image(transforms.stored_pixels(tmp_path / f"a.{suffix}"))
    assert raw.size == ((8, 6) if suffix != "tif" else expected.size)  # Pillow turns a TIFF itself


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_picture_whose_exif_is_none_is_upright(tmp_path: Path, suffix: str):
    file = tmp_path / f"a.{suffix}"
    Image.new("RGB", (8, 6)).save(file, exif=b"garbage")
    assert transforms.image_size(file) == transforms.open_image(file).size == (8, 6)


def test_a_size_is_told_without_reading_the_pixels(tmp_path: Path):
    file = tmp_path / "photo.png"
    Image.new("RGB", (64, 48)).save(file)
    file.write_bytes(file.read_bytes()[:60])
    assert transforms.image_size(file) == (64, 48)


# Visual prompts


def test_a_region_covers_the_cells_whose_sampled_pixel_it_holds():
    """8x8 -> 4x4, nearest samples pixels 0, 2, 4, 6: the box of rows 2-5 and columns 0-1 holds (2, 0) and (4,
    0)."""
    mask = np.zeros((8, 8), bool)
    mask[2:6, 0:2] = True
    assert transforms.grid_cells(mask, grid=4).nonzero().tolist() == [[1, 0], [2, 0]]


def test_a_region_between_the_samples_gets_the_cell_it_covers_most():
    mask = np.zeros((8, 8), bool)
    mask[3, 5] = True
    assert transforms.grid_cells(mask, grid=4).nonzero().tolist() == [[1, 2]]


@needs_golden
def test_region_cells_equal_upstreams():
    """Upstream's prediction text has as many image slots after each <vp> as the region has cells (its
    thumbnail is 4 x 4 here)."""
    case = json.loads((GOLDEN / "qwen2" / "predict_forward.json").read_text())["vp"]
    slots = [part.split("</vp>")[0].count("<IMG_CONTEXT>") for part in case["input_text"].split("<vp>")[1:]]
    masks = arrays("qwen2/inputs")["pf_mask_prompts"].numpy() > 0.5
    assert [int(transforms.grid_cells(mask, grid=4).sum()) for mask in masks] == slots
