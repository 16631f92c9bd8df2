"""The client's options: Kafka's names with underscores, types, defaults and bounds.

One frozen dataclass per client, always made by `from_options`. Invariant: an unknown option, a
wrong type or a value out of bounds raises a `ConfigError` with one line that names the option, so
that no client starts half configured. Defaults are those of Kafka 4.3 (`ProducerConfig`,
`ConsumerConfig`, `AdminClientConfig`), but for a larger `batch_size`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from ipaddress import IPv6Address
from typing import Any, Self

from tidelog.client.arguments import shown
from tidelog.client.assignment.assignors import Assignor, assignor_named, check_assignor
from tidelog.client.assignment.partitioner import CustomPartitioner
from tidelog.client.durations import duration_ms
from tidelog.client.model import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from tidelog.protocol.batches.compression import CODECS, LEVELS
from tidelog.protocol.errors import ConfigError

Serializer = Callable[[Any], bytes | None]
Deserializer = Callable[[bytes], Any]
_DELIVERY_TIMEOUT_MS = 120_000
_INT32_MAX = 2**31 - 1
_STRING_BYTES_MAX = 2**15 - 1
"""The longest string that fits into a request header, a subscription and the record of a group."""


def _number(default: int | None, minimum: int = 0, maximum: int = _INT32_MAX) -> Any:
    return field(default=default, metadata={"bounds": (minimum, maximum)})


def _long(default: int | None, minimum: int = 0) -> Any:
    """A number that is a long in Kafka."""
    return _number(default, minimum, 2**63 - 1)


def _choice(default: str, *choices: str) -> Any:
    return field(default=default, metadata={"choices": choices})


_SCHEME = "PLAINTEXT://"
_BRACKETED = re.compile(r"\[([0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?)\]")
_NOT_IN_A_HOST = re.compile(r"[\s/\[\]@\ud800-\udfff]")
"""Surrogates: bytes of a command line that are not UTF-8."""
_PORT = re.compile(r"[0-9]{1,5}")
_INTEGER = re.compile(r"[+-]?\d+")
DEFAULT_BATCH_SIZE = 65_536
DEFAULT_LINGER_MS = 5
RESET_POLICIES = ("earliest", "latest", "none", "by_duration:PnDTnHnMnS")
_BY_DURATION = "by_duration:"
_RESET_TIMESTAMPS = {"earliest": EARLIEST_TIMESTAMP, "latest": LATEST_TIMESTAMP, "none": None}
CLOSE_TIMEOUT_MS = 30_000
"""The time that `close` of a consumer waits for brokers that do not answer, as in Java."""


@dataclass(frozen=True, kw_only=True)
class ClientConfig:
    """Options of every client."""

    bootstrap_servers: str | Sequence[str] = "127.0.0.1:9092"
    """`host:port` of one broker or several; the client learns of the others from them."""
    client_id: str = "tidelog"
    """A name for the broker's log and metrics."""
    client_rack: str = ""
    """The rack of the consumer; it fetches from a replica of this rack when the leader names one (KIP-392)."""
    security_protocol: str = _choice("PLAINTEXT", "PLAINTEXT")
    """Only `PLAINTEXT` so far."""
    request_timeout_ms: int = _number(30_000, 1)
    """The time that a broker has for one response. While a large one arrives, the time for its next 64 KiB."""
    default_api_timeout_ms: int = _number(60_000, 1)
    """The time that a call may take, with all its attempts, when it has no limit of its own."""
    retries: int = _number(_INT32_MAX)
    """How often a producer sends a batch again. Its time limits end that first. Other calls end by theirs alone."""
    retry_backoff_ms: int = _long(100)
    """The wait before the second attempt; it doubles from attempt to attempt."""
    retry_backoff_max_ms: int = _long(1_000)
    """The longest wait between two attempts."""
    reconnect_backoff_ms: int = _long(50)
    """The wait before a second connection to a broker that refused one; it doubles."""
    reconnect_backoff_max_ms: int = _long(1_000)
    """The longest wait between two connections to one broker."""
    socket_connection_setup_timeout_ms: int = _long(10_000, 1)
    """The time that a connection may take to open."""
    connections_max_idle_ms: int = _long(540_000, -1)
    """A connection is closed this time after its last request or answer, or up to a second later; -1: never."""
    metadata_max_age_ms: int = _long(300_000, 1)
    """Leaders and partitions are asked for again after this time."""
    receive_message_max_bytes: int = _number(100_000_000, 1_000)
    """The maximum size of a response (librdkafka's `receive.message.max.bytes`).

    A consumer asks for no more records at once. A poll raises MESSAGE_TOO_LARGE for a batch that does not fit
    nevertheless, and for one that decompresses to more than this and to more than 128 MiB.
    """

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        """Check and convert options. Names with dots are accepted too. Raises ConfigError."""
        fields_by_name = {field.name: field for field in fields(cls)}
        values: dict[str, Any] = {}
        for option, value in options.items():
            name = option.replace(".", "_")
            if name in values:
                raise ConfigError(f"{name} is given twice, with dots and with underscores")
            if name not in fields_by_name:
                close_matches = get_close_matches(name, fields_by_name, n=1)
                hint = f"; did you mean {close_matches[0]}?" if close_matches else ""
                raise ConfigError(f"{cls._client_name()} has no option {shown(option)}{hint}")
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
        texts = servers.split(",") if isinstance(servers, str) else servers
        if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
            raise ConfigError(f"bootstrap_servers must be host:port or a list of them, not {shown(servers)}")
        addresses = [_address(text.strip()) for text in texts if text.strip()]
        if not addresses:
            raise ConfigError("bootstrap_servers is empty; give host:port, several separated by commas")
        return addresses


def _is_host(text: str) -> bool:
    if not text or _NOT_IN_A_HOST.search(text):
        return False
    if ":" in text:  # an IPv6 address, not the front of one whose end looks like a port
        try:
            IPv6Address(text)
        except ValueError:
            return False
    return True


def _address(text: str) -> tuple[str, int]:
    if text[: len(_SCHEME)].upper() == _SCHEME:  # as a node names its address in its first line
        text = text[len(_SCHEME) :]
    host, _, port = text.rpartition(":")
    if bracketed := _BRACKETED.fullmatch(host):
        host = bracketed[1]
    if not _is_host(host) or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        hint = "; an IPv6 address needs brackets, as [::1]:9092" if text.count(":") > 1 else ""
        if "://" in text:
            hint = "; it is without a scheme, as 127.0.0.1:9092"
        raise ConfigError(f"bootstrap_servers: {shown(text)} is not host:port{hint}")
    return host, int(port)


def _convert(name: str, type_name: str, value: Any, rules: Mapping[str, Any]) -> Any:
    if value is None and type_name.endswith("| None"):
        return None
    type_name = type_name.removesuffix(" | None")
    if type_name == "bool":
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, not {shown(value)}")
    elif type_name == "int":
        value = _as_integer(name, value)
        minimum, maximum = rules.get("bounds", (-(2**31), _INT32_MAX))
        if not minimum <= value <= maximum:
            raise ConfigError(f"{name} must be between {minimum} and {maximum}, not {shown(value)}")
    elif type_name == "str":
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a string, not {shown(value)}")
        if rules.get("choices") and value not in rules["choices"]:
            raise ConfigError(f"{name} must be one of {', '.join(rules['choices'])}, not {shown(value)}")
        _check_string(name, value)
    elif type_name in ("Serializer", "Deserializer") and not callable(value):
        raise ConfigError(f"{name} must be a function, not {shown(value)}")
    return list(value) if isinstance(value, list) else value  # the program may change its list before the client starts


def _as_integer(name: str, value: Any) -> int:
    """A number as Java reads it: without the underscores that Python allows between digits."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        with suppress(ValueError):  # more digits than Python converts
            return int(value)
    raise ConfigError(f"{name} must be a whole number, not {shown(value)}")


def _check_string(name: str, value: str) -> None:
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is not text that UTF-8 can encode: {error.reason}") from None
    if size_bytes > _STRING_BYTES_MAX:
        raise ConfigError(f"{name} must be at most {_STRING_BYTES_MAX} bytes, not {size_bytes}")


@dataclass(frozen=True, kw_only=True)
class AdminConfig(ClientConfig):
    """Options of `Admin`."""


@dataclass(frozen=True, kw_only=True)
class ProducerConfig(ClientConfig):
    """Options of `Producer`."""

    acks: str = _choice("all", "all", "-1", "0", "1")
    """`0`: no response; `1`: the leader has the record; `all`: every in-sync replica has it."""
    enable_idempotence: bool | None = None
    """None: on, unless acks, retries or the requests in flight exclude it (as Kafka's default)."""
    batch_size: int = _number(DEFAULT_BATCH_SIZE)
    """Uncompressed bytes of a partition's records after which a batch is sent. Java has 16384, librdkafka 1000000."""
    linger_ms: int | None = _long(None)
    """A batch that is not full is sent after this time; None: 5, and at once when its sender waits for a record of it.

    `send_and_wait` waits, and in the blocking client `result()` of a record's future.
    """
    busy_poll_us: int = _number(300, 0, 1_000)
    """`send_and_wait` keeps the event loop awake for at most this time, after a call whose answer came within it.

    It saves the time that an idle processor takes to wake, and uses the processor meanwhile. A call that follows one
    which was alone and took 0.2 ms at most holds the loop until its answer, for 0.2 ms at most. 0: neither happens.
    """
    buffer_memory: int = _long(33_554_432)
    """Bytes of records that wait for their acknowledgement, with 128 for the bookkeeping of each.

    `send` waits when they are used up.
    """
    max_block_ms: int = _long(60_000)
    """The time that `send` waits for memory or metadata, and that each call of a transaction may take."""
    delivery_timeout_ms: int = _number(_DELIVERY_TIMEOUT_MS)
    """The time from `send` to the record's acknowledgement or failure."""
    max_request_size: int = _number(1_048_576)
    """Bytes of the largest record and of the largest request."""
    max_in_flight_requests_per_connection: int = _number(5, 1)
    """Requests to one broker without a response. Idempotence allows at most 5."""
    compression_type: str = _choice("none", *CODECS)
    """The codec of the batches."""
    compression_level: int | None = None
    """The codec's level; None: the codec's default."""
    partitioner: str | CustomPartitioner = "default"
    """How the partition of a record is chosen.

    `default` is murmur2 of the key as in Java, and sticky without a key. `sticky` and `round_robin` ignore keys. A
    function is called as `(topic, key, value, partition_count) -> int`.
    """
    partitioner_ignore_keys: bool = False
    """Records with a key are partitioned as those without."""
    partitioner_adaptive_partitioning_enable: bool = True
    """Records without a key go less often to partitions whose batches wait (KIP-794)."""
    partitioner_availability_timeout_ms: int = _long(0)
    """Records without a key avoid partitions whose leader takes no batch for longer; 0: they do not."""
    interceptors: Sequence[Any] = ()
    """Objects whose `on_send` sees each record before it is sent, and whose `on_acknowledgement` its outcome."""
    metadata_max_idle_ms: int = _long(300_000, 5_000)
    """A topic that gets no record for this time is forgotten."""
    key_serializer: Serializer | None = None
    """Makes bytes of a key."""
    value_serializer: Serializer | None = None
    """Makes bytes of a value."""
    transactional_id: str | None = None
    """The name under which transactions survive a restart of the program; None: no transactions."""
    transaction_timeout_ms: int = _number(60_000, 1)
    """The coordinator aborts a transaction that is open longer, and fences its producer."""

    @property
    def full_linger_ms(self) -> int:
        """The time for a batch that its sender does not wait for."""
        return DEFAULT_LINGER_MS if self.linger_ms is None else self.linger_ms

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
            raise ConfigError(
                f"partitioner must be default, sticky, round_robin or callable, not {shown(self.partitioner)}"
            )
        if isinstance(self.interceptors, str) or not isinstance(self.interceptors, Sequence):
            raise ConfigError(f"interceptors must be a list of objects, not {shown(self.interceptors)}")
        for interceptor in self.interceptors:
            for method in ("on_send", "on_acknowledgement"):
                if isinstance(interceptor, type) or not callable(getattr(interceptor, method, None)):
                    raise ConfigError(f"interceptors: {interceptor!r} is no object with a method {method}")
        # No delivery_timeout_ms is larger than this one, and Kafka takes it for any sum.
        if self.delivery_timeout_ms < min(self.full_linger_ms + self.request_timeout_ms, _INT32_MAX):
            raise ConfigError(
                f"delivery_timeout_ms ({self.delivery_timeout_ms}) must be at least linger_ms + request_timeout_ms "
                f"({self.full_linger_ms} + {self.request_timeout_ms})"
            )
        if self.compression_level is not None:
            levels = LEVELS.get(CODECS[self.compression_type], range(0))
            if self.compression_level not in levels:
                raise ConfigError(f"{self.compression_type} has no compression_level {self.compression_level!r}")


@dataclass(frozen=True, kw_only=True)
class ConsumerConfig(ClientConfig):
    """Options of `Consumer`."""

    group_id: str | None = None
    """The consumer group; None: the consumer reads without a group."""
    group_instance_id: str | None = None
    """The name of a static member, which may restart within the session timeout without a rebalance."""
    group_protocol: str = _choice("classic", "classic", "consumer")
    """`consumer` is the protocol of KIP-848."""
    group_remote_assignor: str | None = None
    """The assignor of the broker, with `group_protocol="consumer"`."""
    partition_assignment_strategy: str | Assignor | Sequence[str | Assignor] = ("range", "cooperative-sticky")
    """The assignors that this member offers to its group, the preferred one first.

    Each is `range`, `roundrobin`, `sticky`, `cooperative-sticky` or an object that is an `Assignor`.
    """
    session_timeout_ms: int = _number(45_000, 1)
    """The coordinator removes a member that is silent for this time."""
    heartbeat_interval_ms: int = _number(3_000, 1)
    """The time between two heartbeats."""
    max_poll_interval_ms: int = _number(300_000, 1)
    """A member that does not poll for this time leaves its group."""
    max_poll_records: int = _number(500, 1)
    """Records that one poll returns at most."""
    enable_auto_commit: bool | None = None
    """None: on with a group."""
    auto_commit_interval_ms: int = _number(5_000)
    """The time between two automatic commits."""
    auto_offset_reset: str = field(default="latest", metadata={"forms": RESET_POLICIES})
    """Where to read without a committed offset, or when the position is gone; `none` raises.

    `by_duration:PT24H` reads from the first record that is not older; the length is written as in ISO 8601 (KIP-1106).
    """
    isolation_level: str = _choice("read_uncommitted", "read_uncommitted", "read_committed")
    """`read_committed` returns no record of an aborted or open transaction."""
    fetch_min_bytes: int = _number(1)
    """The broker answers a fetch when it has so many bytes, or after `fetch_max_wait_ms`."""
    fetch_max_bytes: int = _number(52_428_800, 1)
    """Bytes of one response of a fetch."""
    fetch_max_wait_ms: int = _number(500)
    """The time that the broker waits for `fetch_min_bytes`."""
    max_partition_fetch_bytes: int = _number(1_048_576, 1)
    """Bytes of one partition in one response."""
    check_crcs: bool = True
    """Verify the checksum of each batch."""
    allow_auto_create_topics: bool = True
    """A missing topic that is read is created, where the broker allows it."""
    exclude_internal_topics: bool = True
    """A pattern does not match internal topics."""
    key_deserializer: Deserializer | None = None
    """Makes a key of bytes."""
    value_deserializer: Deserializer | None = None
    """Makes a value of bytes."""

    @property
    def strategies(self) -> list[str]:
        """The names of the assignors, the preferred one first."""
        return [entry if isinstance(entry, str) else entry.name for entry in self._strategy_entries()]

    def assignors(self) -> list[Assignor]:
        """The assignors, the preferred one first."""
        assignors = [assignor_named(entry) if isinstance(entry, str) else entry for entry in self._strategy_entries()]
        return [assignor for assignor in assignors if assignor is not None]

    def _strategy_entries(self) -> list[str | Assignor]:
        strategy = self.partition_assignment_strategy
        if isinstance(strategy, str):
            strategy = strategy.split(",")
        elif not isinstance(strategy, Sequence):
            strategy = [strategy]
        entries = [entry.strip() if isinstance(entry, str) else entry for entry in strategy]
        return [entry for entry in entries if entry != ""]

    def reset_timestamp_ms(self, now_ms: int) -> int | None:
        """Where a reset leads: -2 to the beginning, -1 to the end, else to a time; None: to an error.

        Raises ConfigError for no policy.
        """
        policy = self.auto_offset_reset
        if policy in _RESET_TIMESTAMPS:
            return _RESET_TIMESTAMPS[policy]
        ago_ms = duration_ms(policy.removeprefix(_BY_DURATION)) if policy.startswith(_BY_DURATION) else None
        if ago_ms is None or ago_ms < 0:
            raise ConfigError(f"auto_offset_reset must be one of {', '.join(RESET_POLICIES)}, not {shown(policy)}")
        return max(0, now_ms - ago_ms)

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
                    f"partition_assignment_strategy: {shown(entry)} is none of range, roundrobin, sticky, "
                    "cooperative-sticky"
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
        if self.group_instance_id == "":
            raise ConfigError("group_instance_id must not be empty; leave it out for a dynamic member")
        if self.group_instance_id is not None and self.group_id is None:
            raise ConfigError("group_instance_id needs a group_id")
        self._check_protocol()
        self._check_strategies()
        self.reset_timestamp_ms(0)
        if self.heartbeat_interval_ms >= self.session_timeout_ms:
            raise ConfigError(
                f"heartbeat_interval_ms ({self.heartbeat_interval_ms}) must be less than session_timeout_ms "
                f"({self.session_timeout_ms})"
            )
