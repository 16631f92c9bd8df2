"""Every declaration, field by field, against the JSON schemas inside Kafka 4.3.1's own jars.

This reaches what no bytes show: which fields are ignorable, and the defaults of fields that are always written. Skipped
where the jars are not; `make compat` brings them.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tidelog.bench.peers import cache_directory
from tidelog.protocol import messages
from tidelog.protocol.api import CONTROLLER_SERVED, SERVED, api_name
from tidelog.protocol.codec.fields import NEVER, NONE, Field, parse_versions
from tidelog.protocol.codec.schema import Message

JARS = (
    "kafka-clients-*.jar",
    "kafka-metadata-*.jar",
    "kafka-group-coordinator-4*.jar",
    "kafka-transaction-coordinator-4*.jar",
)

# What Kafka calls otherwise: a schema's struct name is ours, behind its message's where two of one file would clash.
FILES = {"ZkMigrationStateRecord": "ZkMigrationRecord"}
STRUCTS = {
    ("ConsumerProtocolSubscription", "TopicPartition"): "ConsumerProtocolTopicPartition",
    ("ConsumerProtocolAssignment", "TopicPartition"): "ConsumerProtocolTopicPartition",
}
UNSTABLE = {"InitProducerId": 6}  # first version that Kafka declares but does not serve


def declared() -> list[type[Message]]:
    found: dict[Any, Any] = {}
    for module in pkgutil.iter_modules(messages.__path__):
        for each in vars(importlib.import_module(f"tidelog.protocol.messages.{module.name}")).values():
            if isinstance(each, type) and issubclass(each, Message) and each is not Message:
                found[each] = None
    nested = {field.element for each in found for _, field in each.FIELDS}
    return [each for each in found if each not in nested]


@pytest.fixture(scope="module")
def schemas() -> dict[str, dict[str, Any]]:
    home = cache_directory() / "kafka"
    if not home.is_dir():
        pytest.skip("Kafka's jars are not here; make compat brings them")
    found: dict[Any, Any] = {}
    for pattern in JARS:
        (jar,) = home.glob(pattern)
        with zipfile.ZipFile(jar) as archive:
            for name in archive.namelist():
                if name.startswith("common/") and name.endswith(".json"):
                    lines = archive.read(name).decode().splitlines()
                    text = "\n".join(line for line in lines if not line.lstrip().startswith("//"))
                    found[Path(name).stem] = json.loads(text)
    return found


def words(name: str) -> str:
    return name.replace("_", "").lower()


def default_of(schema: dict[str, Any]) -> Any:
    kind, default = schema["type"], schema.get("default")
    if "default" in schema and default in (None, "null"):
        return None
    if kind.startswith("[]"):
        return ()
    if kind in ("string", "bytes"):
        return (default or "") if kind == "string" else b""
    if kind == "bool":
        return str(default).lower() == "true"
    if kind == "uuid":
        return bytes(16)
    if kind == "float64":
        return float(default or 0)
    if kind == "records":
        return None
    if kind.startswith(("int", "uint")):
        return int(str(default or 0), 0)
    return ""  # a struct of defaults


def clip(versions: range, bounds: range) -> range:
    clipped = range(max(versions.start, bounds.start), min(versions.stop, bounds.stop))
    return clipped or NONE


def compare(ours: type[Message], schema: dict[str, Any], versions: range, root: dict[str, Any]) -> None:
    common = {each["name"]: each for each in root.get("commonStructs", [])}
    theirs = []
    for field in schema["fields"]:
        in_versions = clip(parse_versions(str(field.get("versions", field.get("taggedVersions")))), versions)
        if in_versions:
            theirs.append((field, in_versions))
    assert [words(name) for name, _ in ours.FIELDS] == [words(field["name"]) for field, _ in theirs]
    for (name, field), (their, in_versions) in zip(ours.FIELDS, theirs):
        where = f"{ours.__name__}.{name}"
        assert clip(field.versions, versions) == in_versions, where
        assert clip(field.nullable, in_versions) == clip(
            parse_versions(their.get("nullableVersions", "none")), in_versions
        ), where
        assert field.tag == their.get("tag"), where
        assert clip(field.tagged, versions) == clip(parse_versions(their.get("taggedVersions", "none")), versions)
        assert field.compact == (their.get("flexibleVersions") != "none"), where
        assert field.default == default_of(their), where
        if in_versions != versions:
            assert field.ignorable == (str(their.get("ignorable", False)).lower() == "true"), where
        compare_kind(field, their, in_versions, root, common, where)


def compare_kind(
    field: Field, their: dict[str, Any], versions: range, root: dict[str, Any], common: dict[str, Any], where: str
) -> None:
    kind = their["type"]
    element = kind.removeprefix("[]")
    if kind.startswith("[]"):
        assert field.kind == "array", where
    struct = their if "fields" in their else common.get(element)
    if struct is None:
        assert (field.element if field.kind == "array" else field.kind) == element, where
        return
    assert field.kind in ("array", "struct"), where
    ours = field.element.__name__
    assert ours in (STRUCTS.get((root["name"], element), element), root["name"] + element), where
    compare(field.element, struct, versions, root)


@pytest.mark.parametrize("message", declared(), ids=lambda message: message.__name__)
def test_a_declaration_is_kafkas(message: type[Message], schemas: dict[str, dict[str, Any]]):
    schema = schemas[FILES.get(message.__name__, message.__name__)]
    versions = parse_versions(schema["validVersions"])
    for api, first in UNSTABLE.items():
        if message.__name__.startswith(api):
            versions = range(versions.start, first)
    assert list(message.VERSIONS) == list(versions)
    flexible = parse_versions(schema["flexibleVersions"])
    assert clip(range(message.FLEXIBLE_FROM, NEVER), versions) == clip(flexible, versions)
    assert schema.get("apiKey") == message.API_KEY
    assert schema["name"] == message.__name__
    compare(message, schema, versions, schema)


@pytest.mark.parametrize(("listener", "served"), [("broker", SERVED), ("controller", CONTROLLER_SERVED)])
def test_what_a_listener_serves_kafkas_listener_of_that_kind_serves(
    listener: str, served: dict[int, range], schemas: dict[str, dict[str, Any]]
):
    for key in served:
        assert listener in schemas[f"{api_name(key)}Request"]["listeners"], api_name(key)
