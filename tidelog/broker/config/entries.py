"""The config entries of DescribeConfigs and CreateTopics: every key with value, source and
synonyms. Pure.

The entries come from a `NodeConfig` and the dynamic layers of the metadata image. Order, sources
and synonyms are those of Kafka's `ConfigHelper`. A list of synonyms starts at the key itself, so
that a value from a key of lower precedence (`log.retention.hours`) appears as the default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog.broker.config.definition_types import (
    BOOLEAN,
    DOUBLE,
    INT,
    INTERNAL,
    LIST,
    LONG,
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

# The sources of values (DescribeConfigsResponse.ConfigSource).
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
"""Dynamic broker configs in order of precedence: this broker's, then the cluster's (from `MetadataImage`)."""


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
    """The value in the form that Kafka prints after parsing: no extra spaces, booleans in lower
    case.
    """
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
    """Every topic key in order of name, for a topic with these configs."""
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
    """The source of a key's value for topics that do not set it (Kafka's KafkaConfigSchema)."""
    for source, layer in zip((DYNAMIC_BROKER_SOURCE, DYNAMIC_DEFAULT_BROKER_SOURCE), layers):
        if any(synonym in layer for synonym, _ in TOPIC_SYNONYMS.get(name, ())):
            return source
    if any(config.is_set(synonym) for synonym, _ in TOPIC_SYNONYMS.get(name, ())):
        return STATIC_BROKER_SOURCE
    return DEFAULT_SOURCE


def broker_entries(config: NodeConfig, layers: Layers) -> Iterator[ConfigEntry]:
    """Every key of this broker in order of name; dynamic-only keys if they are set."""
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
    """The cluster's dynamic broker configs that are set."""
    for name, text in sorted(layers[-1].items() if layers else ()):
        definition = BROKER.get(name) or DYNAMIC_ONLY.get(name)
        if definition is None:
            entry = _unlisted_entry(config, ({}, layers[-1]), name)
            synonyms = [synonym for synonym in entry.synonyms if synonym.source == DYNAMIC_DEFAULT_BROKER_SOURCE]
            yield entry._replace(synonyms=synonyms)
        else:
            value = None if definition.is_sensitive else canonical_text(definition, text)
            synonym = Synonym(name, value, DYNAMIC_DEFAULT_BROKER_SOURCE)
            yield _entry(definition, value, [synonym], read_only=False)


def group_entries(config: NodeConfig, layers: Layers, overrides: Mapping[str, str]) -> Iterator[ConfigEntry]:
    """Every group key. Its default is a broker key: `group.consumer.session.timeout.ms` for
    `consumer.session.timeout.ms`.
    """
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
    return _entry(definition, value, synonyms, read_only=not definition.changes_at_run_time)


def _unlisted_entry(config: NodeConfig, layers: Layers, name: str) -> ConfigEntry:
    """The entry of a key outside of the tables.

    A key of one listener has the definition of its base key. A plugin's key may be a secret.
    """
    base = base_name(name)
    definition = None if base == name else BROKER.get(base) or DYNAMIC_ONLY.get(base)
    is_secret = definition is None or definition.is_sensitive
    names = (name,) if base == name else (name, base)
    sources = (DYNAMIC_BROKER_SOURCE, DYNAMIC_DEFAULT_BROKER_SOURCE, STATIC_BROKER_SOURCE)
    synonyms = [
        Synonym(key, None if is_secret else values[key], source)
        for source, values in zip(sources, (*layers, config.explicit))
        for key in names
        if key in values
    ]
    if definition is not None and definition.default is not None:
        synonyms.append(Synonym(base, None if is_secret else definition.default, DEFAULT_SOURCE))
    start = next((index for index, synonym in enumerate(synonyms) if synonym.name == name), len(synonyms))
    synonyms = synonyms[start:]
    value = None if definition is None or is_secret else canonical_text(definition, synonyms[0].value)
    kind = UNKNOWN_TYPE if definition is None else definition.type
    return ConfigEntry(name, value, synonyms[0].source, True, is_secret, kind, None, synonyms)


def _chain(config: NodeConfig, layers: Layers, name: str) -> list[Synonym]:
    """The values of a broker key and its synonyms in order of precedence, starting at the key
    itself.
    """
    family = BROKER_SYNONYMS.get(name, (name,))
    synonyms: list[Synonym] = []

    def add(key: str, text: str | None, source: int) -> None:
        definition = BROKER.get(key) or DYNAMIC_ONLY[key]
        if text is not None:
            synonyms.append(Synonym(key, None if definition.is_sensitive else text, source))

    for source, layer in zip((DYNAMIC_BROKER_SOURCE, DYNAMIC_DEFAULT_BROKER_SOURCE), layers):
        for key in family:
            add(key, layer.get(key), source)
    for key in family:
        add(key, config.raw(key) if config.is_set(key) else None, STATIC_BROKER_SOURCE)
    for key in family:
        add(key, BROKER[key].default if key in BROKER else None, DEFAULT_SOURCE)
    start = next((index for index, synonym in enumerate(synonyms) if synonym.name == name), len(synonyms))
    return synonyms[start:]


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
