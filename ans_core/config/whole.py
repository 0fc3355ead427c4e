"""All sections together: what params.yaml holds."""

from __future__ import annotations

from ans_core.config.base import Base
from ans_core.config.convert import Convert
from ans_core.config.evaluate import Evaluate
from ans_core.config.judge import Judge
from ans_core.config.launch import Launch
from ans_core.config.prepare import Prepare
from ans_core.config.report import Report
from ans_core.config.rl import Rl
from ans_core.config.section import Section
from ans_core.config.sft import Sft


class Config(Section):
    profile: str
    seed: int = 0
    prepare: Prepare = Prepare()
    base: Base = Base()
    sft: Sft = Sft()
    rl: Rl = Rl()
    judge: Judge = Judge()
    convert: Convert = Convert()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()
    launch: Launch = Launch()
