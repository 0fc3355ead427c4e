"""Read a YAML file into plain values and the line of every key, and write it. ruamel.yaml does both, as DVC
reads params.yaml (YAML 1.2: `1e-4` is a number, `yes` and `1:30` are text), so that a value never means one
thing to DVC and another to a stage."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import Node, ScalarNode
from ruamel.yaml.representer import SafeRepresenter

from ans_core.config.section import ConfigError

TAG = "tag:yaml.org,2002:"
SCALARS = {"str", "int", "float", "bool", "null"}
Keys = tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class YamlFile:
    path: Path
    values: dict[str, Any]
    lines: dict[Keys, int]
    """Counted from 1; list positions are keys too."""


def read_yaml(path: Path) -> YamlFile:
    """Read a file. Raises ConfigError, with file, line and key, for anything that is not a mapping of plain
    values, each key once."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path} is not there: write it with `ans profile tiny`") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 ({error.reason}); save it as UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    values, lines = parse(text, source=str(path))
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}:1: must hold `key: value` lines, it holds "
            f"{'nothing' if values is None else type(values).__name__}"
        )
    return YamlFile(path=path, values=values, lines=lines)


def parse(text: str, *, source: str) -> tuple[Any, dict[Keys, int]]:
    """Return the values of a YAML text and the lines of its keys; `source` names it in errors."""
    yaml = YAML(typ="safe", pure=True)  # the C parser crashes the process on 100,000 open brackets
    try:
        node = yaml.compose(text)
        reader = _Reader(yaml, source)
        return (reader.plain(node, ()) if node else None), reader.lines
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(
            f"{source}{f':{mark.line + 1}' if mark else ''} is no YAML: {error.problem or error.context}"
        ) from None
    except YAMLError as error:
        raise ConfigError(f"{source} is no YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply for settings") from None


class _Representer(SafeRepresenter):
    """Writes 3.0e-05, which is a number in every version of YAML: 3e-05 is a text for readers of 1.1
    (PyYAML)."""

    def represent_float(self, data: float) -> ScalarNode:
        node: ScalarNode = super().represent_float(data)
        if "e" in node.value and "." not in node.value:
            node.value = node.value.replace("e", ".0e", 1)
        return node


_Representer.add_representer(float, _Representer.represent_float)


def dump(values: dict[str, Any]) -> str:
    """Return text that `parse` turns into the same values."""
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style, yaml.sort_base_mapping_type_on_output = False, False  # type: ignore[assignment]
    yaml.width = 132
    yaml.representer.ignore_aliases = lambda data: True
    text = io.StringIO()
    yaml.dump(values, text)
    return text.getvalue()


class _Reader:
    """Turns nodes into values, and records the line of each."""

    def __init__(self, yaml: YAML, source: str) -> None:
        self.yaml, self.source = yaml, source
        self.lines: dict[Keys, int] = {}
        self._seen: set[int] = set()

    def plain(self, node: Node, keys: Keys) -> Any:
        self.lines.setdefault(keys, node.start_mark.line + 1)
        if id(node) in self._seen:
            raise self._error(node, keys, "is an alias (`*name`): write the value itself")
        self._seen.add(id(node))
        kind = str(node.tag).removeprefix(TAG)
        if kind == "map":
            return self._mapping(node, keys)
        if kind == "seq":
            return [self.plain(item, (*keys, str(place))) for place, item in enumerate(node.value)]
        if kind not in SCALARS:
            raise self._error(
                node, keys, f"is no text, number, true, false, list or table (but {kind}); put text in quotes"
            )
        try:
            return self.yaml.constructor.construct_object(node)
        except (ValueError, KeyError) as error:  # 5,000 digits; `!!int x`
            raise self._error(node, keys, f"is no value: {error}") from None

    def _mapping(self, node: Node, keys: Keys) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in node.value:
            if name.tag != f"{TAG}str":
                raise self._error(name, keys, f"has a key that is no name: {str(name.value)[:40]!r}")
            place = (*keys, name.value)
            if name.value in values:
                raise self._error(
                    name, place, f"stands there twice, first in line {self.lines[place]}; keep one"
                )
            self.lines[place] = name.start_mark.line + 1
            values[name.value] = self.plain(value, place)
        return values

    def _error(self, node: Node, keys: Keys, what: str) -> ConfigError:
        return ConfigError(
            f"{self.source}:{node.start_mark.line + 1}: {'.'.join(keys) or 'the whole'} {what}"
        )
