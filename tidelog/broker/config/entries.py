"""Configs as DescribeConfigs and CreateTopics show them: every key, its value, its source, its synonyms.

Pure reading of a `NodeConfig` and the run-time layers of the metadata image. Order, sources and synonyms are those of
Kafka's `ConfigHelper`: a synonym list starts at the key itself, so a value that comes from a weaker unit
(`log.retention.hours`) is shown as the default it stands in for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog.broker.config.definition_types import (
    BOOLEAN,
    CLUSTER_WIDE,
    DOUBLE,
    INT,
    INTERNAL,
    LIST,
    LONG,
    PER_BROKER,
    SHORT,
    ConfigDefinition,
    base_name,
)
from tidelog.broker.config.definitions import (
    BROKER,
    BROKER_SYNONYMS,
    CLIENT_METRICS,
    DYNAMIC_ONLY,
    GROUP,
    TOPIC,
    TOPIC_SYNONYMS,
)

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import NodeConfig

# Where a value comes from (DescribeConfigsResponse.ConfigSource).
TOPIC_SOURCE = 1
DYNAMIC_BROKER_SOURCE = 2
DYNAMIC_DEFAULT_BROKER_SOURCE = 3
STATIC_BROKER_SOURCE = 4
DEFAULT_SOURCE = 5
BROKER_LOGGER_SOURCE = 6
CLIENT_METRICS_SOURCE = 7
GROUP_SOURCE = 8

UNKNOWN_TYPE = 0

Layers = Sequence[Mapping[str, str]]
"""Run-time broker configs, strongest first: this broker's, then the cluster's (as `MetadataImage` gives them)."""


class Synonym(NamedTuple):
    name: str
    value: str | None
    source: int


class ConfigEntry(NamedTuple):
    name: str
    value: str | None
    source: int
    read_only: bool
    sensitive: bool
    type: int
    documentation: str | None
    synonyms: Sequence[Synonym]


def canonical_text(definition: ConfigDefinition, text: str | None) -> str | None:
    """The value as Kafka prints it after parsing: no stray spaces, booleans in lower case."""
    value = definition.parse(text)
    if value is None:
        return None
    if definition.type == BOOLEAN:
        return "true" if value else "false"
    if definition.type in (INT, LONG, SHORT):
        return str(value)
    if definition.type == LIST:
        return ",".join(value)
    if definition.type == DOUBLE:
        return text if text == definition.default else str(value)
    return str(value)


def topic_entries(config: NodeConfig, layers: Layers, overrides: Mapping[str, str]) -> Iterator[ConfigEntry]:
    """Every topic key, for a topic with these configs of its own, in order of name."""
    for name, definition in TOPIC.items():
        if definition.update_mode == INTERNAL and name not in overrides:
            continue
        text = overrides.get(name)
        value = canonical_text(definition, config.topic_default(name, layers) if text is None else text)
        chain = TOPIC_SYNONYMS.get(name, ())
        synonyms = _chain(config, layers, chain[0][0]) if chain else []
        if name in overrides:
            synonyms.insert(0, Synonym(name, value, TOPIC_SOURCE))
        yield _entry(definition, value, synonyms, read_only=False)


def effective_topic_source(config: NodeConfig, layers: Layers, name: str) -> int:
    """Where a topic's value for a key comes from when the topic does not set it (Kafka's KafkaConfigSchema)."""
    for source, layer in zip((DYNAMIC_BROKER_SOURCE, DYNAMIC_DEFAULT_BROKER_SOURCE), layers):
        if any(synonym in layer for synonym, _ in TOPIC_SYNONYMS.get(name, ())):
            return source
    if any(config.is_set(synonym) for synonym, _ in TOPIC_SYNONYMS.get(name, ())):
        return STATIC_BROKER_SOURCE
    return DEFAULT_SOURCE


def broker_entries(config: NodeConfig, layers: Layers) -> Iterator[ConfigEntry]:
    """Every key of this broker, in order of name; keys set only at run time where they are set."""
    for name, definition in sorted(BROKER.items()):
        if definition.update_mode == INTERNAL and not config.is_set(name):
            continue
        yield _broker_entry(config, layers, definition)
    for name, definition in DYNAMIC_ONLY.items():
        if any(name in layer for layer in layers):
            yield _broker_entry(config, layers, definition)
    for name in sorted(set().union(config.explicit, *layers) - BROKER.keys() - DYNAMIC_ONLY.keys()):
        yield _unlisted_entry(config, layers, name)


def cluster_entries(config: NodeConfig, layers: Layers) -> Iterator[ConfigEntry]:
    """The run-time configs that hold for every broker: only what is set."""
    for name, text in sorted(layers[-1].items() if layers else ()):
        definition = BROKER.get(name) or DYNAMIC_ONLY.get(name)
        if definition is None:
            entry = _unlisted_entry(config, ({}, layers[-1]), name)
            found = [each for each in entry.synonyms if each.source == DYNAMIC_DEFAULT_BROKER_SOURCE]
            yield entry._replace(synonyms=found)
        else:
            value = None if definition.is_sensitive else canonical_text(definition, text)
            synonym = Synonym(name, value, DYNAMIC_DEFAULT_BROKER_SOURCE)
            yield _entry(definition, value, [synonym], read_only=False)


def group_entries(config: NodeConfig, layers: Layers, overrides: Mapping[str, str]) -> Iterator[ConfigEntry]:
    """Every group key; `consumer.session.timeout.ms` falls back to the broker's `group.consumer.session.timeout.ms`."""
    for name, definition in sorted(GROUP.items()):
        broker_key = f"group.{name}"
        if broker_key in BROKER:
            synonyms = _chain(config, layers, broker_key)
        else:
            synonyms = [Synonym(name, definition.default, DEFAULT_SOURCE)]
        value = overrides.get(name)
        if value is not None:
            synonyms.insert(0, Synonym(name, value, GROUP_SOURCE))
        else:
            value = synonyms[0].value
        yield _entry(definition, canonical_text(definition, value), synonyms, read_only=False)


def client_metrics_entries(overrides: Mapping[str, str]) -> Iterator[ConfigEntry]:
    """Every key of a metrics subscription (KIP-714), set or not."""
    for name, definition in CLIENT_METRICS.items():
        text = overrides.get(name)
        value = canonical_text(definition, definition.default if text is None else text)
        synonyms = [] if text is None else [Synonym(name, value, CLIENT_METRICS_SOURCE)]
        yield _entry(definition, value, synonyms, read_only=False)


def _broker_entry(config: NodeConfig, layers: Layers, definition: ConfigDefinition) -> ConfigEntry:
    name = definition.name
    synonyms = _chain(config, layers, name)
    text: str | None = next((layer[name] for layer in layers if name in layer), None)
    if text is None:
        text = config.raw(name) if name in BROKER else definition.default
    value = None if definition.is_sensitive else canonical_text(definition, text)
    return _entry(definition, value, synonyms, read_only=definition.update_mode not in (CLUSTER_WIDE, PER_BROKER))


def _unlisted_entry(config: NodeConfig, layers: Layers, name: str) -> ConfigEntry:
    """A key that is in no table: of one listener, as the key behind it is, or a plugin's, and possibly a secret."""
    base = base_name(name)
    definition = None if base == name else BROKER.get(base) or DYNAMIC_ONLY.get(base)
    is_secret = definition is None or definition.is_sensitive
    names = (name,) if base == name else (name, base)
    sources = (DYNAMIC_BROKER_SOURCE, DYNAMIC_DEFAULT_BROKER_SOURCE, STATIC_BROKER_SOURCE)
    found = [
        Synonym(key, None if is_secret else values[key], source)
        for source, values in zip(sources, (*layers, config.explicit))
        for key in names
        if key in values
    ]
    if definition is not None and definition.default is not None:
        found.append(Synonym(base, None if is_secret else definition.default, DEFAULT_SOURCE))
    start = next((index for index, synonym in enumerate(found) if synonym.name == name), len(found))
    synonyms = found[start:]
    value = None if definition is None or is_secret else canonical_text(definition, synonyms[0].value)
    kind = UNKNOWN_TYPE if definition is None else definition.type
    return ConfigEntry(name, value, synonyms[0].source, True, is_secret, kind, None, synonyms)


def _chain(config: NodeConfig, layers: Layers, name: str) -> list[Synonym]:
    """All that is set for a broker key and its family, strongest first, from the key itself on."""
    family = BROKER_SYNONYMS.get(name, (name,))
    found: list[Synonym] = []

    def add(key: str, text: str | None, source: int) -> None:
        definition = BROKER.get(key) or DYNAMIC_ONLY[key]
        if text is not None:
            found.append(Synonym(key, None if definition.is_sensitive else text, source))

    for source, layer in zip((DYNAMIC_BROKER_SOURCE, DYNAMIC_DEFAULT_BROKER_SOURCE), layers):
        for key in family:
            add(key, layer.get(key), source)
    for key in family:
        add(key, config.raw(key) if config.is_set(key) else None, STATIC_BROKER_SOURCE)
    for key in family:
        add(key, BROKER[key].default if key in BROKER else None, DEFAULT_SOURCE)
    start = next((index for index, synonym in enumerate(found) if synonym.name == name), len(found))
    return found[start:]


def _entry(definition: ConfigDefinition, value: str | None, synonyms: list[Synonym], *, read_only: bool) -> ConfigEntry:
    return ConfigEntry(
        definition.name,
        None if definition.is_sensitive else value,
        synonyms[0].source if synonyms else DEFAULT_SOURCE,
        read_only,
        definition.is_sensitive,
        definition.type,
        definition.documentation,
        synonyms,
    )
