"""params.yaml -> a frozen, validated Config. Only stages read it; below them functions take plain values. One file a stage."""

from ans_core.config.base import Base, Language, Sam, Vision
from ans_core.config.convert import Convert
from ans_core.config.evaluate import Evaluate
from ans_core.config.judge import Judge
from ans_core.config.launch import Launch
from ans_core.config.prepare import DataSource, Prepare
from ans_core.config.read import PROFILES, ConfigError, load, resolve
from ans_core.config.report import Report
from ans_core.config.rl import LoopName, RewardName, Rl, TextRewardName
from ans_core.config.section import Section
from ans_core.config.sft import Sft
from ans_core.config.training import Lora, Optim
from ans_core.config.whole import Config

__all__ = [
    "PROFILES",
    "Base",
    "Config",
    "ConfigError",
    "Convert",
    "DataSource",
    "Evaluate",
    "Judge",
    "Language",
    "Launch",
    "LoopName",
    "Lora",
    "Optim",
    "Prepare",
    "Report",
    "RewardName",
    "Rl",
    "Sam",
    "Section",
    "Sft",
    "TextRewardName",
    "Vision",
    "load",
    "resolve",
]
