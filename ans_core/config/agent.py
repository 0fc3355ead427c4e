"""Settings of the pixel-space agent: its stages `cota`, `agent_sft`, `agent_evaluate`; `rft` and `online` are
in files of their own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.names import FamilyName, Reader
from ans_core.config.online import Online
from ans_core.config.prepare import DataSource
from ans_core.config.rft import Rft
from ans_core.config.section import (
    AsTuple,
    Count,
    Impossible,
    Listed,
    Positive,
    Rate,
    Section,
    Share,
    no_twice,
)
from ans_core.config.training import Checkpointing, Dtype, Lora, Optim


class Cota(Section):
    """Drawn questions and their traces of thoughts, calls and observations."""

    train: Positive = 1200
    """Questions of every family."""
    more: dict[FamilyName, Positive] = {}
    """Families with a number of their own: of few questions a small model learns the answers by heart
    (`larger`: LOG)."""
    val: Positive = 40
    """Of every family, held out; no stage learns from them."""
    reword: bool = False
    """Let the language model of the section `judge` say the thoughts of questions about pictures
    (`agent.sources`) in other words."""

    def questions(self, family: str) -> int:
        """For training."""
        return self.more.get(family, self.train)


class AgentSft(Section):
    """Supervised fine-tuning on traces."""

    traces: str = ""
    """Folder of own traces (docs/agent.md) to learn from; empty = those of the stage `cota`."""
    traces_files: str = ""
    """Its fingerprint; as prepare.sources has it."""
    optim: Optim = Optim(steps=1200, batch=32, lr=1e-3)
    """`batch` counts traces and pictures with referring expressions together."""
    lora: Lora = Lora(rank=32, alpha=64)
    whole: bool = False
    """Train copies of the language model's linear layers in place of LoRA on them: for a small model, where
    the rank that is needed is the layer's width and LoRA takes longer than the layer (LOG)."""
    lora_ranks_from: str = ""
    """Folder of the agent's base fine-tuned in full, or of an agent on it that was trained with `whole`: each
    layer's rank is then what `lora_energy` of its change needs (4 to 128), and lora.alpha scales with it.
    Empty = lora.rank everywhere."""
    lora_ranks_files: str = ""
    """Its fingerprint; as prepare.sources has it."""
    lora_energy: Annotated[float, Field(gt=0, le=1)] = 0.9
    rows: Literal["new", "said"] = "said"
    """Tokens whose embeddings and rows of the head are trained: those that were added for calls, or all that
    the traces say (for a small model that has not written these words)."""
    referring: Share = 0.2
    """Share of the rows that ask for masks of expressions, as in the stage `sft`, so that it is not
    forgotten."""
    curriculum: Annotated[tuple[Share, Share, Share], AsTuple] = (0.15, 0.25, 0.6)
    """Shares of the steps: simple traces alone, with medium ones, with hard ones."""
    allowed_loss: Share = 0.05
    """A part of the curriculum is taken back if it costs more accuracy than this, and than chance, on what
    came before it."""
    checked: Count = 30
    """Held-out questions of every drawn family that this is measured on; 0 = nothing is taken back."""
    dtype: Dtype = "auto"
    checkpointing: Checkpointing = "none"

    @property
    def referring_rows(self) -> int:
        """Of a step."""
        return round(self.referring * self.optim.batch)

    def check_shares(self, *, processes: int) -> None:
        """Raise ValueError if a step has not a trace for each micro-batch of each process."""
        self.optim.check_shares(
            "agent.sft", self.optim.batch - self.referring_rows, "traces", processes=processes
        )

    @model_validator(mode="after")
    def _possible(self) -> AgentSft:
        if abs(sum(self.curriculum) - 1) > 1e-6:
            raise Impossible(
                "curriculum", f"its shares add up to {sum(self.curriculum):g}; they must add up to 1"
            )
        if not self.curriculum[-1]:
            raise Impossible("curriculum", "the last share is 0, so hard traces are never learned; raise it")
        traces = self.optim.batch - self.referring_rows
        if traces < self.optim.accumulate:
            raise Impossible(
                "optim.accumulate",
                f"{traces} traces a step can't be shared out to {self.optim.accumulate} micro-batches",
            )
        if self.whole and self.lora_ranks_from:
            raise Impossible(
                "whole",
                "whole copies have no ranks to take from lora_ranks_from; empty that, or set whole to false",
            )
        if self.lora.dropout:
            raise Impossible(
                "lora.dropout",
                f"{self.lora.dropout:g}: what samples would be another policy than what learns; it must be 0",
            )
        return self


class AgentEvaluate(Section):
    """Episodes on held-out questions."""

    split: Literal["val", "test"] = "val"
    each: Positive = 200
    """Questions of every family."""
    controls: bool = True
    """Also with calls forbidden, at random places, with observations of other questions, blank, and with the
    shortest plan given."""
    control_each: Positive = 100
    """Questions of every family for each control."""
    referring: Count = 200
    """Samples on which referring segmentation is compared with the base's; 0 = none."""
    shown: Count = 3
    """Episodes of every family on the page."""


class Episode(Section):
    """How an episode goes, in training and evaluation."""

    operations_told: bool = False
    """Put the operations' signatures before every question: for models that were not trained to know them."""
    calls: Positive = 4
    """A call after these is refused."""
    pictures: Positive = 16
    """That are shown, the first included."""
    turn_tokens: Positive = 40
    tokens: Positive = 8192
    """Of the whole episode."""
    time_limit_s: Rate = 30.0
    """Of an operation."""
    batch: Positive = 64
    """Episodes that are played at a time."""


class Agent(Section):
    """A model that looks again before it answers (docs/agent.md)."""

    base: str = ""
    """Folder of the model that it starts from. Empty: what the pipeline makes, which then stands here
    (runs/<profile>/model)."""
    tiles: Listed[Positive] = ()
    """Fewest and most tiles of a picture (InternVL), the whole picture not counted; Qwen-VL: the same numbers
    of 448 x 448 pixels. Empty = the base's. The trained agent keeps them."""
    min_pixels: Count = 0
    """Fewest pixels that a picture is shown with, in place of `tiles` (the seeds' MIN_PIXELS). InternVL: as many
    tiles as hold them. 0, with max_pixels 0 = the base's."""
    max_pixels: Count = 0
    """Most pixels, likewise (MAX_PIXELS). InternVL: as many tiles as go into them."""
    reader: Reader = "rapidocr"
    """What READ_TEXT reads with. rapidocr: any text, in photographs, too (`pip install -e '.[ocr]'`).
    template: the digits of drawn scenes, without another package."""
    sources: Listed[DataSource] = ()
    """Annotated pictures that questions are asked about: sets with words and masks, in any format. The agent
    learns from their training pictures and is evaluated on those held out (`val` or `test`, or
    `hold_out`)."""
    source_share: Share = 0.5
    """Share of the traces (agent_sft) and of the questions (rft) of a step that are about them."""
    segmenter: str = ""
    """Folder of another Sa2VA (as `agent.base`) that draws and follows the masks of operations; empty = the
    base."""
    segmenter_files: str = ""
    """Its fingerprint; as prepare.sources has it."""
    families: Listed[FamilyName] = (
        "easy",
        "pattern",
        "text",
        "larger",
        "moves",
    )
    """Of drawn questions (ans_core/agent/world/families); may be empty where there are sources."""
    episode: Episode = Episode()
    cota: Cota = Cota()
    sft: AgentSft = AgentSft()
    rft: Rft = Rft()
    evaluate: AgentEvaluate = AgentEvaluate()
    online: Online = Online()

    @model_validator(mode="after")
    def _possible(self) -> Agent:
        if len(self.tiles) not in (0, 2) or list(self.tiles) != sorted(self.tiles):
            raise Impossible(
                "tiles", f"{list(self.tiles)} is neither empty nor [fewest, most]; write [2, 20], for example"
            )
        if bool(self.min_pixels) != bool(self.max_pixels) or self.min_pixels > self.max_pixels:
            raise Impossible(
                "max_pixels",
                f"min_pixels {self.min_pixels}, max_pixels {self.max_pixels}; give both, the fewest first",
            )
        if self.tiles and self.max_pixels:
            raise Impossible(
                "tiles", f"{list(self.tiles)} and min_pixels, max_pixels say the same thing; give one of them"
            )
        if not self.families and not self.sources:
            raise Impossible("families", "there is none, and no source: name some families, or agent.sources")
        no_twice(self.families, key="families")
        return self
