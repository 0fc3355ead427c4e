"""A mask and its pixels -> numbers: place, form, colour (CIELAB) and texture."""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from scipy import ndimage
from scipy.spatial import ConvexHull

from ans_core.pictures.colours import COLOURS

NAMES = COLOURS | {"black": (20, 20, 20), "grey": (128, 128, 128), "brown": (120, 72, 30)}
"""sRGB of the words that colours are told in."""
WHITE = np.array([0.95047, 1.0, 1.08883])
"""D65, of the CIE 1931 2 degree observer."""
SRGB = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
"""Linear sRGB to XYZ (IEC 61966-2-1)."""
FLAT = 3.0
"""Standard deviation of L* below which there is no texture."""
PEAKED = 0.2
"""Share of the power (without the slowest waves) near the strongest wave and its mirror image from which a
texture is periodic."""
SECOND = 0.4
"""Power of the strongest wave at right angles to the first, as a share of the first's, from which a texture
is checked."""


def eccentricity_and_orientation(mask: Bool[np.ndarray, "H W"]) -> tuple[float, float]:
    """Of the ellipse with the same second moments (a pixel counts as a square, so a w x h rectangle has
    variances w²/12 and h²/12): 0 for a circle, near 1 for a line; degrees of its long axis in (-90, 90], 0 =
    horizontal, positive = rising to the right."""
    y, x = (axis - axis.mean() for axis in np.nonzero(mask))
    xx, yy, xy = float((x * x).mean()) + 1 / 12, float((y * y).mean()) + 1 / 12, float((x * y).mean())
    spread = float(np.hypot(xx - yy, 2 * xy))
    major, minor = (xx + yy + spread) / 2, (xx + yy - spread) / 2
    angle = -0.5 * float(np.degrees(np.arctan2(2 * xy, xx - yy)))  # y points down
    return float(np.sqrt(max(0.0, 1 - minor / major))), angle + 180 if angle <= -90 else angle


def solidity(mask: Bool[np.ndarray, "H W"]) -> float:
    """Area over that of the convex hull of the pixels' corners: 1 for what is convex."""
    edge = mask & ~ndimage.binary_erosion(mask)
    y, x = np.nonzero(edge)
    corners = np.concatenate([np.stack([x + dx, y + dy], 1) for dx in (0, 1) for dy in (0, 1)])
    return float(mask.sum() / ConvexHull(corners).volume)  # "volume" is the area in the plane


def parts(mask: Bool[np.ndarray, "H W"]) -> int:
    """Pieces that don't touch, also not at a corner."""
    return int(ndimage.label(mask, np.ones((3, 3)))[1])


def lab(rgb: UInt8[np.ndarray, "*P 3"]) -> Float[np.ndarray, "*P 3"]:
    """sRGB -> CIELAB under D65: L* 0..100, a* and b* about -128..127."""
    share = rgb / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    ratio = linear @ SRGB.T / WHITE
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)


def colour_name(colour: Float[np.ndarray, " 3"]) -> str:
    return list(NAMES)[int(nearest_names(colour[None])[0])]


def nearest_names(colours: Float[np.ndarray, "P 3"]) -> Int[np.ndarray, " P"]:
    """Places in NAMES of the nearest to each colour, by the distance in CIELAB (CIE 1976)."""
    palette = lab(np.array(list(NAMES.values()), np.uint8))
    return np.asarray(np.linalg.norm(colours[:, None] - palette, axis=2).argmin(1))


def texture(lightness: Float[np.ndarray, "H W"], mask: Bool[np.ndarray, "H W"]) -> tuple[str, float, float]:
    """Direction of its stripes, period in pixels (0 without one) and contrast (standard deviation of L*)
    inside a mask.

    `horizontal`, `vertical` and `diagonal` (45 ± 22.5 degrees) stripes, `checked` (two waves at right
    angles), `irregular`, `plain`. The period is the distance from a stripe to the next; of a checked pattern,
    along its rows or columns.
    """
    inner = ndimage.binary_erosion(mask, iterations=2)  # antialiased edges belong to what is around
    if not inner.any():
        inner = mask
    contrast = float(lightness[inner].std())
    if contrast < FLAT:
        return "plain", 0.0, contrast
    rows, columns = np.flatnonzero(inner.any(1)), np.flatnonzero(inner.any(0))
    cut = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    wave = np.where(inner[cut], lightness[cut] - lightness[inner].mean(), 0)
    side = max(64, *wave.shape)
    power = np.abs(np.fft.fft2(wave, (side, side))) ** 2
    across, down = np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side))  # cycles a pixel
    size = np.hypot(across, down)
    power[size < 3 / min(wave.shape)] = 0  # shading
    half = np.where((down > 0) | ((down == 0) & (across > 0)), power, 0)  # the other half mirrors it
    row, column = np.unravel_index(half.argmax(), half.shape)
    fx, fy = float(across[row, column]), float(down[row, column])
    width = 2 / min(wave.shape)  # of a peak
    main = _near(across, down, fx, fy, width)
    total = float(power.sum())
    if not total or float(power[main].sum()) < PEAKED / 2 * total:
        return "irregular", 0.0, contrast
    turned = _near(across, down, fy, -fx, 2 * width)
    if float(power[turned].max()) >= SECOND * float(power[row, column]):
        return "checked", 1 / max(abs(fx), abs(fy)), contrast
    angle = float(np.degrees(np.arctan2(abs(fy), abs(fx))))  # of the wave; stripes are at right angles to it
    direction = "vertical" if angle < 22.5 else "horizontal" if angle > 67.5 else "diagonal"
    return direction, 1 / float(np.hypot(fx, fy)), contrast


def _near(
    across: Float[np.ndarray, "S S"], down: Float[np.ndarray, "S S"], fx: float, fy: float, width: float
) -> Bool[np.ndarray, "S S"]:
    """Waves near one of the two that a real picture has at a frequency. Frequencies wrap around at the
    sampling rate."""

    def apart(one: np.ndarray, other: float) -> np.ndarray:
        return np.abs((one - other + 0.5) % 1 - 0.5)

    plus = np.hypot(apart(across, fx), apart(down, fy)) < width
    minus = np.hypot(apart(across, -fx), apart(down, -fy)) < width
    return np.asarray(plus | minus)
