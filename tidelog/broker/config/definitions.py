"""All configuration keys of a Kafka 4.3 broker, topic and group, and Tidelog's own,
from the tables beside this file.

`BROKER`, `TOPIC` and `GROUP` map names to definitions. `TOPIC_SYNONYMS` and `BROKER_SYNONYMS`
list the broker keys behind a key, with their units, in order of precedence.
`validate_topic_config` is Kafka's `LogConfig.validate`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tidelog.broker.config.definition_types import LIST, ConfigDefinition, base_name, table
from tidelog.broker.config.definitions_cluster import CLIENT_METRICS_CONFIGS, CLUSTER
from tidelog.broker.config.definitions_cluster import DYNAMIC_ONLY as DYNAMIC_ONLY_ROWS
from tidelog.broker.config.definitions_coordinators import COORDINATORS, GROUP_CONFIGS
from tidelog.broker.config.definitions_log import LOG, TOPIC_CONFIGS
from tidelog.broker.config.definitions_network import NETWORK
from tidelog.broker.config.definitions_own import OWN
from tidelog.protocol.errors import ConfigError
from tidelog.protocol.java_text import parse_integer, trim
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE

BROKER: dict[str, ConfigDefinition] = table(CLUSTER, NETWORK, LOG, COORDINATORS, OWN)
TOPIC: dict[str, ConfigDefinition] = table(TOPIC_CONFIGS)
GROUP: dict[str, ConfigDefinition] = table(GROUP_CONFIGS)
CLIENT_METRICS: dict[str, ConfigDefinition] = table(CLIENT_METRICS_CONFIGS)
# Set only through AlterConfigs, never in a file (Kafka's DynamicConfig.Broker beyond KafkaConfig).
DYNAMIC_ONLY: dict[str, ConfigDefinition] = table(DYNAMIC_ONLY_ROWS)

# topic key -> broker keys, strongest first, each with the factor to the topic key's unit
# (Kafka's ServerTopicConfigSynonyms).
_MINUTE_MS = 60_000
_HOUR_MS = 3_600_000
TOPIC_SYNONYMS: dict[str, tuple[tuple[str, int], ...]] = {
    "cleanup.policy": (("log.cleanup.policy", 1),),
    "compression.gzip.level": (("compression.gzip.level", 1),),
    "compression.lz4.level": (("compression.lz4.level", 1),),
    "compression.type": (("compression.type", 1),),
    "compression.zstd.level": (("compression.zstd.level", 1),),
    "delete.retention.ms": (("log.cleaner.delete.retention.ms", 1),),
    "file.delete.delay.ms": (("log.segment.delete.delay.ms", 1),),
    "flush.messages": (("log.flush.interval.messages", 1),),
    "flush.ms": (("log.flush.interval.ms", 1), ("log.flush.scheduler.interval.ms", 1)),
    "index.interval.bytes": (("log.index.interval.bytes", 1),),
    "local.retention.bytes": (("log.local.retention.bytes", 1),),
    "local.retention.ms": (("log.local.retention.ms", 1),),
    "max.compaction.lag.ms": (("log.cleaner.max.compaction.lag.ms", 1),),
    "max.message.bytes": (("message.max.bytes", 1),),
    "message.timestamp.after.max.ms": (("log.message.timestamp.after.max.ms", 1),),
    "message.timestamp.before.max.ms": (("log.message.timestamp.before.max.ms", 1),),
    "message.timestamp.type": (("log.message.timestamp.type", 1),),
    "min.cleanable.dirty.ratio": (("log.cleaner.min.cleanable.ratio", 1),),
    "min.compaction.lag.ms": (("log.cleaner.min.compaction.lag.ms", 1),),
    "min.insync.replicas": (("min.insync.replicas", 1),),
    "preallocate": (("log.preallocate", 1),),
    "retention.bytes": (("log.retention.bytes", 1),),
    "retention.ms": (("log.retention.ms", 1), ("log.retention.minutes", _MINUTE_MS), ("log.retention.hours", _HOUR_MS)),
    "segment.bytes": (("log.segment.bytes", 1),),
    "segment.index.bytes": (("log.index.size.max.bytes", 1),),
    "segment.jitter.ms": (("log.roll.jitter.ms", 1), ("log.roll.jitter.hours", _HOUR_MS)),
    "segment.ms": (("log.roll.ms", 1), ("log.roll.hours", _HOUR_MS)),
    "unclean.leader.election.enable": (("unclean.leader.election.enable", 1),),
}

# broker key -> the keys that may stand in for it, strongest first (Kafka's
# DynamicBrokerConfig.brokerConfigSynonyms).
_FAMILIES = (
    ("log.roll.ms", "log.roll.hours"),
    ("log.roll.jitter.ms", "log.roll.jitter.hours"),
    ("log.retention.ms", "log.retention.minutes", "log.retention.hours"),
    ("log.flush.interval.ms", "log.flush.scheduler.interval.ms"),
)
BROKER_SYNONYMS: dict[str, tuple[str, ...]] = {name: family for family in _FAMILIES for name in family}


def convert_synonym(text: str, factor: int) -> str:
    """The value of a broker key in the unit of the topic key; -1 is -1 in every unit (Kafka's
    ConfigSynonym).
    """
    return text if factor == 1 or trim(text) == "-1" else str(parse_integer(trim(text), 64) * factor)


def topic_config_problem(overrides: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> str | None:
    """The error text of `validate_topic_config`, or None."""
    try:
        validate_topic_config(overrides, defaults)
    except ConfigError as error:
        return str(error)
    return None


def run_time_definition(name: str) -> ConfigDefinition | None:
    """The definition of a dynamic broker config, also of a listener's key. None for the keys of plugins.

    Some definitions do not allow a change at run time: see `ConfigDefinition.changes_at_run_time`.
    """
    base = base_name(name)
    return BROKER.get(base) or DYNAMIC_ONLY.get(base)


def broker_config_problem(configs: Mapping[str, str]) -> str | None:
    """The error text of dynamic broker configs, or None (DynamicBrokerConfig)."""
    for name, text in configs.items():
        definition = BROKER.get(name) or DYNAMIC_ONLY.get(name)
        if definition is None:
            continue  # plugins have keys of their own
        if not definition.changes_at_run_time:
            return f"Cannot update these configs dynamically: [{name}]"
        try:
            definition.parse(text)
        except ConfigError as error:
            return str(error)
    return None


def list_config_default(resource_type: int, name: str) -> str | None:
    """The default of a key of type LIST, for APPEND and SUBTRACT. KeyError for other keys."""
    if resource_type not in (TOPIC_RESOURCE, BROKER_RESOURCE):
        raise KeyError(name)  # Kafka knows the types of topic and broker keys only
    definition = TOPIC[name] if resource_type == TOPIC_RESOURCE else (BROKER.get(name) or DYNAMIC_ONLY[name])
    if definition.type != LIST:
        raise KeyError(name)
    return definition.default


def validate_topic_config(overrides: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> None:
    """Refuse unknown names, wrong values and contradictions. Raises
    `ConfigError` (Kafka's LogConfig.validate).

    `defaults`: the broker's defaults for topics (`NodeConfig.topic_defaults`), for rules that span two
    keys.
    """
    for name in overrides:
        if name not in TOPIC:
            raise ConfigError(f"Unknown topic config name: {name}")
    typed = {name: TOPIC[name].parse(text) for name, text in overrides.items()}

    def value(name: str) -> int:
        if name in typed:
            return int(typed[name])
        text = (defaults or {}).get(name, TOPIC[name].default)
        return parse_integer(trim(text), 64) if text is not None else 0

    minimum, maximum = value("min.compaction.lag.ms"), value("max.compaction.lag.ms")
    if minimum > maximum:
        raise ConfigError(
            f"conflict topic config setting min.compaction.lag.ms ({minimum}) > max.compaction.lag.ms ({maximum})"
        )
    if typed.get("remote.storage.enable"):
        raise ConfigError(
            "Tiered Storage functionality is disabled in the broker. "
            "Topic cannot be configured with remote log storage."
        )
