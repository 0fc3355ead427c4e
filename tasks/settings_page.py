"""The settings' classes and the profiles in, docs/settings.md out: `python -m tasks.settings_page`, a part of
`make dvc`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from ans_core.config import PROFILES, Config, resolve
from ans_core.config.section import LARGEST

PAGE = Path("docs/settings.md")
LONGEST = 70
"""Of a profile's value; of a longer one only the number of entries is said."""
HEADER = """\
<!-- Written by `make dvc` from ans_core/config and profiles; a test keeps it true. -->
# Settings

`params.yaml` holds every setting of every stage. `ans profile NAME key=value` writes it, and prints it with `--show`. `ans run key=value`
sets something for one run. A name here is that of a setting there, as in `rl.kl=0.05`. A list or a table is given as a whole and in quotes,
as in `'rl.loops={caption: 1.0, mask: 0.2}'`; `.N.` stands for each entry of a list. [How settings are read](design.md#settings) says more.

Whole numbers end at 10^9. A profile is named where its value is not the default.
"""


def page(root: Path) -> str:
    profiles = {path.stem: resolve(path) for path in sorted((root / PROFILES).glob("*.yaml"))}
    return "\n".join(
        [HEADER, *sections(Config, "", Config(profile="NAME").model_dump(mode="json"), profiles)]
    )


def sections(
    model: type[BaseModel], prefix: str, defaults: dict[str, Any], profiles: dict[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield a heading and a table of a section's own settings, then its sections. `prefix`: as `sft.`;
    defaults, profiles: its values."""
    inner: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            inner[name] = field.annotation
    if prefix:
        yield f"## {prefix.rstrip('.')}\n\n{prose(model.__doc__)}\n"
    rows = [
        row(model, name, prefix, defaults, profiles)
        for name in model.model_fields
        if name not in inner and name != "profile"
    ]
    if rows:
        yield "\n".join(["| setting | values | default | meaning | profiles |", "|-|-|-|-|-|", *rows, ""])
    for name, section in inner.items():
        yield from sections(
            section,
            f"{prefix}{name}.",
            defaults[name],
            {profile: values[name] for profile, values in profiles.items()},
        )
    for name, field in model.model_fields.items():
        for item in get_args(field.annotation)[:1]:
            if isinstance(item, type) and issubclass(item, BaseModel):
                needed = {
                    key: "" if part.is_required() else part.default for key, part in item.model_fields.items()
                }
                yield from sections(item, f"{prefix}{name}.N.", needed, {})


def row(
    model: type[BaseModel],
    name: str,
    prefix: str,
    defaults: dict[str, Any],
    profiles: dict[str, dict[str, Any]],
) -> str:
    by_value: dict[str, list[str]] = {}
    for profile, values in profiles.items():
        if values[name] != defaults[name]:
            by_value.setdefault(value_text(values[name], LONGEST), []).append(profile)
    differing = [f"{value}: {', '.join(families(names, profiles))}" for value, names in by_value.items()]
    schema = model.model_json_schema()
    cells = [
        f"`{prefix}{name}`", values_text(schema["properties"][name], schema.get("$defs", {})),
        value_text(defaults[name]), prose(meanings(model).get(name)), "<br>".join(differing),
    ]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def families(names: list[str], profiles: Iterable[str]) -> list[str]:
    """Return the names of profiles, with `sa2va-*` for all whose name begins so."""
    for start in ("pixelis-", "sa2va-"):
        family = [name for name in profiles if name.startswith(start)]
        if set(family) <= set(names):
            names = [f"{start}*", *(name for name in names if name not in family)]
    return [f"`{name}`" if "*" in name else name for name in names]


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the text below each field of a class and of those that it extends."""
    texts: dict[str, str] = {}
    for extended in reversed(model.mro()):
        if not issubclass(extended, BaseModel) or extended is BaseModel:
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(extended))).body
        assert isinstance(definition, ast.ClassDef)
        for field, after in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                texts[ast.unparse(field.target)] = str(after.value.value)
    return texts


def prose(text: str | None) -> str:
    return " ".join((text or "").split()).replace("<", "&lt;")


def value_text(value: Any, longest: int = 10**6) -> str:
    if value in ("", [], {}):
        return "empty"
    text = (
        yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**6)
        .removesuffix("\n")
        .removesuffix("\n...")
    )
    return f"`{text}`" if len(text) <= longest else f"{len(value)} entries"


def values_text(schema: dict[str, Any], classes: dict[str, Any]) -> str:
    """Return what a setting may be, from its JSON schema."""
    if "$ref" in schema:
        return f"{{{', '.join(classes[schema['$ref'].rpartition('/')[2]]['properties'])}}}"
    if names := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return ", ".join(f"`{name}`" for name in names)
    if "anyOf" in schema:
        return ", or ".join(values_text(one, classes) for one in schema["anyOf"])
    if schema["type"] == "object":
        keys = values_text(schema["propertyNames"], classes) if "propertyNames" in schema else "names"
        return f"table: {keys} to {values_text(schema['additionalProperties'], classes)}"
    if schema["type"] == "array":
        items = schema.get("prefixItems", [])
        return f"{len(items) or ''} list of ".lstrip() + values_text(
            items[0] if items else schema["items"], classes
        )
    return {"integer": "whole number", "number": "number", "boolean": "true, false", "string": "text"}[
        schema["type"]
    ] + range_text(schema)


def range_text(schema: dict[str, Any]) -> str:
    limits = [("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<=")]
    parts = [f"{sign} {schema[key]}" for key, sign in limits if key in schema and schema[key] != LARGEST]
    return f" {', '.join(parts)}" if parts else ", not empty" if schema.get("minLength") else ""


if __name__ == "__main__":
    PAGE.write_text(page(Path()), encoding="utf-8")
