"""params.yaml -> a frozen, validated Config. Only stages read it; functions below them take plain values. One
file per stage."""

from ans_core.config.base import Base, Language, Sam, Vision
from ans_core.config.evaluate import Evaluate, require_samples
from ans_core.config.launch import Launch
from ans_core.config.memory import Memory
from ans_core.config.names import LoopName, RewardName, TextRewardName
from ans_core.config.prepare import DataSource, Prepare
from ans_core.config.read import PROFILES, completed, load, resolve, setting
from ans_core.config.rl import Rl
from ans_core.config.section import ConfigError
from ans_core.config.training import Lora, Optim
from ans_core.config.whole import Config
from ans_core.config.yaml_file import dump, read_yaml

__all__ = [
    "PROFILES",
    "Base",
    "Config",
    "ConfigError",
    "DataSource",
    "Evaluate",
    "Language",
    "Launch",
    "LoopName",
    "Lora",
    "Memory",
    "Optim",
    "Prepare",
    "RewardName",
    "Rl",
    "Sam",
    "TextRewardName",
    "Vision",
    "completed",
    "dump",
    "load",
    "read_yaml",
    "require_samples",
    "resolve",
    "setting",
]
