"""The client's options: Kafka's configuration names with underscores, their types, defaults and bounds.

One frozen dataclass per client; `from_options` is the only way in. Invariant: an option that is unknown, of the wrong
type or out of bounds is a `ConfigError` of one line that names the option, so that no client starts half configured.
Defaults are those of Kafka 4.3 (`ProducerConfig`, `ConsumerConfig`, `AdminClientConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Self

from tidelog.client.assignment.assignors import assignor_named
from tidelog.client.assignment.partitioner import CustomPartitioner
from tidelog.protocol.batches.compression import CODECS, LEVELS
from tidelog.protocol.errors import ConfigError

Serializer = Callable[[Any], bytes | None]
Deserializer = Callable[[bytes], Any]
_DELIVERY_TIMEOUT_MS = 120_000
_INT32_MAX = 2**31 - 1


def _number(default: int, at_least: int = 0, at_most: int = _INT32_MAX) -> Any:
    return field(default=default, metadata={"bounds": (at_least, at_most)})


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


# How long `close` of a consumer waits for brokers that do not answer, as Java's does.
CLOSE_TIMEOUT_MS = 30_000


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """What every client has."""

    bootstrap_servers: str | Sequence[str] = "127.0.0.1:9092"
    client_id: str = "tidelog"
    client_rack: str = ""
    security_protocol: str = _choice("PLAINTEXT", "PLAINTEXT")
    request_timeout_ms: int = _number(30_000, 1)
    default_api_timeout_ms: int = _number(60_000, 1)
    retries: int = _number(_INT32_MAX)
    retry_backoff_ms: int = _number(100)
    retry_backoff_max_ms: int = _number(1_000)
    reconnect_backoff_ms: int = _number(50)
    reconnect_backoff_max_ms: int = _number(1_000)
    socket_connection_setup_timeout_ms: int = _number(10_000, 1)
    connections_max_idle_ms: int = _number(540_000, 1)
    metadata_max_age_ms: int = _number(300_000, 1)
    receive_message_max_bytes: int = _number(100_000_000, 1_000)
    """The largest response read (librdkafka's `receive.message.max.bytes`): more means a broken peer."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Check and convert; dotted names are taken too. Raises ConfigError."""
        known = {each.name: each for each in fields(cls)}
        values: dict[str, Any] = {}
        for given, value in options.items():
            name = given.replace(".", "_")
            if name not in known:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(f"{cls._whose()} has no option {given!r}{hint}")
            values[name] = _converted(name, str(known[name].type), value, known[name].metadata)
        config = cls(**values)
        config.check()
        return config

    @classmethod
    def _whose(cls) -> str:
        return cls.__name__.removesuffix("Config")

    def check(self) -> None:
        """Rules between options; raises ConfigError."""
        self.bootstrap_addresses()

    def bootstrap_addresses(self) -> list[tuple[str, int]]:
        """(host, port) of each bootstrap server. Raises ConfigError."""
        given = self.bootstrap_servers
        listed = given.split(",") if isinstance(given, str) else list(given)
        addresses = [_address(text.strip()) for text in listed if text.strip()]
        if not addresses:
            raise ConfigError("bootstrap_servers is empty; give host:port, several separated by commas")
        return addresses


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"bootstrap_servers: {text!r} is not host:port")
    return host, int(port)


def _converted(name: str, kind: str, value: Any, rules: Mapping[str, Any]) -> Any:
    if value is None and kind.endswith("| None"):
        return None
    kind = kind.removesuffix(" | None")
    if kind == "bool":
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, not {value!r}")
    elif kind == "int":
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ConfigError(f"{name} must be a whole number, not {value!r}")
        try:
            value = int(value)
        except ValueError:
            raise ConfigError(f"{name} must be a whole number, not {value!r}") from None
        lowest, highest = rules.get("bounds", (-(2**31), _INT32_MAX))
        if not lowest <= value <= highest:
            raise ConfigError(f"{name} must be between {lowest} and {highest}, not {value}")
    elif kind == "str":
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a string, not {value!r}")
        if rules.get("choices") and value not in rules["choices"]:
            raise ConfigError(f"{name} must be one of {', '.join(rules['choices'])}, not {value!r}")
    elif kind in ("Serializer", "Deserializer") and not callable(value):
        raise ConfigError(f"{name} must be a function, not {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class AdminConfig(ClientConfig):
    """Options of `Admin`."""


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(ClientConfig):
    """Options of `Producer`."""

    acks: str = _choice("all", "all", "-1", "0", "1")
    enable_idempotence: bool | None = None
    """None: on, unless acks, retries or the requests in flight rule it out (as Kafka's default)."""
    batch_size: int = _number(16_384)
    linger_ms: int = _number(5)
    buffer_memory: int = _number(33_554_432)
    max_block_ms: int = _number(60_000)
    delivery_timeout_ms: int = _number(_DELIVERY_TIMEOUT_MS)
    max_request_size: int = _number(1_048_576)
    max_in_flight_requests_per_connection: int = _number(5, 1)
    compression_type: str = _choice("none", *CODECS)
    compression_level: int | None = None
    partitioner: str | CustomPartitioner = "default"
    partitioner_ignore_keys: bool = False
    metadata_max_idle_ms: int = _number(300_000, 5_000)
    key_serializer: Serializer | None = None
    value_serializer: Serializer | None = None

    @property
    def required_acks(self) -> int:
        """As in the request: -1 for all."""
        return -1 if self.acks == "all" else int(self.acks)

    @property
    def idempotent(self) -> bool:
        if self.enable_idempotence is not None:
            return self.enable_idempotence
        return self._hindrance() is None

    def _hindrance(self) -> str | None:
        if self.required_acks != -1:
            return f"acks={self.acks}"
        if self.retries == 0:
            return "retries=0"
        if self.max_in_flight_requests_per_connection > 5:
            return f"max_in_flight_requests_per_connection={self.max_in_flight_requests_per_connection}"
        return None

    def check(self) -> None:
        super().check()
        hindrance = self._hindrance()
        if self.enable_idempotence and hindrance:
            raise ConfigError(f"enable_idempotence needs acks=all, retries and at most 5 in flight, not {hindrance}")
        if not callable(self.partitioner) and self.partitioner not in ("default", "sticky", "round_robin"):
            raise ConfigError(f"partitioner must be default, sticky, round_robin or callable, not {self.partitioner!r}")
        if self.delivery_timeout_ms < self.linger_ms + self.request_timeout_ms:
            raise ConfigError(
                f"delivery_timeout_ms ({self.delivery_timeout_ms}) must be at least linger_ms + request_timeout_ms "
                f"({self.linger_ms} + {self.request_timeout_ms})"
            )
        if self.compression_level is not None:
            levels = LEVELS.get(CODECS[self.compression_type], range(0))
            if self.compression_level not in levels:
                raise ConfigError(f"{self.compression_type} has no compression_level {self.compression_level!r}")


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(ClientConfig):
    """Options of `Consumer`."""

    group_id: str | None = None
    group_instance_id: str | None = None
    partition_assignment_strategy: str | Sequence[str] = ("range", "cooperative-sticky")
    session_timeout_ms: int = _number(45_000, 1)
    heartbeat_interval_ms: int = _number(3_000, 1)
    max_poll_interval_ms: int = _number(300_000, 1)
    max_poll_records: int = _number(500, 1)
    enable_auto_commit: bool | None = None
    """None: on when there is a group."""
    auto_commit_interval_ms: int = _number(5_000)
    auto_offset_reset: str = _choice("latest", "earliest", "latest", "none")
    isolation_level: str = _choice("read_uncommitted", "read_uncommitted", "read_committed")
    fetch_min_bytes: int = _number(1)
    fetch_max_bytes: int = _number(52_428_800, 1)
    fetch_max_wait_ms: int = _number(500)
    max_partition_fetch_bytes: int = _number(1_048_576, 1)
    check_crcs: bool = True
    allow_auto_create_topics: bool = True
    exclude_internal_topics: bool = True
    key_deserializer: Deserializer | None = None
    value_deserializer: Deserializer | None = None

    @property
    def strategies(self) -> list[str]:
        given = self.partition_assignment_strategy
        return [name.strip() for name in (given.split(",") if isinstance(given, str) else given) if name.strip()]

    @property
    def auto_commit(self) -> bool:
        return self.group_id is not None if self.enable_auto_commit is None else self.enable_auto_commit

    def check(self) -> None:
        super().check()
        if self.group_id == "":
            raise ConfigError("group_id must not be empty; leave it out to read without a group")
        if self.enable_auto_commit and self.group_id is None:
            raise ConfigError("enable_auto_commit needs a group_id")
        if self.group_instance_id is not None and self.group_id is None:
            raise ConfigError("group_instance_id needs a group_id")
        if not self.strategies:
            raise ConfigError("partition_assignment_strategy is empty")
        for name in self.strategies:
            if assignor_named(name) is None:
                raise ConfigError(
                    f"partition_assignment_strategy: {name!r} is none of range, roundrobin, sticky, cooperative-sticky"
                )
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ConfigError(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be less than session_timeout_ms "
                f"({self.session_timeout_ms})"
            )
