"""params.yaml, or a profile and `key=value` words, in; a checked Config, or its plain values, out."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from ans_core.config.whole import Config

PROFILES = Path("profiles")
FREE_TABLES = frozenset({"mixture", "loops", "rewards_caption", "rewards_mask", "rewards_text"})


class ConfigError(ValueError):
    """A setting that is unknown, mistyped or impossible. The message names the file, the line, the key and the remedy."""


def load(path: Path) -> Config:
    """Reads a complete params.yaml. Every key must be there: what ran is what is written, defaults fill in nothing."""
    values = _read(path)
    config = _validate(values, source=path)
    missing = sorted(set(_flat(config.model_dump(mode="json"))) - set(_flat(values)))
    if missing:
        raise ConfigError(
            f"{path}: lacks {', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}: write it anew with `ans profile {config.profile}`"
        )
    return config


def resolve(profile: Path, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Defaults + profiles/NAME.yaml + `key=value` words (dotted keys, YAML values): the validated, plain values of params.yaml."""
    if not profile.is_file():
        names = sorted(path.stem for path in profile.parent.glob("*.yaml"))
        raise ConfigError(f"no profile named {profile.stem!r}{_nearest(profile.stem, names)}; {profile.parent} has {names}")
    values = _merge(Config(profile=profile.stem).model_dump(mode="json"), _read(profile))
    for word in overrides:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is no setting: write key=value, as in rl.kl=0.05")
        *sections, leaf = key.split(".")
        at = values
        for section in sections:
            if not isinstance(at.get(section), dict):
                raise ConfigError(f"{word!r}: there is no section {section!r}{_nearest(section, list(at))}")
            at = at[section]
        at[leaf] = yaml.safe_load(text)
    return _validate(values, source=profile).model_dump(mode="json")


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sections are merged key by key; a free-form table (a mixture, rewards) is one value and replaced whole."""
    merged = dict(values)
    for key, change in changes.items():
        is_section = isinstance(change, dict) and isinstance(values.get(key), dict) and key not in FREE_TABLES
        merged[key] = _merge(values[key], change) if is_section else change
    return merged


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: write it with `ans profile tiny`") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold `key: value` lines, it holds {type(values).__name__}")
    return values


def _validate(values: dict[str, Any], source: Path) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault, source) for fault in error.errors())) from None


def _explain(fault: Any, source: Path) -> str:
    location = [str(part) for part in fault["loc"]]
    where = f"{source}{_line(source, location)}: {'.'.join(location)}"
    if fault["type"] == "extra_forbidden":
        known = _keys(location[:-1])
        return f"{where}: unknown setting{_nearest(location[-1], known)}; there are {known}"
    if isinstance(fault["input"], dict):  # a whole section: what is wrong stands in the message, and the rest may be long, or a secret
        return f"{where}: {fault['msg'].removeprefix('Value error, ')}"
    return f"{where} = {fault['input']!r}: {fault['msg']}"


def _keys(sections: list[str]) -> list[str]:
    """Names that are valid in a section, given as the path of keys that leads there (list positions among them)."""
    model: Any = Config
    for section in sections:
        if section.isdigit():
            continue
        annotation = model.model_fields[section].annotation
        inner = [part for part in get_args(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
        model = inner[0] if inner else annotation
    return list(model.model_fields)


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _line(path: Path, keys: list[str]) -> str:
    """`:12`, the line of a key in a YAML file, or nothing where the file does not have it (an override, a default)."""
    node = yaml.compose(path.read_text(encoding="utf-8"))
    line = None
    for key in keys:
        if isinstance(node, yaml.MappingNode):
            found = [(name, value) for name, value in node.value if name.value == key]
        elif isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            found = [(node.value[int(key)], node.value[int(key)])]
        else:
            found = []
        if not found:
            return ""
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return f":{line}" if line else ""


def _flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all leaves; the free-form tables (mixtures, rewards) count as one leaf."""
    names = []
    for key, value in values.items():
        is_section = isinstance(value, dict) and bool(value) and key not in FREE_TABLES
        names += _flat(value, f"{prefix}{key}.") if is_section else [prefix + key]
    return names
