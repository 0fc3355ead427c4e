"""Write params.yaml from a profile's name and `key=value` words: complete, resolved, and never over edits by
hand."""

from __future__ import annotations

import copy
import hashlib
import json
import shlex
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from ans_core.config import (
    PROFILES,
    ConfigError,
    DataSource,
    completed,
    dump,
    load,
    read_yaml,
    resolve,
    setting,
)
from ans_core.fingerprint import fingerprint
from ans_core.written import write_atomically

MARK = "# unchanged since written: "
FOLDERS = (
    ("base", ("internvl", "sam2"), "files"),
    ("sft", ("lora_ranks_from",), "lora_ranks_files"),
    ("agent.sft", ("lora_ranks_from",), "lora_ranks_files"),
    ("agent.sft", ("traces",), "traces_files"),
    ("agent", ("segmenter",), "segmenter_files"),
)
"""Section, its keys that name folders or files of weights or traces, and the key of their fingerprint."""


def digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def render(values: dict[str, Any], words: tuple[str, ...]) -> str:
    command = shlex.join(["ans", "profile", values["profile"], *map(in_comment, words)])
    lines = [
        f"# Every setting of every stage, as written by `{command}`. Edit at will; what stands here is "
        "what runs.",
        "# ans_core/config/ says what each one means.",
        MARK + digest(values),
    ]
    return "\n".join(lines) + "\n" + dump(values)


def in_comment(word: str) -> str:
    """Return a setting as it can stand between backticks in a comment: on one line, without a backtick."""
    if word.isprintable() and "`" not in word:
        return word
    key, value = setting(word)
    return f"{key}={json.dumps(value)}".replace("`", "\\u0060")


def edited_keys(path: Path) -> list[str]:
    """Return settings that differ from those written; empty if params.yaml is as `ans profile` left it. A
    setting that the file lacks is no edit."""
    values = read_yaml(path).values
    if marked(path) == digest(values):
        return []
    plain = as_written(path, values)
    return (
        ["(all)"]
        if plain is None
        else differing(plain, without_fingerprints(completed(values, path.parent)[0]))
        or ["(written by hand)"]
    )


def marked(path: Path) -> str | None:
    """Return the digest, stored in params.yaml, of the settings as written."""
    digests = [
        line.removeprefix(MARK)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith(MARK)
    ]
    return digests[0] if len(digests) == 1 else None


def as_written(path: Path, values: dict[str, Any]) -> dict[str, Any] | None:
    """Return what `ans profile` would write today, with the words that params.yaml was written with; None if
    it fails."""
    try:
        return resolve(
            path.parent / PROFILES / f"{values.get('profile')}.yaml",
            words_of(path.read_text(encoding="utf-8")),
        )
    except ConfigError:
        return None


def words_of(text: str) -> tuple[str, ...]:
    """Return the `key=value` words that params.yaml was written with."""
    first = text.partition("\n")[0]
    if first.count("`") < 2:
        return ()
    try:
        return tuple(word for word in shlex.split(first.split("`")[1])[3:] if "=" in word)
    except ValueError as error:
        raise ConfigError(f"params.yaml:1: the command that wrote it can't be read: {error}") from None


def differing(one: Any, other: Any, prefix: str = "") -> list[str]:
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [prefix.rstrip(".")]
    keys = [*one, *(key for key in other if key not in one)]
    return [name for key in keys for name in differing(one.get(key), other.get(key), f"{prefix}{key}.")]


def write(name: str, root: Path, words: tuple[str, ...] = (), *, force: bool = False) -> Path:
    """Write params.yaml. Refuses to overwrite edits by hand, and names them."""
    path = root / "params.yaml"
    values = resolve(root / PROFILES / f"{name}.yaml", words)
    if path.exists() and not force and (edits := edited_keys(path)):
        raise ConfigError(
            f"{path} has been edited by hand: {', '.join(edits[:8])}. Keep it, or drop the edits with `ans "
            f"profile {name} --force` "
            "(settings can also be given on that line, as in `ans profile tiny rl.kl=0.05`)"
        )
    path.write_text(render(values, words), encoding="utf-8")
    return path


def write_if_needed(name: str, root: Path) -> str:
    """Keep the edits and words of a params.yaml of this profile and add what it lacks; else write it anew."""
    path = root / "params.yaml"
    if not path.exists() or read_yaml(path).values.get("profile") != name:
        write(name, root)
        return f"params.yaml: profile {name}"
    if edits := edited_keys(path):
        rewrite(root, load(path).model_dump(mode="json"))
        return (
            f"params.yaml: profile {name} with your edits kept ({', '.join(edits[:8])}); `ans profile "
            f"{name} --force` drops them"
        )
    words = words_of(path.read_text(encoding="utf-8"))
    write(name, root, words)
    return f"params.yaml: profile {name}" + (
        f" with {shlex.join(words)} kept; `ans profile {name}` drops them" if words else ""
    )


def insert_sources(values: dict[str, Any], paths: list[Path], data_format: str | None) -> list[str]:
    """Insert folders (or files of folders with several sets) into prepare.sources of these settings; return
    what to print."""
    # loads torch and datasets, which `ans profile` does without
    from ans_core.data.formats import training_format

    lines = []
    sources = values["prepare"]["sources"]
    for folder in paths:
        if any(source["path"] == str(folder) for source in sources):
            lines.append(f"{folder} is in prepare.sources already")
            continue
        name = folder.stem if folder.is_file() else folder.name
        if any(source["name"] == name for source in sources):
            raise ConfigError(
                f"{folder} can't be added: prepare.sources has another data set named {name!r}; rename the "
                "folder"
            )
        if not folder.exists():
            raise ConfigError(f"{folder} can't be added to prepare.sources: there is no such folder or file")
        source = DataSource(name=name, format=data_format or training_format(folder), path=str(folder))
        sources.append(source.model_dump(mode="json"))
        lines.append(f"{folder} added to prepare.sources of this run")
    return lines


def watch_sources(root: Path) -> list[str]:
    """Write the fingerprints of data sets (prepare, evaluate, agent, evaluate.public), weights and traces
    on this machine (FOLDERS) if the files have changed: their stages then run again."""
    values = load(root / "params.yaml").model_dump(mode="json")
    lines = insert_fingerprints(values, root)
    rewrite(root, values)
    return lines


def insert_fingerprints(values: dict[str, Any], root: Path) -> list[str]:
    """Insert into these settings the fingerprints of the files as they are now; return what to print of those
    that have changed."""
    lines = []
    for entry, key, paths in fingerprinted(values):
        current = " ".join(filter(None, (fingerprint(root / path) for path in paths)))  # a hub id has none
        if entry[key] != current:
            lines += [f"params.yaml: the files of {' or '.join(paths)} have changed"] if entry[key] else []
            entry[key] = current
    return lines


def fingerprinted(values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, list[str]]]:
    """Yield (entry, its key of a fingerprint, the paths that this is of) of all settings."""
    for source in (
        *values["prepare"]["sources"],
        *values["evaluate"]["sources"],
        *values["agent"]["sources"],
        *values["evaluate"]["public"],
    ):
        yield source, "files", [source["path"]]
    for place, names, key in FOLDERS:
        section = reduce(getitem, place.split("."), values)
        yield section, key, [section[name] for name in names if section[name]]


def without_fingerprints(values: dict[str, Any]) -> dict[str, Any]:
    """Return the settings alone: fingerprints are written by runs, and are no edits."""
    values = copy.deepcopy(values)
    for entry, key, _ in fingerprinted(values):
        entry[key] = ""
    return values


def rewrite(root: Path, values: dict[str, Any]) -> None:
    """Write params.yaml with these values, marked as edited if they differ from what its command writes,
    untouched if they don't."""
    path = root / "params.yaml"
    if values != read_yaml(path).values:
        written = render(values, words_of(path.read_text(encoding="utf-8")))
        edited = without_fingerprints(values) != as_written(path, values)
        write_atomically(path, written.replace(MARK + digest(values), MARK + "edited") if edited else written)
        load(path)
