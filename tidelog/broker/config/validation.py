"""Validation of dynamic configs of brokers, groups and metrics subscriptions. Pure.

`definitions.py` validates configs of topics. A broker validates its own configs,
because it knows the values in force; the controller checks only names and types. The
order of the checks and the messages are those of Kafka's `DynamicBrokerConfig`,
`GroupConfigManager` and `ClientMetricsConfigs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from re import _parser as parser  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, Final

from tidelog.broker.config.definition_types import CLASS, LISTENER_PREFIX, PER_BROKER, base_name
from tidelog.broker.config.definitions import (
    BROKER,
    BROKER_SYNONYMS,
    CLIENT_METRICS,
    GROUP,
    broker_config_problem,
    run_time_definition,
    topic_config_problem,
)
from tidelog.protocol.errors import ConfigError, ErrorCode, KafkaError
from tidelog.protocol.java_text import parse_integer, trim
from tidelog.replication.controller.metadata.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)

if TYPE_CHECKING:
    from tidelog.broker.config.dynamic_config import DynamicConfig
    from tidelog.broker.config.node_config import NodeConfig

_HOUR_MS: Final = 3_600_000
_MINUTE_MS: Final = 60_000
# Set for one listener only (SslConfigs.RECONFIGURABLE_CONFIGS).
_OF_ONE_LISTENER: Final = frozenset(
    f"ssl.{name}"
    for name in (
        "keystore.type", "keystore.location", "keystore.password", "key.password", "keystore.key",
        "keystore.certificate.chain", "truststore.type", "truststore.location", "truststore.password",
        "truststore.certificates",
    )
)  # fmt: skip
_CONNECTION_LIMITS: Final = ("max.connections", "max.connection.creation.rate")
_LISTENER_KEYS_FOR_ALL: Final = (*_CONNECTION_LIMITS, "num.network.threads")
_LISTENERS: Final = ("listeners", "listener.security.protocol.map")
_THREAD_COUNTS: Final = (
    "num.io.threads",
    "num.replica.fetchers",
    "num.recovery.threads.per.data.dir",
    "background.threads",
    "num.network.threads",
    "remote.log.manager.copier.thread.pool.size",
    "remote.log.manager.expiration.thread.pool.size",
    "remote.log.manager.follower.thread.pool.size",
    "remote.log.reader.threads",
)
_CLEANER_BYTES_MIN: Final = 1024 * 1024
_MATCHED_BY: Final = frozenset(
    f"client_{name}"
    for name in ("instance_id", "id", "software_name", "software_version", "source_address", "source_port")
)


# Patterns of metrics subscriptions are kept and described, and never matched; they are only
# parsed, here.
PATTERN_LENGTH_MAX: Final = 256


def controller_config_problem(config: NodeConfig) -> Callable[[int, Mapping[str, str]], KafkaError | None]:
    """The controller's check, for `ControllerSettings.config_problem`."""
    topic_defaults = config.topic_defaults()

    def problem(resource_type: int, configs: Mapping[str, str]) -> KafkaError | None:
        text: str | None = None
        if resource_type == TOPIC_RESOURCE:
            text = topic_config_problem(configs, topic_defaults)
        elif resource_type == BROKER_RESOURCE:
            text = broker_config_problem(configs)
        elif resource_type == GROUP_RESOURCE:
            text = group_config_problem(configs, config.__getitem__)
        elif resource_type == CLIENT_METRICS_RESOURCE:
            return client_metrics_problem(configs)
        return None if text is None else KafkaError(ErrorCode.INVALID_CONFIG, text)

    return problem


# -- brokers -----------------------------------------------------------------------------------------------------------


def check_values(settings: DynamicConfig) -> None:
    """Raises ConfigError for a value with which Kafka does not start: log.retention.ms=0 would delete all
    records, max.connections.per.ip=0 would refuse all clients.
    """
    problem = next(_Change(settings, False, {}).unmet_by_values(), None)
    if problem is not None:
        raise ConfigError(problem.removeprefix("requirement failed: "))


def broker_change_problem(settings: DynamicConfig, of_cluster: bool, after: Mapping[str, str]) -> str | None:
    """The problem of `after` as the dynamic configs of this node, or of the whole cluster."""
    problem = _names_problem(after) or _types_problem(after)
    if problem is None and of_cluster:
        own = [name for name in after if _is_per_broker(name)]
        if own:
            problem = f"Cannot update these configs at default cluster level, broker id must be specified: {_set(own)}"
    if problem is not None:
        return problem
    change = _Change(settings, of_cluster, after)
    return next(change.unmet(), None) or next(change.too_much(), None) or _limit_problem(settings.static, after)


def _names_problem(after: Mapping[str, str]) -> str | None:
    fixed = [name for name in after if name in BROKER and not BROKER[name].changes_at_run_time]
    if fixed:
        return f"Cannot update these configs dynamically: {_set(fixed)}"
    bare = [name for name in after if name in _OF_ONE_LISTENER]
    if bare:
        return (
            "These security configs can be dynamically updated only per-listener using the listener prefix: "
            f"{_set(bare)}"
        )
    return None


def _types_problem(after: Mapping[str, str]) -> str | None:
    for name, text in after.items():
        definition = run_time_definition(name)
        if definition is None:
            continue  # plugins have keys of their own
        try:
            value = definition.parse(text)
        except ConfigError as error:
            return str(error)
        if definition.type == CLASS and value != definition.default:
            return f"Invalid value {text} for configuration {base_name(name)}: Class {text} could not be found."
    return None


def _limit_problem(config: NodeConfig, after: Mapping[str, str]) -> str | None:
    """Limits of no connections (ConnectionQuotas.ListenerConnectionQuota): no client could change them back."""
    own = [f"{LISTENER_PREFIX}{listener.name.lower()}." for listener in config.listeners]
    for name, text in after.items():
        limit = base_name(name)
        is_limit = limit in _CONNECTION_LIMITS and name in (limit, *(prefix + limit for prefix in own))
        if is_limit and not parse_integer(trim(text)):
            return f"Invalid {limit} 0"
    return None


def _is_per_broker(name: str) -> bool:
    if name.startswith(LISTENER_PREFIX):
        return base_name(name) not in _LISTENER_KEYS_FOR_ALL
    return name in BROKER and BROKER[name].update_mode == PER_BROKER


def _set(names: list[str]) -> str:
    return f"[{', '.join(names)}]"


class _Change:
    """The values in force on this node after the change, and the present values."""

    def __init__(self, settings: DynamicConfig, of_cluster: bool, after: Mapping[str, str]) -> None:
        self._settings = settings
        own, cluster = settings.layers
        self._layers = (own, after) if of_cluster else (after, cluster)

    def _value(self, name: str) -> Any:
        """A dynamic synonym hides the other synonyms' values in the file (`overrideProps`)."""
        for layer in self._layers:
            if name in layer:
                return BROKER[name].parse(layer[name])
            if any(other in layer for other in BROKER_SYNONYMS.get(name, ())):
                return None
        return self._settings.static[name]

    def _retention_ms(self) -> int:
        """-1 means for ever."""
        retention = self._value("log.retention.ms")
        if retention is None and (minutes := self._value("log.retention.minutes")) is not None:
            retention = minutes * _MINUTE_MS
        if retention is None:
            retention = self._value("log.retention.hours") * _HOUR_MS
        return -1 if retention < 0 else int(retention)

    def unmet(self) -> Iterator[str]:
        """The problems that would prevent a start (KafkaConfig.validateValues)."""
        yield from self.unmet_by_values()
        yield from self._unmet_by_addresses()

    def unmet_by_values(self) -> Iterator[str]:
        roll_ms, jitter_ms = self._value("log.roll.ms"), self._value("log.roll.jitter.ms")
        if roll_ms is not None and roll_ms < 1:
            yield "requirement failed: log.roll.ms must be greater than or equal to 1"
        if jitter_ms is not None and jitter_ms < 0:
            yield "requirement failed: log.roll.jitter.ms must be greater than or equal to 0"
        if not self._retention_ms():
            yield "requirement failed: log.retention.ms must be unlimited (-1) or, greater than or equal to 1"
        threads = self._value("log.cleaner.threads")
        if threads < 1:
            yield "Log cleaner threads should be at least 1"
        elif self._value("log.cleaner.dedupe.buffer.size") // threads <= _CLEANER_BYTES_MIN:
            yield "requirement failed: log.cleaner.dedupe.buffer.size must be at least 1MB per cleaner thread."
        directories = set(map(str, self._settings.static.log_dirs))
        cordoned = self._value("cordoned.log.dirs") or []
        missing = [one for one in cordoned if one not in directories]
        if missing and cordoned != ["*"]:
            yield (
                "requirement failed: All entries in cordoned.log.dirs must be present in log.dirs or log.dir. "
                f"Missing entries : {', '.join(missing)}"
            )

        key = "max.connections.per.ip.overrides"
        if not self._value("max.connections.per.ip") and not (self._value(key) or "").strip(" ,"):
            yield (f"requirement failed: max.connections.per.ip can be set to zero only if {key} property is set.")

    def _unmet_by_addresses(self) -> Iterator[str]:
        key = "max.connections.per.ip.overrides"
        for one in (self._value(key) or "").split(","):
            one = one.strip()
            if not one:
                continue
            _, colon, limit = one.rpartition(":")
            if not colon:
                yield f"Error parsing configuration property '{key}': begin 0, end -1, length {len(one)}"
            else:
                try:
                    parse_integer(trim(limit))
                except ValueError:
                    yield f'For input string: "{trim(limit)}"'
        if any(self._value(name) != self._settings[name] for name in _LISTENERS):
            yield "The listeners of a running node cannot be changed."

    def too_much(self) -> Iterator[str]:
        """Changes that are too large for one step, and contradictions (BrokerReconfigurable)."""
        for name in _THREAD_COUNTS:
            now, then = self._settings.integer(name), self._value(name)
            failed = f"Dynamic thread count update validation failed for {name}={then}, value should "
            if then < now // 2:
                yield f"{failed}be at least half the current value {now}"
            elif then > now * 2:
                yield f"{failed}not be greater than double the current value {now}"
        retention_ms, local_ms = self._retention_ms(), self._value("log.local.retention.ms")
        yield from _local_retention("ms", local_ms, retention_ms, retention_ms != -1)
        retention_bytes, local_bytes = self._value("log.retention.bytes"), self._value("log.local.retention.bytes")
        yield from _local_retention("bytes", local_bytes, retention_bytes, retention_bytes > -1)
        now, then = self._settings.integer("log.cleaner.threads"), self._value("log.cleaner.threads")
        if then < now // 2:
            yield f"Log cleaner threads cannot be reduced to less than half the current value {now}"
        elif then > now * 2:
            yield f"Log cleaner threads cannot be increased to more than double the current value {now}"
        reporters = self._value("metric.reporters")
        if any(one not in self._settings.static.items("metric.reporters") for one in reporters):
            yield (
                "Validation of dynamic config update of Set(metric.reporters) failed with class "
                "class kafka.server.DynamicMetricsReporters"
            )


def _local_retention(unit: str, local: int, whole: int, limited: bool) -> Iterator[str]:
    if not limited or local == -2:
        return
    failed = f"Invalid value {local} for configuration log.local.retention.{unit}: Value must not be"
    if local == -1:
        yield f"{failed} -1 as log.retention.{unit} value is set as {whole}."
    elif local > whole:
        yield f"{failed} more than log.retention.{unit} property value: {whole}"


# -- groups ------------------------------------------------------------------------------------------------------------

# Group key -> which of the brokers' keys bound it: (lower, upper).
_SPANS: Final = {
    name: (f"group.{kind}.min.{rest}", f"group.{kind}.max.{rest}")
    for name in (
        "consumer.heartbeat.interval.ms",
        "consumer.session.timeout.ms",
        "consumer.assignment.interval.ms",
        "share.heartbeat.interval.ms",
        "share.session.timeout.ms",
        "share.record.lock.duration.ms",
        "share.delivery.count.limit",
        "share.partition.max.record.locks",
        "share.assignment.interval.ms",
        "streams.heartbeat.interval.ms",
        "streams.session.timeout.ms",
        "streams.assignment.interval.ms",
    )
    for kind, rest in [name.split(".", 1)]
} | {"streams.num.standby.replicas": ("", "group.streams.max.standby.replicas")}


def group_config_problem(configs: Mapping[str, str], broker_value: Callable[[str], Any]) -> str | None:
    """`broker_value`: the broker keys that are bounds and defaults of the group keys."""
    for name in configs:
        if name not in GROUP:
            return f"Unknown group config name: {name}"
    values: dict[str, Any] = {}
    for name, definition in GROUP.items():
        broker_key = f"group.{name}"
        try:
            if name in configs:
                values[name] = definition.parse(configs[name])
            else:
                values[name] = (
                    broker_value(broker_key) if broker_key in BROKER else definition.parse(definition.default)
                )
        except ConfigError as error:
            return str(error)
    for name, (lower, upper) in _SPANS.items():
        if lower in BROKER and values[name] < broker_value(lower):
            return f"{name} must be greater than or equal to {lower}"
        if upper in BROKER and values[name] > broker_value(upper):
            return f"{name} must be less than or equal to {upper}"
    for kind in ("consumer", "share", "streams"):
        session, heartbeat = f"{kind}.session.timeout.ms", f"{kind}.heartbeat.interval.ms"
        if values[session] <= values[heartbeat]:
            return f"{session} must be greater than {heartbeat}"
    return None


# -- metrics subscriptions ---------------------------------------------------------------------------------------------


def client_metrics_problem(configs: Mapping[str, str]) -> KafkaError | None:
    for name in configs:
        if name not in CLIENT_METRICS:
            return KafkaError(ErrorCode.INVALID_REQUEST, f"Unknown client metrics configuration: {name}")
    with suppress(KeyError, ValueError):  # a text that is not a number is refused below
        interval_ms = parse_integer(trim(configs["interval.ms"]))
        if not 100 <= interval_ms <= _HOUR_MS:
            return KafkaError(
                ErrorCode.INVALID_REQUEST,
                f"Invalid value {interval_ms} for interval.ms, interval must be between 100 and 3600000 (1 hour)",
            )
    try:
        values = {name: CLIENT_METRICS[name].parse(text) for name, text in configs.items()}
    except ConfigError as error:
        return KafkaError(ErrorCode.INVALID_CONFIG, str(error))
    for pattern in values.get("match", ()):
        parts = pattern.rstrip("=").split("=")  # as Java splits
        if len(parts) != 2 or parts[0].strip() not in _MATCHED_BY or not _is_pattern(parts[1].strip()):
            return KafkaError(ErrorCode.INVALID_CONFIG, f"Illegal client matching pattern: {pattern}")
    return None


def _is_pattern(pattern: str) -> bool:
    """Whether the text is a pattern. It is not compiled: this takes milliseconds for each class of
    letters beyond Latin-1, and a subscription may have a hundred patterns.
    """
    if len(pattern) > PATTERN_LENGTH_MAX:
        return False
    try:
        parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return True
