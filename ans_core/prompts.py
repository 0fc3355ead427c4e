"""Tokens and templates of the Sa2VA family: the exact text around a question and around an image.

Sources: upstream Sa2VA's templates and datasets (README, "How it is built"). Questions and answers are
upstream's words.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

IMG_START, IMG_END, IMG_CONTEXT = "<img>", "</img>", "<IMG_CONTEXT>"
SEG, P_START, P_END, VP_START, VP_END = "[SEG]", "<p>", "</p>", "<vp>", "</vp>"
BOX_START, BOX_END = "<box>", "</box>"

INTERNVL_TOKENS = (
    IMG_START,
    IMG_END,
    IMG_CONTEXT,
    "<quad>",
    "</quad>",
    "<ref>",
    "</ref>",
    BOX_START,
    BOX_END,
)
SA2VA_TOKENS = (SEG, P_START, P_END, VP_START, VP_END)
"""Appended to a base's tokenizer in this order: their ids follow the base's last one."""


@dataclass(frozen=True, kw_only=True)
class ImageMarks:
    """The special tokens that hold the place of a picture: `start`, a `slot` for each of its image tokens,
    `end`."""

    start: str
    slot: str
    end: str


INTERNVL_IMAGE = ImageMarks(start=IMG_START, slot=IMG_CONTEXT, end=IMG_END)
QWEN_IMAGE = ImageMarks(start="<|vision_start|>", slot="<|image_pad|>", end="<|vision_end|>")


@dataclass(frozen=True, kw_only=True)
class Template:
    """`user.format(input=...)` + answer + `suffix` (learned) + `separator` (not learned) before the next
    turn."""

    user: str
    suffix: str
    separator: str
    stop_words: tuple[str, ...]


_CHATML = "<|im_start|>user\n{input}<|im_end|>\n<|im_start|>assistant\n"
TEMPLATES = MappingProxyType(
    {
        "qwen_chat": Template(
            user=_CHATML, suffix="<|im_end|>", separator="\n", stop_words=("<|im_end|>", "<|endoftext|>")
        ),
        "internlm2_chat": Template(
            user=_CHATML, suffix="<|im_end|>", separator="\n", stop_words=("<|im_end|>",)
        ),
        "phi3_chat": Template(
            user="<|user|>\n{input}<|end|>\n<|assistant|>\n",
            suffix="<|end|>",
            separator="\n",
            stop_words=("<|end|>",),
        ),
    }
)

REFERRING_QUESTIONS = (
    "Can you segment the {text} in this image?",
    "Please segment {text} in this image.",
    "What is {text} in this image? Please respond with segmentation mask.",
    "What is {text} in this image? Please output segmentation mask.",
    "Could you provide a segmentation mask for the {text} in this image?",
    "Please identify and segment the {text} in this image.",
    "Where is the {text} in this picture? Please respond with a segmentation mask.",
    "Can you highlight the {text} in this image with a segmentation mask?",
)
REFERRING_ANSWERS = (
    f"It is {SEG}.",
    f"Sure, {SEG}.",
    f"Sure, it is {SEG}.",
    f"Sure, the segmentation result is {SEG}.",
    f"{SEG}.",
)
NO_TARGET_ANSWER = "There is no such object."
REFERRING_EVAL = "<image>\n" + REFERRING_QUESTIONS[1]
VIDEO_QUESTION = "Please segment {text}."
DESCRIBED_QUESTION = "Please segment the object according to the description: {text}"
"""Of clips with long descriptions (Ref-SAV)."""
VIDEO_EVAL = "<image>\n" + VIDEO_QUESTION

GROUNDED_QUESTIONS = (
    "Could you please give me a brief description of the image? Please respond with interleaved "
    "segmentation masks for the corresponding parts of the answer.",
    "Can you provide a brief description of the image? Please output with interleaved segmentation masks "
    "for the corresponding phrases.",
    "Please briefly describe the contents of the image. Please respond with interleaved segmentation masks "
    "for the corresponding parts of the answer.",
)
GROUNDED_EVAL = "<image>\n" + GROUNDED_QUESTIONS[0]
DETAILED_GROUNDED_QUESTIONS = (
    *GROUNDED_QUESTIONS,
    "Could you give a brief explanation of what can be found within this picture? Please output with "
    "interleaved segmentation masks for the corresponding phrases.",
    "Could you give me a brief explanation of this picture? Please respond with interleaved segmentation "
    "masks for the corresponding phrases.",
    "Could you provide me with a brief analysis of this photo? Please output with interleaved segmentation "
    "masks for the corresponding parts of the answer.",
    "Could you please give me a detailed description of the image? Please respond with interleaved "
    "segmentation masks for the corresponding parts of the answer.",
    "Can you provide a thorough description of this image? Please output with interleaved segmentation "
    "masks for the corresponding phrases.",
    "Please describe in detail the contents of the image. Please respond with interleaved segmentation "
    "masks for the corresponding parts of the answer.",
    "Could you give a comprehensive explanation of what can be found within this picture? Please output "
    "with interleaved segmentation masks for the corresponding phrases.",
    "Could you give me an elaborate explanation of this picture? Please respond with interleaved "
    "segmentation masks for the corresponding phrases.",
    "Could you provide me with a detailed analysis of this photo? Please output with interleaved "
    "segmentation masks for the corresponding parts of the answer.",
)
"""For the published grounded captions: upstream's first version asks for a brief description, its second for
a detailed one."""

REGION_QUESTIONS = (
    "Please give me a short description of the region in the picture marked by {region}.",
    "Can you provide me with a short description of the region in the picture marked by {region}?",
    "Could you describe {region} in the picture in a few words?",
)
REGION_EVAL = "<image>" + REGION_QUESTIONS[0].format(region="region1")
"""No newline: the sentence that lists the regions has its own (upstream's evaluation has two where its
training has one)."""
DETAILED_REGION_QUESTIONS = (
    "Can you provide me with a detailed description of the region in the picture marked by {region}?",
    "I'm curious about the region represented by {region} in the picture. Could you describe it in detail?",
    "What can you tell me about the region indicated by {region} in the image?",
    "I'd like to know more about the area in the photo labeled {region}. Can you give me a detailed "
    "description?",
    "Could you describe the region shown as {region} in the picture in great detail?",
    "What details can you give me about the region outlined by {region} in the photo?",
    "Please provide me with a comprehensive description of the region marked with {region} in the image.",
    "Can you give me a detailed account of the region labeled as {region} in the picture?",
    "I'm interested in learning more about the region represented by {region} in the photo. Can you "
    "describe it in detail?",
    "What is the region outlined by {region} in the picture like? Could you give me a detailed description?",
    "Please describe the region {region} in the image in detail.",
    "Can you offer a thorough analysis of the region {region} in the image?",
    "Could you elaborate on the region highlighted by {region} in the picture provided?",
    "Please share more information about the zone emphasized with {region} in the photo.",
    "What insights can you give about the area denoted by {region} in the image presented?",
    "Can you share a comprehensive rundown of the region denoted by {region} in the presented image?",
    "I'd like to know more about the region highlighted by {region} in the picture provided.",
    "Work through the important details of the area {region} in the image.",
    "Illustrate the area represented by {region} through a descriptive explanation.",
    "Examine the region {region} closely and share its details.",
)
"""Osprey's, without the ten that it repeats with "please"."""
SHORT_ANSWER = " Answer the question using a single word or phrase."
"""Ends the questions of Osprey's short form."""
SENTENCE_QUESTION = "{text} Please respond with segmentation mask."
"""LISA's, for the sentences of ReasonSeg."""

CAPTION_QUESTION = "Describe the image."
"""For captions without masks."""


def referring_question(text: str, template: str) -> str:
    """Ask for the object that an expression means, the same in training, RL and evaluation: in lower case,
    without full stop, with one article. An expression with "?" or "segmentation mask" is itself the question
    (reasoning sets); `<image>` stays at the template's place."""
    image = "<image>\n" if template.startswith("<image>\n") else ""
    if "?" in text or "segmentation mask" in text:
        return image + text.strip()
    phrase = text.strip().lower().removesuffix(".").strip()
    return re.sub(r"\bthe the\b", "the", template.format(text=phrase))


def region_question(regions: int, template: str) -> str:
    """Ask for one caption of all the regions shown, the same in training and evaluation."""
    *others, last = [f"region{i}" for i in range(1, regions + 1)]
    return template.format(region=f"{', '.join(others)} and {last}" if others else last)


def plain_question(text: str) -> str:
    """Return a user's words without `<image>`: pictures always come first, wherever the words have them (as
    upstream reads LLaVA)."""
    return text.replace("<image>", "").strip()


def picture_marks(count: int) -> str:
    """Return what stands before a question about so many pictures; of several, as InternVL's training and
    VLMEvalKit number them."""
    return "<image>\n" if count == 1 else "".join(f"Image-{i}: <image>\n" for i in range(1, count + 1))


def name_pictures(texts: Sequence[str], count: int) -> list[str]:
    """Write `<Image-1>`, `<Image-2>`, ... in place of each `<image>` of a conversation about so many pictures,
    as VLMEvalKit does. Where all stand before the first words they are taken out, as for one picture: pictures
    come first. Raises ValueError where others are not one for each picture."""
    if not texts:
        return []
    first, *rest = texts
    words = re.sub(r"\A(\s*(Image-\d+:\s*)?<image>)+", "", first)
    if count == 1 or not any("<image>" in text for text in (words, *rest)):
        return [plain_question(text) for text in (words, *rest)]
    if (marks := sum(text.count("<image>") for text in texts)) != count:
        raise ValueError(f"{marks} <image> for {count} pictures")
    numbers = itertools.count(1)
    return [re.sub("<image>", lambda _: f"<Image-{next(numbers)}>", text).strip() for text in texts]


def image_text(
    tokens: Sequence[int],
    marks: ImageMarks = INTERNVL_IMAGE,
    *,
    between: str = "\n",
    numbered: bool = False,
) -> str:
    """Return the places of pictures (or of a clip's frames) with so many image tokens each, joined by
    newlines as upstream does. `numbered`: as `picture_marks` writes several pictures."""
    return between.join(
        (f"Image-{i}: " if numbered else "") + marks.start + marks.slot * count + marks.end
        for i, count in enumerate(tokens, start=1)
    )


def region_text(cells: Sequence[int], marks: ImageMarks = INTERNVL_IMAGE) -> str:
    """Return upstream's sentence that lists the visual prompts; `cells[i]` image tokens for region i+1, ""
    without regions."""
    if not cells:
        return ""
    regions = ", ".join(f"region{i}{VP_START}{marks.slot * n}{VP_END}" for i, n in enumerate(cells, start=1))
    return f"\nThere are {len(cells)} part regions in the picture: {regions}.\n"


def box_text(x1: float, y1: float, x2: float, y2: float, *, step: int = 1) -> str:
    """Return InternVL's `<box>[[x1, y1, x2, y2]]</box>`: shares of the image (0..1) as thousandths, rounded
    to multiples of `step`."""
    return (
        f"{BOX_START}[["
        + ", ".join(str(round(1000 * v / step) * step) for v in (x1, y1, x2, y2))
        + f"]]{BOX_END}"
    )


def interleave(caption: str, phrases: tuple[tuple[int, int], ...]) -> str:
    """Turn `a cat on a mat` and spans into `<p> a cat </p> [SEG] on <p> a mat </p> [SEG]` (upstream's GCG
    answer, spaces included)."""
    parts, last = [], 0
    for start, end in phrases:
        parts += [caption[last:start], f"{P_START} {caption[start:end]} {P_END} {SEG}"]
        last = end
    return "".join([*parts, caption[last:]])
