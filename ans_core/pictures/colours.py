"""The colour words of the drawn world, in sRGB. By themselves, so that a process that only names colours
reads no data sets."""

COLOURS = {
    "red": (214, 32, 38),
    "green": (30, 158, 52),
    "blue": (38, 70, 220),
    "yellow": (245, 222, 30),
    "purple": (140, 40, 175),
    "orange": (250, 132, 10),
    "cyan": (40, 212, 226),
    "white": (246, 246, 246),
}
