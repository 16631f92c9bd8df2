"""The client's options: Kafka's names with underscores, types, defaults and bounds.

One frozen dataclass per client, always made by `from_options`. Invariant: an unknown option, a
wrong type or a value out of bounds raises a `ConfigError` with one line that names the option, so
that no client starts half configured. Defaults are those of Kafka 4.3 (`ProducerConfig`,
`ConsumerConfig`, `AdminClientConfig`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Self

from tidelog.client.assignment.assignors import Assignor, assignor_named, check_assignor
from tidelog.client.assignment.partitioner import CustomPartitioner
from tidelog.protocol.batches.compression import CODECS, LEVELS
from tidelog.protocol.errors import ConfigError

Serializer = Callable[[Any], bytes | None]
Deserializer = Callable[[bytes], Any]
_DELIVERY_TIMEOUT_MS = 120_000
_INT32_MAX = 2**31 - 1


def _number(default: int, minimum: int = 0, maximum: int = _INT32_MAX) -> Any:
    return field(default=default, metadata={"bounds": (minimum, maximum)})


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


CLOSE_TIMEOUT_MS = 30_000
"""The time that `close` of a consumer waits for brokers that do not answer, as in Java."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Options of every client."""

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
    """The maximum size of a response (librdkafka's `receive.message.max.bytes`).

    A larger one means a broken peer.
    """

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Check and convert options. Names with dots are accepted too. Raises ConfigError."""
        fields_by_name = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for option, value in options.items():
            name = option.replace(".", "_")
            if name not in fields_by_name:
                close_matches = get_close_matches(name, fields_by_name, n=1)
                hint = f"; did you mean {close_matches[0]}?" if close_matches else ""
                raise ConfigError(f"{cls._client_name()} has no option {option!r}{hint}")
            values[name] = _convert(name, str(fields_by_name[name].type), value, fields_by_name[name].metadata)
        config = cls(**values)
        config.check()
        return config

    @classmethod
    def _client_name(cls) -> str:
        return cls.__name__.removesuffix("Config")

    def check(self) -> None:
        """Check rules between options. Raises ConfigError."""
        self.bootstrap_addresses()

    def bootstrap_addresses(self) -> list[tuple[str, int]]:
        """(host, port) of each bootstrap server. Raises ConfigError."""
        servers = self.bootstrap_servers
        texts = servers.split(",") if isinstance(servers, str) else list(servers)
        addresses = [_address(text.strip()) for text in texts if text.strip()]
        if not addresses:
            raise ConfigError("bootstrap_servers is empty; give host:port, several separated by commas")
        return addresses


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"bootstrap_servers: {text!r} is not host:port")
    return host, int(port)


def _convert(name: str, type_name: str, value: Any, rules: Mapping[str, Any]) -> Any:
    if value is None and type_name.endswith("| None"):
        return None
    type_name = type_name.removesuffix(" | None")
    if type_name == "bool":
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, not {value!r}")
    elif type_name == "int":
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ConfigError(f"{name} must be a whole number, not {value!r}")
        try:
            value = int(value)
        except ValueError:
            raise ConfigError(f"{name} must be a whole number, not {value!r}") from None
        minimum, maximum = rules.get("bounds", (-(2**31), _INT32_MAX))
        if not minimum <= value <= maximum:
            raise ConfigError(f"{name} must be between {minimum} and {maximum}, not {value}")
    elif type_name == "str":
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a string, not {value!r}")
        if rules.get("choices") and value not in rules["choices"]:
            raise ConfigError(f"{name} must be one of {', '.join(rules['choices'])}, not {value!r}")
    elif type_name in ("Serializer", "Deserializer") and not callable(value):
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
    """None: on, unless acks, retries or the requests in flight exclude it (as Kafka's default)."""
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
    transactional_id: str | None = None
    """The name under which transactions survive a restart of the program; None: no transactions."""
    transaction_timeout_ms: int = _number(60_000, 1)

    @property
    def required_acks(self) -> int:
        """The value in the request: -1 for all."""
        return -1 if self.acks == "all" else int(self.acks)

    @property
    def idempotent(self) -> bool:
        if self.enable_idempotence is not None:
            return self.enable_idempotence
        return self._idempotence_conflict() is None

    def _idempotence_conflict(self) -> str | None:
        if self.required_acks != -1:
            return f"acks={self.acks}"
        if self.retries == 0:
            return "retries=0"
        if self.max_in_flight_requests_per_connection > 5:
            return f"max_in_flight_requests_per_connection={self.max_in_flight_requests_per_connection}"
        return None

    def check(self) -> None:
        super().check()
        conflict = self._idempotence_conflict()
        if self.enable_idempotence and conflict:
            raise ConfigError(f"enable_idempotence needs acks=all, retries and at most 5 in flight, not {conflict}")
        if self.transactional_id is not None and not self.transactional_id:
            raise ConfigError("transactional_id must not be empty; leave it out to send without transactions")
        if self.transactional_id is not None and not self.idempotent:
            reason = conflict or "enable_idempotence=False"
            raise ConfigError(
                f"transactional_id needs idempotence: acks=all, retries, at most 5 in flight, not {reason}"
            )
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
    group_protocol: str = _choice("classic", "classic", "consumer")
    group_remote_assignor: str | None = None
    partition_assignment_strategy: str | Assignor | Sequence[str | Assignor] = ("range", "cooperative-sticky")
    session_timeout_ms: int = _number(45_000, 1)
    heartbeat_interval_ms: int = _number(3_000, 1)
    max_poll_interval_ms: int = _number(300_000, 1)
    max_poll_records: int = _number(500, 1)
    enable_auto_commit: bool | None = None
    """None: on with a group."""
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
        """The names of the assignors, the preferred one first."""
        return [entry if isinstance(entry, str) else entry.name for entry in self._strategy_entries()]

    def assignors(self) -> list[Assignor]:
        """The assignors, the preferred one first."""
        found = [assignor_named(entry) if isinstance(entry, str) else entry for entry in self._strategy_entries()]
        return [assignor for assignor in found if assignor is not None]

    def _strategy_entries(self) -> list[str | Assignor]:
        strategy = self.partition_assignment_strategy
        if isinstance(strategy, str):
            strategy = strategy.split(",")
        elif not isinstance(strategy, Sequence):
            strategy = [strategy]
        entries = [entry.strip() if isinstance(entry, str) else entry for entry in strategy]
        return [entry for entry in entries if entry != ""]

    @property
    def auto_commit(self) -> bool:
        return self.group_id is not None if self.enable_auto_commit is None else self.enable_auto_commit

    def _check_protocol(self) -> None:
        if self.group_protocol == "classic":
            if self.group_remote_assignor is not None:
                raise ConfigError("group_remote_assignor needs group_protocol='consumer'")
            return
        if self.group_id is None:
            raise ConfigError("group_protocol='consumer' needs a group_id")
        for name in ("partition_assignment_strategy", "session_timeout_ms", "heartbeat_interval_ms"):
            if getattr(self, name) != getattr(ConsumerConfig, name):
                raise ConfigError(f"{name} is the broker's to choose with group_protocol='consumer'")

    def _check_strategies(self) -> None:
        entries = self._strategy_entries()
        if not entries:
            raise ConfigError("partition_assignment_strategy is empty")
        for entry in entries:
            if not isinstance(entry, str):
                if problem := check_assignor(entry):
                    raise ConfigError(f"partition_assignment_strategy: {problem}")
            elif assignor_named(entry) is None:
                raise ConfigError(
                    f"partition_assignment_strategy: {entry!r} is none of range, roundrobin, sticky, cooperative-sticky"
                )
        names = [assignor.name for assignor in self.assignors()]
        if len(set(names)) < len(names):
            raise ConfigError(f"partition_assignment_strategy has two assignors of one name: {', '.join(names)}")

    def check(self) -> None:
        super().check()
        if self.group_id == "":
            raise ConfigError("group_id must not be empty; leave it out to read without a group")
        if self.enable_auto_commit and self.group_id is None:
            raise ConfigError("enable_auto_commit needs a group_id")
        if self.group_instance_id is not None and self.group_id is None:
            raise ConfigError("group_instance_id needs a group_id")
        self._check_protocol()
        self._check_strategies()
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ConfigError(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be less than session_timeout_ms "
                f"({self.session_timeout_ms})"
            )
