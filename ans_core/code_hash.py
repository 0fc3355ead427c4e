"""Code of this package -> a hash: a module and what that imports of it, without comments, docstrings and
layout.

The hash is of tokens as Python 3.11 cuts them, so it is the same on later versions.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import os
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

CACHE = Path(".ans/code.json")
"""Tokens' hash and imports of every file, valid while its size and time of last change are the same."""
SETTINGS = Path("ans_core/config")
"""Of these files only what computes counts: values reach a stage as parameters, which dvc.yaml lists, and a changed
default changes nothing until params.yaml has it."""
LAYOUT = frozenset((tokenize.NL, tokenize.COMMENT, tokenize.ENCODING))
MADE_BY = [sys.version, hashlib.sha256(Path(__file__).read_bytes()).hexdigest()]
"""Who wrote CACHE: another Python, or another version of this module, would find other hashes."""
STATEMENT_ENDS = frozenset((tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER))


class CodeHashes:
    """The Python files and package data of a checkout, each read once."""

    def __init__(self, root: Path = Path(), *, package: str = "ans_core") -> None:
        self._root, self._package = root, package
        self._cache: dict[str, dict[str, Any]] = read_cache(root / CACHE)
        self._modules: dict[tuple[str, ...], Path | None] = {}
        self._read: dict[Path, dict[str, Any]] = {}
        self._changed = False

    def hash_of(self, modules: Iterable[str]) -> str:
        """Hash all that importing these modules reads of the package."""
        digest = hashlib.sha256()
        for file in sorted({file for module in modules for file in self.files(module)}):
            digest.update(f"{file.as_posix()} {self._facts(file)['hash']}\n".encode())
        self._save()
        return digest.hexdigest()[:16]

    def files(self, module: str) -> list[Path]:
        """Return the files of the package that importing `module` reads, relative to the checkout, sorted;
        includes parents' __init__.py and the package data that these modules name."""
        todo, files = [module], set[Path]()
        while todo:
            parts = todo.pop().split(".")
            if parts[0] != self._package:
                continue
            for length in range(1, len(parts) + 1):
                file = self._module_file(tuple(parts[:length]))
                if file is not None and file not in files:
                    files.add(file)
                    todo += self._facts(file)["imports"]
        files |= {file.parent / name for file in files for name in self._facts(file)["data"]}
        return sorted(file for file in files if not self._facts(file)["empty"])

    def _module_file(self, parts: tuple[str, ...]) -> Path | None:
        """Return the file of a dotted name, or None if the name is no module (a function, say)."""
        if parts not in self._modules:
            path = Path(*parts)
            candidates = (path / "__init__.py", path.with_suffix(".py"))
            self._modules[parts] = next((file for file in candidates if (self._root / file).is_file()), None)
        return self._modules[parts]

    def _facts(self, file: Path) -> dict[str, Any]:
        """Return a file's `hash` and whether it is `empty`; of a module also the dotted names that it may
        `imports` and the package data, `data`, that it names."""
        if file in self._read:
            return self._read[file]
        path, stat = self._root / file, (self._root / file).stat()
        entry = self._cache.get(file.as_posix(), {})
        stamp: list[int | str] = [stat.st_size, stat.st_mtime_ns]
        if file.suffix == ".py":  # a file that comes or goes beside a module may be one that it names
            stamp += sorted(package_data(path.parent))
        if entry.get("stamp") != stamp:
            entry = {"stamp": stamp, **facts(path, package=file.parent.parts)}
            self._cache[file.as_posix()] = entry
            self._changed = True
        self._read[file] = entry
        return entry

    def _save(self) -> None:
        path = self._root / CACHE
        if self._changed and path.parent.is_dir():
            # other processes may do the same now
            partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
            partial.write_text(json.dumps({"made_by": MADE_BY, "files": self._cache}), encoding="utf-8")
            partial.replace(path)
            self._changed = False


def read_cache(path: Path) -> dict[str, dict[str, Any]]:
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))
        return dict(cache["files"]) if cache["made_by"] == MADE_BY else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def facts(path: Path, *, package: tuple[str, ...]) -> dict[str, Any]:
    if path.suffix != ".py":
        data = path.read_bytes()
        return {"hash": hashlib.sha256(data).hexdigest(), "empty": not data}
    text = path.read_text(encoding="utf-8")
    code = computing(text) if Path(*package) == SETTINGS else text
    return {
        "hash": hashlib.sha256("\0".join(tokens(code)).encode()).hexdigest(),
        "empty": not code,
        "imports": sorted(imported_names(text, package)),
        "data": sorted(name for name in package_data(path.parent) if Path(name).name in text),
    }


def computing(text: str) -> str:
    """Return the functions of a module of settings but for validators, if one of them is a method or property that
    stages call; else nothing: the others check values, or read them."""
    functions, called = [], False
    for top in ast.parse(text).body:
        section = isinstance(top, ast.ClassDef) and not top.name.startswith("_")
        for node in top.body if isinstance(top, ast.ClassDef) else [top]:
            if isinstance(node, ast.FunctionDef) and not any(map(is_validator, node.decorator_list)):
                functions.append(ast.get_source_segment(text, node) or "")
                called = called or (section and not node.name.startswith("_"))
    return "\n".join(functions) if called else ""


def is_validator(decorator: ast.expr) -> bool:
    return "validator" in ast.unparse(decorator)


def tokens(text: str) -> list[str]:
    """Return the tokens of a module without comments, line breaks inside statements, and statements that are
    a string alone (docstrings)."""
    code_tokens: list[tokenize.TokenInfo] = []
    statement: list[tokenize.TokenInfo] = []
    for token in undivided(text):
        if token.type in LAYOUT:
            continue
        statement.append(token)
        if token.type in STATEMENT_ENDS:
            if token.type != tokenize.NEWLINE or any(part.type != tokenize.STRING for part in statement[:-1]):
                code_tokens += statement
            statement = []
    # The text of an indent is layout, its place is not.
    return [tokenize.tok_name[t.type] if t.type in STATEMENT_ENDS else t.string for t in code_tokens]


def undivided(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield the tokens of a module, an f-string as one of them, which Python 3.12 and later divide (PEP 701)."""
    lines = list(io.StringIO(text))
    starts: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":
            starts.append(token.start)
        elif name == "FSTRING_END":
            (row, column), (end_row, end_column) = starts.pop(), token.end
            source = [*lines[row - 1 : end_row - 1], lines[end_row - 1][:end_column]]
            source[0] = source[0][column:]
            token = token._replace(type=tokenize.STRING, string="".join(source))
        if not starts:
            yield token


def imported_names(text: str, package: tuple[str, ...]) -> set[str]:
    """Return dotted names that a module of `package` may import, also inside functions. `from a import b`
    gives `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*anchor, *([node.module] if node.module else [])))
            names |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def package_data(folder: Path) -> frozenset[str]:
    """Return a package's files that are not Python (word lists, templates), also in sub-folders without
    modules, relative to it."""
    paths = {path for path in folder.iterdir() if path.is_file() and path.suffix not in {".py", ".pyc"}}
    for child in folder.iterdir():
        if child.is_dir() and child.name != "__pycache__" and not any(child.rglob("*.py")):
            paths |= {path for path in child.rglob("*") if path.is_file()}
    return frozenset(path.relative_to(folder).as_posix() for path in paths)
