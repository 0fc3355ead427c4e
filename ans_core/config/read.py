"""Read params.yaml, or a profile and `key=value` words, into a checked Config or its plain values."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ans_core.config.section import SYNONYMS, ConfigError, Impossible, nearest
from ans_core.config.whole import PROFILE_NAME, Config
from ans_core.config.yaml_file import YamlFile, parse, read_yaml

PROFILES = Path("profiles")


def _free_tables(section: type[BaseModel]) -> frozenset[str]:
    """Return the names of settings below `section` whose keys are the user's (a mixture, rewards)."""
    names: set[str] = set()
    for name, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if get_origin(kind) is dict:
                names.add(name)
            elif isinstance(kind, type) and issubclass(kind, BaseModel):
                names |= _free_tables(kind)
    return frozenset(names)


FREE_TABLES = _free_tables(Config)


def load(path: Path) -> Config:
    """Read params.yaml. Missing keys, as in a file of an older version, get the profile's values, and a line
    on stderr names them."""
    file = read_yaml(path)
    values, lacking = completed(file.values, path.parent)
    config = _validate(values, (file,))
    if lacking:
        names = f"{', '.join(lacking[:8])}{f' and {len(lacking) - 8} more' if len(lacking) > 8 else ''}"
        _tell_once(
            f"{path} lacks {names}: taken from profile {config.profile}; `ans profile {config.profile} "
            "--if-needed` writes them in"
        )
    return config


def completed(values: dict[str, Any], root: Path) -> tuple[dict[str, Any], list[str]]:
    """Return `values` with missing keys from their profile (from the plain defaults if the profile is
    missing), and the names of those keys."""
    profile = values.get("profile")
    profile_name = profile if isinstance(profile, str) and re.match(PROFILE_NAME, profile) else "none"
    defaults = Config(profile=profile_name).model_dump(mode="json", exclude={"profile"})
    present = set(_flat(values))
    lacking = [name for name in _flat(defaults) if name not in present]
    if not lacking:
        return values, []
    if (root / PROFILES / f"{profile_name}.yaml").is_file():
        defaults = resolve(root / PROFILES / f"{profile_name}.yaml")
    return _merge(defaults, values), lacking


def resolve(profile: Path, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Merge defaults, profiles/NAME.yaml and `key=value` words (dotted keys, YAML values); return the
    validated, plain values of params.yaml."""
    files = _profile_files(profile)
    values = Config(profile=profile.stem).model_dump(mode="json")
    for file in reversed(files):
        values = _merge(values, {key: value for key, value in file.values.items() if key != "extends"})
    for word in words:
        _set(values, word, words)
    return _validate(values, files, words).model_dump(mode="json")


def _profile_files(path: Path, before: tuple[Path, ...] = ()) -> tuple[YamlFile, ...]:
    """Return the profile and those that it extends, nearest first."""
    if not path.is_file():
        names = sorted(other.stem for other in path.parent.glob("*.yaml"))
        raise ConfigError(
            f"no profile named {path.stem!r}{nearest(path.stem, names)}; {path.parent} has {names}"
        )
    if path in before:
        raise ConfigError(f"{path} extends itself, by {[other.stem for other in before]}")
    file = read_yaml(path)
    base = file.values.get("extends")
    if base is None:
        return (file,)
    if not isinstance(base, str):
        raise ConfigError(f"{path}:{file.lines['extends',]}: extends = {base!r}: name one profile")
    return (file, *_profile_files(path.with_name(f"{base}.yaml"), (*before, path)))


def setting(word: str) -> tuple[str, Any]:
    """Return the dotted key and the value of a `key=value` word."""
    key, equals, text = word.partition("=")
    if not (equals and key):
        raise ConfigError(f"{word!r} is no setting: write key=value, as in rl.kl=0.05")
    if key == "profile":
        raise ConfigError(
            f"{word!r}: a profile is no single setting; `ans profile {text}` writes all of its settings"
        )
    return key, parse(text, source=repr(word))[0]


def _set(values: dict[str, Any], word: str, words: Sequence[str]) -> None:
    """Set what a word says; `words`: all that are set together."""
    key, value = setting(word)
    *sections, leaf = key.split(".")
    at = values
    for place, section in enumerate(sections):
        if section not in at:
            meant = nearest(section, at) or _meant(sections[:place], leaf, valid_names=())
            raise ConfigError(f"{word!r}: there is no section {section!r}{meant}")
        if not isinstance(at[section], dict):
            name = ".".join(sections[: place + 1])
            raise ConfigError(
                f"{word!r}: {name} has no keys; give its value as a whole, as "
                f"{name}={_shortened(str(at[section]))}"
            )
        at = at[section]
    # `base.sam2=''`, of which a shell leaves `base.sam2=`
    if value is None and isinstance(at.get(leaf), str):
        value = ""
    section = key.removesuffix(leaf)
    _displace(
        at, [other.partition("=")[0].removeprefix(section) for other in words if other.startswith(section)]
    )
    at[leaf] = value


def _merge(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge sections key by key; a free-form table (a mixture, rewards) is one value and is replaced as a
    whole."""
    merged = dict(values)
    _displace(merged, changes)
    for key, change in changes.items():
        is_section = isinstance(change, dict) and isinstance(values.get(key), dict) and key not in FREE_TABLES
        merged[key] = _merge(values[key], change) if is_section else change
    return merged


def _displace(values: dict[str, Any], changes: Collection[str]) -> None:
    """Drop the steps of a section whose epochs are set, and the other way round; of changes that set both
    nothing, so that they are refused."""
    if "epochs" in values and ("steps" in changes) != ("epochs" in changes):
        values |= {"epochs": 0.0} if "steps" in changes else {"steps": 0}


def _origin(keys: tuple[str, ...], files: Sequence[YamlFile], words: Sequence[str]) -> str:
    """Return e.g. `params.yaml:12`: the file and line of the key or, if no file has it, of the section around
    it. Of `files` the first goes before the others, and `words` before all of them."""
    for word in words:
        named = tuple(word.partition("=")[0].split("."))
        if keys[: len(named)] == named:
            return repr(word)
    for length in range(len(keys), 0, -1):
        for file in files:
            if keys[:length] in file.lines:
                return f"{file.path}:{file.lines[keys[:length]]}"
    return f"{files[0].path}:1"


def _validate(values: dict[str, Any], files: Sequence[YamlFile], words: Sequence[str] = ()) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(fault, files, words) for fault in error.errors())) from None


def _explain(fault: Any, files: Sequence[YamlFile], words: Sequence[str]) -> str:
    keys = tuple(str(part) for part in fault["loc"] if part != "[key]")
    reason = fault.get("ctx", {}).get("error")
    if isinstance(reason, Impossible):
        keys += tuple(reason.keys)
    where = f"{_origin(keys, files, words)}: {'.'.join(keys)}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        valid_names = _keys(keys[:-1])
        return f"{where}: unknown setting{_meant(keys[:-1], keys[-1], valid_names)}; there are {valid_names}"
    if isinstance(fault["input"], dict | tuple | BaseModel) or fault["type"] == "missing":
        return f"{where}: {message}"  # without the value, which is long or a secret
    if fault["type"] == "literal_error":
        message += nearest(str(fault["input"]), re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
    return f"{where} = {_shortened(repr(fault['input']))}: {message}"


def _meant(sections: Sequence[str], leaf: str, valid_names: Sequence[str]) -> str:
    """Return ` (did you mean 'sft.optim.lr'?)`: a setting below this section by a name that other libraries
    use, or by the same name; else one of the `valid_names` that is spelled alike; else up to three settings
    elsewhere; nothing if there is none."""
    name = SYNONYMS.get(leaf, leaf)
    everywhere = [
        key for key in _flat(Config(profile="none").model_dump(mode="json")) if f".{key}".endswith(f".{name}")
    ]
    below = [key for key in everywhere if key.startswith(".".join([*sections, ""]))]
    if (alike := nearest(leaf, valid_names)) and not everywhere:
        return alike
    return f" (did you mean {' or '.join(map(repr, (below or everywhere)[:3]))}?)" if everywhere else ""


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:60]} ... ({len(text)} characters)"


def _keys(sections: Sequence[str]) -> list[str]:
    """Return the valid names in a section, given as the path of keys to it (which may hold list
    positions)."""
    model: Any = Config
    for section in sections:
        if section.isdigit():
            continue
        if get_origin(model) is dict:  # the section is one of its keys
            model = get_args(model)[1]
            continue
        model = model.model_fields[section].annotation
        if get_origin(model) is tuple:
            model = get_args(model)[0]
    return list(model.model_fields)


@functools.cache
def _tell_once(line: str) -> None:
    print(line, file=sys.stderr)


def _flat(values: dict[str, Any], prefix: str = "") -> list[str]:
    """Return dotted names of all leaves; a free-form table (mixture, rewards) counts as one leaf."""
    names = []
    for key, value in values.items():
        is_section = isinstance(value, dict) and bool(value) and key not in FREE_TABLES
        names += _flat(value, f"{prefix}{key}.") if is_section else [prefix + key]
    return names
