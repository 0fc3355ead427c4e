"""All sections together: what params.yaml holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from ans_core.config.agent import Agent
from ans_core.config.base import Base
from ans_core.config.convert import Convert
from ans_core.config.evaluate import Evaluate
from ans_core.config.judge import Judge
from ans_core.config.launch import Launch
from ans_core.config.memory import Memory
from ans_core.config.names import DATA_KINDS
from ans_core.config.prepare import DataSource, Prepare
from ans_core.config.report import Report
from ans_core.config.rl import Rl
from ans_core.config.section import Impossible, Section, nearest
from ans_core.config.sft import Sft

PROFILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""Pattern of profile names, which become file and folder names."""


class Config(Section):
    profile: Annotated[str, Field(pattern=PROFILE_NAME)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    prepare: Prepare = Prepare()
    base: Base = Base()
    memory: Memory = Memory()
    sft: Sft = Sft()
    rl: Rl = Rl()
    judge: Judge = Judge()
    convert: Convert = Convert()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()
    agent: Agent = Agent()
    launch: Launch = Launch()

    @model_validator(mode="before")
    @classmethod
    def _agent_has_a_base(cls, values: Any) -> Any:
        """Name the profile's own model where agent.base is empty: agent/dvc.yaml depends on the folder that
        params.yaml names."""
        agent = values.get("agent", {})
        default_base = {"base": f"runs/{values.get('profile')}/model"}
        if isinstance(agent, Agent) and not agent.base:
            return {**values, "agent": agent.model_copy(update=default_base)}
        if isinstance(agent, dict) and agent.get("base", "") == "":
            return {**values, "agent": agent | default_base}
        return values

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        self._check_data_names()
        self._check_agent_sources()
        self._check_evaluation()
        self._check_memory()
        self._check_base()
        self._check_loops()
        self._check_judge()
        self._check_ranks()
        self._check_processes()
        return self

    def _check_data_names(self) -> None:
        names = list(DATA_KINDS)
        read = ["train", "val", "test", self.evaluate.split, self.agent.evaluate.split]
        for place, source in enumerate(self.prepare.sources):
            if source.role not in read:
                raise Impossible(
                    f"prepare.sources.{place}.split",
                    f"no stage reads a split {source.role!r}{nearest(source.role, read)}: write it as a "
                    f'list, `split: ["{source.role}"]`, to '
                    f"train on it, or set evaluate.split to {source.role!r} to evaluate on it",
                )
        check_own_names(self.prepare.sources, names, key="prepare.sources")
        check_own_names(self.evaluate.sources, names, key="evaluate.sources")
        for place, source in enumerate(self.evaluate.sources):
            if source.hold_out:
                raise Impossible(
                    f"evaluate.sources.{place}.hold_out",
                    "all of it is evaluated, so nothing is held out; leave it 0",
                )
        mixed = [*DATA_KINDS, *(source.name for source in self.prepare.sources)]
        for name in self.sft.mixture:
            if name not in mixed:
                raise Impossible(
                    f"sft.mixture.{name}",
                    f"no kind of data and no name in prepare.sources{nearest(name, mixed)}; there are "
                    f"{mixed}",
                )

    def _check_agent_sources(self) -> None:
        check_own_names(self.agent.sources, [], key="agent.sources")
        read = ["train", "val", "test"]
        prepared = {source.path: source for source in self.prepare.sources if source.role == "train"}
        before: dict[str, DataSource] = {}
        for place, source in enumerate(self.agent.sources):
            key = f"agent.sources.{place}"
            if source.role not in read:
                raise Impossible(
                    f"{key}.split",
                    f"no stage of the agent reads a split {source.role!r}{nearest(source.role, read)}: write it "
                    f'as a list, `split: ["{source.role}"]`, to train on it',
                )
            if source.repeats != 1:
                raise Impossible(f"{key}.repeats", "families of questions take turns, not sets: it must be 1")
            for named, other in (("prepare.sources", prepared), ("another of agent.sources", before)):
                same = other.get(source.path)
                if same is not None and same.hold_out != source.hold_out:
                    raise Impossible(
                        f"{key}.hold_out",
                        f"{named} learn from the same files with hold_out {same.hold_out:g}, here it is "
                        f"{source.hold_out:g}: pictures held out by one are learned from by the other; set both "
                        "alike",
                    )
            before |= {source.path: source} if source.role == "train" else {}

    def _check_evaluation(self) -> None:
        """Refuse splits and benchmarks that the data can't have; which samples data sets of the user's have,
        only `prepare` sees."""
        splits = list(
            dict.fromkeys(["train", "val", "test", *(source.role for source in self.prepare.sources)])
        )
        prepare, split = self.prepare, self.evaluate.split
        if split not in splits:
            raise Impossible(
                "evaluate.split",
                f"no data set has a split {split!r}{nearest(split, splits)}; there are {splits}",
            )
        if not (prepare.scenes or prepare.clips or prepare.sources):
            raise Impossible(
                "prepare.scenes",
                "prepare.scenes, prepare.clips and prepare.sources are all empty: there is nothing to "
                "train on; set one of them",
            )
        if prepare.sources or self.evaluate.sources:
            return
        of_split = "" if split == "train" else f"{split}_"
        for place, name in enumerate(self.evaluate.benchmarks):
            kind = "clips" if name == "video" else "scenes"
            there = getattr(prepare, kind) and getattr(prepare, of_split + kind)
            if not there and name not in self.evaluate.optional:
                raise Impossible(
                    f"evaluate.benchmarks.{place}",
                    f"{name!r} has no samples: prepare draws no {kind} of split {split!r}; draw some, name it "
                    "in evaluate.optional, or take it out",
                )

    def _check_memory(self) -> None:
        """Refuse to train SAM2's memory where no clips can be (which data sets of the user's hold videos, only
        the stage sees), and a SAM2 alone with which nothing is done."""
        if self.base.source == "sam2" and not (self.memory.train or self.memory.validate_only):
            raise Impossible(
                "memory.train",
                "base.source is sam2, whose memory is neither trained nor measured: set it to true, or "
                "memory.validate_only",
            )
        if not self.memory.train or self.prepare.sources:
            return
        prepare, share = self.prepare, self.memory.image_share
        held_out = (prepare.clips and prepare.val_clips) or (prepare.scenes and prepare.val_scenes)
        lacking = [] if held_out else ["prepare.val_clips", "prepare.val_scenes"]
        lacking += [] if prepare.clips or share == 1 else ["prepare.clips"]
        lacking += [] if prepare.scenes or share == 0 else ["prepare.scenes"]
        if lacking:
            raise Impossible(
                "memory.train",
                f"nothing to follow: {' = '.join(lacking)} = 0, and prepare.sources names no data set; "
                "draw some, or set it to false",
            )

    def _check_base(self) -> None:
        """Refuse to pass a base through that has not learned to draw what it answers with `[SEG]`."""
        optim, base = self.sft.optim, self.base
        if (
            optim.steps
            or optim.epochs
            or base.source == "sam2"
            or (base.source == "published" and not base.sam2)
        ):
            return
        what = (
            "a language model joined with a SAM2 has random text_hidden_fcs, which make masks of [SEG]"
            if base.source == "published"
            else "a model pre-trained from random weights (base.source scratch) has not learned [SEG]"
        )
        raise Impossible(
            "sft.optim.steps",
            f"without steps and epochs the base is passed through, and {what}: give steps, or start from a "
            "Sa2VA (base.source=published, base.internvl=its folder or hub id, base.sam2 empty)",
        )

    def _check_loops(self) -> None:
        if "agent" in self.rl.loops:
            raise Impossible(
                "rl.loops",
                "'agent' is the loop of the stage `rft` (`make agent`, settings agent.rft); leave it out "
                "here",
            )
        if "vqa" in self.rl.loops and self.prepare.scenes and not self.prepare.sources:
            raise Impossible(
                "rl.loops",
                "'vqa' wants questions about pictures, which drawn scenes have none of: add data "
                "(prepare.sources)",
            )

    def _check_judge(self) -> None:
        if self.agent.cota.reword and not self.judge.model:
            raise Impossible(
                "agent.cota.reword",
                "judge.model is empty: name a model there, or set this to false (templates make the thoughts "
                "without one)",
            )

    def _check_ranks(self) -> None:
        named, agent_folder = self.agent.sft.lora_ranks_from, Path("runs", self.profile, "agent")
        if named and Path(named).resolve().is_relative_to(agent_folder.resolve()):
            raise Impossible(
                "agent.sft.lora_ranks_from",
                f"{named} is removed and made anew by this profile's own stages; copy it, and name the "
                f"copy: cp -rL {named} whole",
            )

    def _check_processes(self) -> None:
        for section in ("memory", "sft", "rl") if self.memory.train else ("sft", "rl"):
            optim = getattr(self, section).optim
            processes = self.launch.of(section).processes
            if optim.batch < processes * optim.accumulate:
                raise Impossible(
                    f"{section}.optim.batch",
                    f"{optim.batch} is less than a sample for each of {optim.accumulate} micro-batches "
                    f"(accumulate) on each of {processes} processes (launch); raise it",
                )
            if optim.muon_lr and self.launch.deepspeed_stage:
                raise Impossible(
                    f"{section}.optim.muon_lr",
                    "Muon needs whole matrices, and DeepSpeed divides the optimizer; set it to 0, or "
                    "launch.deepspeed_stage to 0",
                )
        least = self.launch.of("rl").processes * self.rl.optim.accumulate
        if 0 < self.rl.rows < least:
            raise Impossible(
                "rl.rows",
                f"{self.rl.rows} is less than a row for each of {self.rl.optim.accumulate} micro-batches "
                f"(rl.optim.accumulate) on each of {self.launch.of('rl').processes} processes (launch); give "
                f"{least}, or 0",
            )
        for section, loops in (("rl", self.rl), ("agent.rft", self.agent.rft)):
            several = self.launch.of(section.rpartition(".")[2]).processes > 1
            if loops.inner_steps > 1 and several and loops.optim.save_every % loops.inner_steps:
                raise Impossible(
                    f"{section}.optim.save_every",
                    f"{loops.optim.save_every} must be a multiple of {section}.inner_steps "
                    f"{loops.inner_steps} on several processes: "
                    "rollouts that are still to be learned from are saved for the first process alone",
                )


def check_own_names(sources: Sequence[DataSource], before: list[str], *, key: str) -> None:
    """Refuse a data set with the name of another, or one of those `before`, to which they are added."""
    for place, source in enumerate(sources):
        if source.name in before:
            what = "a kind of data" if source.name in DATA_KINDS else "another data set"
            raise Impossible(
                f"{key}.{place}.name", f"{source.name!r} is the name of {what}; give it one of its own"
            )
        before.append(source.name)
