"""The pipeline's stages, written down once: dvc.yaml, the tasks, the flows and the tests all come from this
table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ans_core.config import Config

ROWS = ("untrained", "base", "sft", "rl")
"""The checkpoints that `evaluate` and the report compare, in the order of training."""

SUMMARY = "metrics/summary.json"
HEADLINE = "metrics/headline.json"
AGENT_FIGURES = "metrics/agent.json"
ONLINE_FIGURES = "metrics/online.json"
MAIN, AGENT, ONLINE = "main", "agent", "online"
DAY_S = 24 * 3600
GROUPS = (MAIN, AGENT, ONLINE)
MEMORY = "memory"
"""The last stage of a SAM2 alone."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """`inputs` and `out` are folders under runs/<profile>; `sections` the parts of params.yaml that decide
    the result."""

    name: str
    """TASK, or TASK@ROW."""
    version: str = "1"
    """Raised where a result must be made anew that the hash of the code does not tell."""
    inputs: tuple[str, ...] = ()
    out: str
    sections: tuple[str, ...]
    retries: int = 1
    gpu: bool = True
    distributed: bool = False
    """Started by torchrun if launch.processes > 1."""
    inference: bool = False
    """Its processes train nothing and share items: those of this node, or, in a job, of as many nodes as
    `launch.resources` says."""
    timeout_s: int = DAY_S
    """Time after which the watchdog ends the process group."""
    copies: tuple[tuple[str, str], ...] = ()
    """(file in `out`, place in the repository) of files that DVC also keeps outside runs/."""
    in_git: tuple[tuple[str, str], ...] = ()
    """The same, for files that git keeps and DVC does not: a dozen numbers that show a change's effect."""
    curves: bool = False
    """Whether it writes curves.csv."""
    group: str = MAIN
    """Stages of another group stand in `<group>/dvc.yaml`, which a bare `dvc repro` leaves alone."""
    item: str | None = None
    """Of a row: the folder under runs/<profile> in which it differs from the others, as dvc.yaml names it."""

    @property
    def task(self) -> str:
        """Return the module name under ans_core.stages."""
        return self.name.partition("@")[0]

    @property
    def row(self) -> str | None:
        return self.name.partition("@")[2] or None

    @property
    def target(self) -> str:
        """Return what DVC calls it."""
        return self.name if self.group == MAIN else f"{dvc_file(self.group).as_posix()}:{self.name}"

    @property
    def command(self) -> str:
        """Return the command. `exec`: no shell stays between dvc and the stage, which ends with the process
        that started it."""
        return f"exec python -m tasks {self.name}"

    def input_path(self, name: str, *, profile: str, base: str) -> str:
        """Return where an input lies. The `model` of the agent's stages is the folder that agent.base
        names."""
        return base if name == "model" and self.group != MAIN else f"runs/{profile}/{name}"

    def input_paths(self, config: Config, root: Path = Path()) -> dict[str, Path]:
        return {
            name: root / self.input_path(name, profile=config.profile, base=config.agent.base)
            for name in self.inputs
        }

    def out_path(self, profile: str, root: Path = Path()) -> Path:
        return root / "runs" / profile / self.out


def dvc_file(group: str) -> Path:
    return Path("dvc.yaml") if group == MAIN else Path(group) / "dvc.yaml"


# A whole model that is there when a row of `evaluate` starts (published bases have no untrained one): only
# `rl` waits for `convert`.
ROW_MODEL = {"untrained": "base/base", "base": "base/base", "sft": "base/base", "rl": "model"}


def _evaluate(row: str) -> Stage:
    # The inverse model of the `loops` benchmark is the SFT checkpoint in every row.
    return Stage(
        name=f"evaluate@{row}",
        inputs=("data", "base", "sft", *(["model"] if row == "rl" else [])), out=f"evaluate/{row}",
        sections=("evaluate", "seed"), timeout_s=2 * DAY_S, item=ROW_MODEL[row], inference=True,
    )  # fmt: skip


OPERATING = ("agent.reader", "agent.segmenter", "agent.segmenter_files")
"""The settings that decide what the agent's operations give."""
SHOWN = ("agent.tiles", "agent.min_pixels", "agent.max_pixels")
"""Those that decide how large the agent sees pictures."""
AGENT_ROWS = {
    "direct": "agent/sft/direct",
    "oracle": "agent/cota/val",
    "sft": "agent/sft/tools",
    "rft": "agent/rft",
}
"""The rows of `agent_evaluate` and what each starts from. (The oracle has no adapter, but the same operations
as the traces.)"""


def _agent_sft(row: str) -> Stage:
    return Stage(
        name=f"agent_sft@{row}", inputs=("data", "model", "agent/cota"),
        out=f"agent/sft/{row}", group=AGENT,
        sections=(
            *SHOWN, *OPERATING, "agent.source_share", "agent.episode", "agent.sft", "sft.mask_points", "sft.mask_size",
            "sft.mask_weight", "sft.dice_weight", "sft.questions_per_image", "seed",
        ),
        distributed=True, timeout_s=7 * DAY_S, curves=True,
    )  # fmt: skip


def _agent_evaluate(row: str, folder: str) -> Stage:
    made = () if row == "oracle" else (folder,)
    return Stage(
        name=f"agent_evaluate@{row}", inputs=("data", "model", "agent/cota", *made),
        out=f"agent/evaluate/{row}", group=AGENT,
        sections=(
            *SHOWN, *OPERATING, "agent.families", "agent.episode", "agent.evaluate",
            "evaluate.max_tokens", "evaluate.batch", "seed",
        ),
        timeout_s=2 * DAY_S, item=folder, inference=True,
    )  # fmt: skip


JUDGED = ("judge.model", "judge.meteor_weight", "judge.judge_weight", "judge.on_failure")
"""The judge's settings that decide a reward."""

# fmt: off
TABLE: tuple[Stage, ...] = (
    Stage(name="prepare", out="data", sections=("prepare", "seed"), gpu=False, retries=0, inference=True),
    Stage(
        name="base", inputs=("data",), out="base", timeout_s=2 * DAY_S, curves=True,
        sections=("base", "sft.frames", "sft.max_length", "seed"),
    ),
    Stage(
        name="memory", inputs=("data", "base"), out="memory", sections=("memory", "seed"),
        distributed=True, timeout_s=7 * DAY_S, curves=True,
    ),
    Stage(
        name="sft", inputs=("data", "base", "memory"), out="sft", sections=("sft", "seed"),
        distributed=True, timeout_s=14 * DAY_S, curves=True,
    ),
    # Not the whole section: how the endpoint is asked does not decide what is written.
    Stage(
        name="judge_questions", inputs=("data",), out="questions", gpu=False,
        sections=("judge.model", "judge.positives", "judge.negatives", "rl.loops", "rl.use_llm_judge", "rl.use_llm_judge_loop2"),
    ),
    Stage(
        name="rl", version="2", inputs=("data", "base", "sft", "questions"), out="rl",
        sections=("rl", *JUDGED, "sft.mask_points", "sft.mask_size", "sft.mask_weight", "sft.dice_weight", "seed"),
        distributed=True, timeout_s=14 * DAY_S, curves=True,
    ),
    Stage(
        name="convert", inputs=("data", "base", "sft", "rl"), out="model", gpu=False,
        sections=("convert", "base.source", "base.internvl", "base.sam2", "rl.max_tokens", "evaluate.split", "seed"),
    ),
    *(_evaluate(row) for row in ROWS),
    Stage(
        name="report", version="2", inputs=("data", "base", "memory", "sft", "rl", *(f"evaluate/{row}" for row in ROWS)), out="report",
        sections=("report", "evaluate.split", "evaluate.sources"), gpu=False, retries=0, copies=(("summary.json", SUMMARY),),
        in_git=(("headline.json", HEADLINE),),
    ),
    Stage(
        name="cota", inputs=("model",), out="agent/cota", group=AGENT, retries=0,
        sections=(
            *SHOWN, *OPERATING, "agent.families", "agent.sources", "agent.episode", "agent.cota", "judge.model", "seed",
        ),
        inference=True,
    ),
    *(_agent_sft(row) for row in ("tools", "direct")),
    Stage(
        name="rft", inputs=("model", "agent/cota", "agent/sft/tools"), out="agent/rft", group=AGENT,
        distributed=True, timeout_s=7 * DAY_S, curves=True,
        sections=(*OPERATING, "agent.families", "agent.source_share", "agent.episode", "agent.cota", "agent.rft", "seed"),
    ),
    *(_agent_evaluate(row, folder) for row, folder in AGENT_ROWS.items()),
    Stage(
        name="agent_report", inputs=tuple(f"agent/evaluate/{row}" for row in AGENT_ROWS), out="agent/report",
        sections=(), gpu=False, retries=0, copies=(("agent.json", AGENT_FIGURES),), group=AGENT,
    ),
    Stage(
        name="online", inputs=("model", "agent/rft"), out="agent/online", group=ONLINE, timeout_s=7 * DAY_S, curves=True,
        sections=(*OPERATING, "agent.episode", "agent.online", "seed"), copies=(("online.json", ONLINE_FIGURES),), inference=True,
    ),
)
# fmt: on
STAGES = tuple(stage for stage in TABLE if stage.group == MAIN)
"""What `ans run`, `make demo` and a bare `dvc repro` run."""


def needed_for(group: str, config: Config) -> tuple[Stage, ...]:
    """Return the stages of a group, or the stage of this name, and all that they need, in the order of the
    table."""
    chosen = {stage.name: stage for stage in TABLE if group in (stage.group, stage.name)}
    while more := {
        made.name: made
        for stage in chosen.values()
        for path in stage.input_paths(config).values()
        if (made := maker_of(path, config)) and made.name not in chosen
    }:
        chosen |= more
    return tuple(stage for stage in TABLE if stage.name in chosen)


def maker_of(path: Path, config: Config) -> Stage | None:
    """Return the stage whose output this is, or is in; None if no stage makes it."""
    return next(
        (stage for stage in TABLE if path.resolve().is_relative_to(stage.out_path(config.profile).resolve())),
        None,
    )


def stage_named(name: str) -> Stage:
    by_name = {stage.name: stage for stage in TABLE}
    if name not in by_name:
        raise SystemExit(f"no stage named {name!r}; tasks/stages.py has {list(by_name)}")
    return by_name[name]
