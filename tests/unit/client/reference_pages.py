"""`docs/client-reference.md` and `docs/client-options.md`, rendered from the code; run as a module it writes them."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tidelog
from tidelog.client import config, model
from tidelog.client.admin import client, cluster, configs, features, groups, log_dirs, producers, transactions

DOCS = Path(__file__).resolve().parents[3] / "docs"
REFERENCE = DOCS / "client-reference.md"
OPTIONS = DOCS / "client-options.md"
COMMAND = "python -m tests.unit.client.reference_pages"

_CLIENTS = (tidelog.Producer, tidelog.Consumer, tidelog.Admin)
_ARGUMENTS: tuple[type, ...] = (
    tidelog.TopicPartition,
    tidelog.NewTopic,
    tidelog.OffsetAndMetadata,
    tidelog.OffsetAndTimestamp,
    tidelog.PartitionErrors,
    tidelog.BrokerErrors,
    tidelog.ConsumerRecord,
    tidelog.RecordMetadata,
    tidelog.ConsumerGroupMetadata,
    tidelog.RebalanceListener,
)
_ADMIN_MODULES = (model, client, cluster, configs, features, groups, log_dirs, producers, transactions)
# What the blocking clients call, and no program.
_INTERNAL_METHODS = {
    "abandon",
    "application_alive",
    "build_batch",
    "next_batch",
    "note_lost_record",
    "refill",
    "report_unsent",
    "return_records",
    "send_offsets_of",
    "send_built_batch",
    "send_pieces",
    "warn_of_undelivered",
}
_INTERNAL_PARAMETERS = {"self", "ticket"}


def reference() -> str:
    parts = [
        "# The Python client, method by method",
        f"Made from the docstrings by `{COMMAND}`. [client.md](client.md) explains how the parts work together,"
        " [client-options.md](client-options.md) has the options.",
        "The methods of `Producer`, `Consumer` and `Admin` in `tidelog.client.sync` have the same names and arguments,"
        " and no `await`.",
    ]
    for each in _CLIENTS:
        parts += [f"## {each.__name__}", _prose(each)]
        for name, method in _methods(each):
            parts += [f"### {_call(each.__name__.lower(), name, method)}", _prose(method)]
    parts.append("## Arguments and results")
    for kind in _ARGUMENTS:
        parts += list(_type(kind))
    parts.append("## Results of Admin")
    for kind in _admin_types():
        parts += list(_type(kind))
    return "\n\n".join(part for part in parts if part) + "\n"


def options() -> str:
    parts = [
        "# Options of the Python client",
        f"Made from the code by `{COMMAND}`. Names with dots are accepted too. A wrong name, type or value raises a"
        " `ConfigError` of one line.",
    ]
    for title, owner in (
        ("All clients", config.ClientConfig),
        ("Producer", config.ProducerConfig),
        ("Consumer", config.ConsumerConfig),
    ):
        rows = ["| option | default | values | meaning |", "|---|---|---|---|"]
        meanings = _meanings(owner)
        for field in fields(owner):
            if field.name not in meanings:
                continue  # of every client
            rows.append(f"| `{field.name}` | `{_default(field)}` | {_values(field)} | {meanings[field.name]} |")
        parts += [f"## {title}", "\n".join(rows)]
    return "\n\n".join(parts) + "\n"


def _methods(owner: type) -> Iterator[tuple[str, Any]]:
    for name, _ in inspect.getmembers(owner, inspect.isfunction):
        if not name.startswith("_") and name not in _INTERNAL_METHODS:
            yield name, inspect.getattr_static(owner, name)


def _call(variable: str, name: str, method: Any) -> str:
    arguments = list(_arguments(method))
    returned = str(inspect.signature(method).return_annotation)
    awaited = "await " if inspect.iscoroutinefunction(method) else ""
    arrow = "" if returned == "None" else f" -> {returned}"
    return f"`{awaited}{variable}.{name}({', '.join(arguments)}){arrow}`"


def _arguments(method: Any) -> Iterator[str]:
    """The parameters as a call has them, with the `*` before those that have to be named."""
    is_named_only = False
    for parameter in inspect.signature(method).parameters.values():
        if parameter.name in _INTERNAL_PARAMETERS:
            continue
        if parameter.kind is parameter.VAR_POSITIONAL:
            is_named_only = True
            yield f"*{parameter.name}"
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not is_named_only:
            is_named_only = True
            yield "*"
        has_default = parameter.default is not inspect.Parameter.empty
        yield f"{parameter.name}={parameter.default!r}" if has_default else parameter.name


def _type(kind: type) -> Iterator[str]:
    yield f"### `{kind.__name__}`"
    text = inspect.getdoc(kind) or ""
    if not text.startswith(f"{kind.__name__}("):  # the docstring that Python makes for a dataclass or a named tuple
        yield _markdown(text)
    names = [field.name for field in fields(kind)] if is_dataclass(kind) else list(getattr(kind, "_fields", ()))
    if names:
        yield "Fields: " + ", ".join(f"`{name}`" for name in names) + "."
    else:
        for name, method in _methods(kind):
            yield f"- {_call('', name, method).replace('`.', '`', 1)}: {' '.join(_prose(method).split())}"


def _admin_types() -> list[type]:
    found: dict[str, type] = {}
    for module in _ADMIN_MODULES:
        found |= {kind.__name__: kind for kind in _results_of(module) if kind not in _ARGUMENTS}
    return [found[name] for name in sorted(found)]


def _results_of(module: ModuleType) -> Iterator[type]:
    for name, kind in inspect.getmembers(module, inspect.isclass):
        is_record = is_dataclass(kind) or hasattr(kind, "_fields")
        if is_record and not name.startswith("_") and kind.__module__ == module.__name__:
            yield kind


def _prose(item: Any) -> str:
    return _markdown(inspect.getdoc(item) or "")


def _markdown(docstring: str) -> str:
    """Indented examples become code, `Raises:` sections lists; each paragraph is one line."""
    blocks = []
    for block in docstring.split("\n\n"):
        if block.startswith("    "):
            blocks.append("```python\n" + textwrap.dedent(block) + "\n```")
        elif block.startswith("async with "):
            blocks.append(f"```python\n{block}\n```")
        elif block.startswith("Raises:\n"):
            blocks.append("Raises " + re.sub(r"\s+", " ", block.removeprefix("Raises:\n")).strip())
        else:
            blocks.append(re.sub(r"\s+", " ", block).strip())
    return "\n\n".join(blocks)


def _meanings(owner: type) -> dict[str, str]:
    """The docstring under each field of a class, on one line."""
    body = ast.parse(inspect.cleandoc(inspect.getsource(owner))).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            assert isinstance(text, ast.Expr), f"{field.target.id} has no docstring"
            assert isinstance(text.value, ast.Constant)
            meanings[field.target.id] = re.sub(r"\s+", " ", str(text.value.value)).strip().replace("|", "\\|")
    return meanings


def _default(field: Any) -> str:
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    if isinstance(default, bool):
        return str(default).lower()
    return "none" if default in (None, "") else str(default)


def _values(field: Any) -> str:
    if choices := field.metadata.get("choices") or field.metadata.get("forms"):
        return ", ".join(f"`{choice}`" for choice in choices)
    if bounds := field.metadata.get("bounds"):
        low, high = bounds
        return f"{low} to {high}" if high not in (2**31 - 1, 2**63 - 1) else f"{low} and more"
    kind = str(field.type).removesuffix(" | None")
    return {"bool": "`true`, `false`", "str": "text", "int": "number"}.get(kind, "")


if __name__ == "__main__":
    REFERENCE.write_text(reference())
    OPTIONS.write_text(options())
