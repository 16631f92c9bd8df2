"""What clients are told of the metrics they may push (KIP-714), by a broker that has no use for them.

Kafka's ClientMetricsManager without a receiver plugin: the APIs are not advertised, so clients do not ask; who asks all
the same gets its subscription, is held to its push interval, and what it pushes is dropped. What subscriptions match
by software name, version or source port matches nobody here. Invariant: at most INSTANCES_MAX clients are remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidelog.broker.config.client_patterns import Matcher
from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.java_text import parse_integer, trim
from tidelog.protocol.uuids import ONE_UUID, ZERO_UUID, uuid_to_text
from tidelog.replication.controller.metadata.image import CLIENT_METRICS_RESOURCE, MetadataImage

if TYPE_CHECKING:
    import random

    from tidelog.broker.network.request import Peer, RequestContext

INSTANCES_MAX: Final = 16_384
SILENT_MS_MIN: Final = 60_000
PUSH_INTERVAL_MS: Final = 300_000
# Zstandard, LZ4, gzip, Snappy, in the order in which Kafka would have them.
ACCEPTED_COMPRESSION: Final = (4, 3, 1, 2)
COMPRESSION_TYPES: Final = range(5)
EVERY_METRIC: Final = "*"
_RESERVED_IDS: Final = (ZERO_UUID, ONE_UUID)


@dataclass(slots=True)
class Subscription:
    subscription_id: int
    push_interval_ms: int
    metrics: list[str]


@dataclass(slots=True)
class _Instance:
    subscription: Subscription
    configs: list[dict[str, str]]
    seen_ms: int = 0
    asked_ms: int = 0
    pushed_ms: int = 0
    is_terminating: bool = False


class ClientTelemetry:
    def __init__(
        self, image: Callable[[], MetadataImage], clock_ms: Callable[[], int], rng: random.Random, bytes_max: int
    ) -> None:
        self.bytes_max = bytes_max
        self._image = image
        self._clock_ms = clock_ms
        self._rng = rng
        self._instances: dict[bytes, _Instance] = {}  # least recently seen first
        self._of_connection: dict[Peer, bytes] = {}

    def subscribe(self, context: RequestContext, client_instance_id: bytes) -> tuple[bytes, Subscription]:
        """The client's id, made up if it has none yet, and what it is to push.

        Raises THROTTLING_QUOTA_EXCEEDED before its interval is over.
        """
        if client_instance_id == ZERO_UUID:
            while client_instance_id in _RESERVED_IDS or client_instance_id in self._instances:
                client_instance_id = self._rng.randbytes(16)
        instance = self._instance(context, client_instance_id)
        now_ms = self._clock_ms()
        if now_ms - max(instance.asked_ms, instance.pushed_ms) < instance.subscription.push_interval_ms:
            raise KafkaError(ErrorCode.THROTTLING_QUOTA_EXCEEDED)
        instance.asked_ms = now_ms
        return client_instance_id, instance.subscription

    def push(
        self,
        context: RequestContext,
        client_instance_id: bytes,
        subscription_id: int,
        compression_type: int,
        size_bytes: int,
        *,
        is_terminating: bool,
    ) -> None:
        """Take nothing of it, but say what is wrong with it."""
        if client_instance_id in _RESERVED_IDS:
            raise KafkaError(ErrorCode.INVALID_REQUEST)
        instance = self._instance(context, client_instance_id)
        was_terminating, instance.is_terminating = instance.is_terminating, is_terminating
        if was_terminating:
            raise KafkaError(ErrorCode.INVALID_REQUEST)
        now_ms = self._clock_ms()
        is_due = instance.asked_ms > instance.pushed_ms
        if is_due or now_ms - instance.pushed_ms >= instance.subscription.push_interval_ms:
            instance.pushed_ms = now_ms
        elif not is_terminating:
            raise KafkaError(ErrorCode.THROTTLING_QUOTA_EXCEEDED)
        if subscription_id != instance.subscription.subscription_id:
            raise KafkaError(ErrorCode.UNKNOWN_SUBSCRIPTION_ID)
        if compression_type not in COMPRESSION_TYPES:
            raise KafkaError(ErrorCode.UNSUPPORTED_COMPRESSION_TYPE)
        if size_bytes > self.bytes_max:
            raise KafkaError(ErrorCode.TELEMETRY_TOO_LARGE)

    def __len__(self) -> int:
        return len(self._instances)

    def _instance(self, context: RequestContext, client_instance_id: bytes) -> _Instance:
        """What is known of a client; it is forgotten when its connection ends, or when it has been silent for long."""
        now_ms = self._clock_ms()
        configs = [each for (kind, _), each in self._image().configs.items() if kind == CLIENT_METRICS_RESOURCE]
        instance = self._instances.pop(client_instance_id, None)
        if instance is not None and now_ms - instance.seen_ms > max(
            SILENT_MS_MIN, 3 * instance.subscription.push_interval_ms
        ):
            instance = None
        if instance is None or instance.configs != configs:
            instance = _Instance(_subscription(context, client_instance_id, configs), configs)
            self._remember_connection(context.connection, client_instance_id)
            if len(self._instances) >= INSTANCES_MAX:
                del self._instances[next(iter(self._instances))]
        instance.seen_ms = now_ms
        self._instances[client_instance_id] = instance
        return instance

    def _remember_connection(self, connection: Peer | None, client_instance_id: bytes) -> None:
        if connection is None:
            return
        if connection not in self._of_connection:
            connection.on_close(lambda: self._disconnected(connection))
        self._of_connection[connection] = client_instance_id

    def _disconnected(self, connection: Peer) -> None:
        self._instances.pop(self._of_connection.pop(connection, b""), None)


def _subscription(context: RequestContext, client_instance_id: bytes, configs: list[dict[str, str]]) -> Subscription:
    """All that match, as one: every metric once, the shortest interval."""
    known = {
        "client_instance_id": uuid_to_text(client_instance_id),
        "client_id": context.client_id or "",
        "client_source_address": context.client_host,
    }
    matcher = Matcher()
    metrics: dict[str, None] = {}
    interval_ms = PUSH_INTERVAL_MS
    for config in configs:
        if all(_matches(matcher, pattern, known) for pattern in _listed(config.get("match", ""))):
            metrics.update(dict.fromkeys(_listed(config.get("metrics", ""))))
            interval_ms = min(interval_ms, parse_integer(trim(config.get("interval.ms", str(PUSH_INTERVAL_MS)))))
    wanted = [EVERY_METRIC] if EVERY_METRIC in metrics else list(metrics)
    return Subscription(_subscription_id(wanted, interval_ms, client_instance_id), interval_ms, wanted)


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _matches(matcher: Matcher, pattern: str, known: Mapping[str, str]) -> bool:
    name, _, expression = pattern.partition("=")
    value = known.get(name.strip())
    return value is not None and matcher.matches(expression.strip(), value)


def _subscription_id(metrics: list[str], interval_ms: int, client_instance_id: bytes) -> int:
    """As Kafka computes it: the checksum of what is subscribed to, mixed with the id's hash in Java."""
    mixed = crc32c(f"[{', '.join(metrics)}]{interval_ms}".encode())
    for start in range(0, 16, 4):
        mixed ^= int.from_bytes(client_instance_id[start : start + 4], "big")
    return mixed - (1 << 32) if mixed >= 1 << 31 else mixed
