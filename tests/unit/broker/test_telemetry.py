"""Telemetry without anybody to take it: what clients are told, and to what they are held."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tidelog.broker.apis import telemetry
from tidelog.broker.apis.telemetry import ClientTelemetry
from tidelog.broker.network.request import RequestContext
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)
from tidelog.protocol.messages.push_telemetry import PushTelemetryRequest, PushTelemetryResponse
from tidelog.protocol.uuids import ZERO_UUID
from tidelog.replication.controller.metadata.image import MetadataImage

CLIENT = bytes.fromhex("00000000000000001234567812345678")
INTERVAL_MS = 300_000


class Connection:
    host, listener_name = "here", "PLAINTEXT"

    def __init__(self) -> None:
        self.notices: list[Callable[[], None]] = []

    def on_close(self, callback: Callable[[], None]) -> None:
        self.notices.append(callback)

    def close(self) -> None:
        for notice in self.notices:
            notice()

    def send_much(self) -> None:
        raise AssertionError("nobody follows")


class World:
    def __init__(self, **subscriptions: dict[str, str]) -> None:
        self.now_ms = 1_700_000_000_000
        self.image = MetadataImage(configs={(16, name): configs for name, configs in subscriptions.items()})
        self.telemetry = ClientTelemetry(lambda: self.image, lambda: self.now_ms, random.Random(1), 1000)
        self.connection = Connection()

    def context(self, client_id: str = "c") -> RequestContext:
        return RequestContext(71, 0, 1, client_id, "1.2.3.4", "PLAINTEXT", self.connection)

    def subscribe(self, client: bytes = CLIENT, client_id: str = "c") -> Any:
        return self.telemetry.subscribe(self.context(client_id), client)[1]

    def push(self, client: bytes = CLIENT, number: int | None = None, *, last: bool = False, **other: int) -> int:
        """The error code; `number`: the subscription id, by default the right one."""
        right = telemetry._subscription(self.context(), client, []).subscription_id
        fields = {"compression_type": 0, "size_bytes": 5} | other
        try:
            self.telemetry.push(
                self.context(), client, right if number is None else number, is_terminating=last, **fields
            )
        except KafkaError as error:
            return error.code
        return 0


def refused(work: Callable[[], Any]) -> int:
    with pytest.raises(KafkaError) as caught:
        work()
    return caught.value.code


def test_the_number_of_a_subscription_is_kafkas() -> None:
    assert World().subscribe().subscription_id == -725132322, "as Kafka 4.3.1 answers for this client"


def test_who_has_no_id_gets_one() -> None:
    world = World()
    first, _ = world.telemetry.subscribe(world.context(), ZERO_UUID)
    second, _ = world.telemetry.subscribe(world.context(), ZERO_UUID)
    assert first != second
    assert ZERO_UUID not in (first, second)


def test_nothing_is_wanted_and_the_interval_is_kept() -> None:
    world = World()
    subscription = world.subscribe()
    assert (subscription.metrics, subscription.push_interval_ms) == ([], INTERVAL_MS)
    assert refused(world.subscribe) == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert world.push() == 0, "the first one after it asked may come at once"
    assert world.push() == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    world.now_ms += INTERVAL_MS
    assert world.push() == 0
    assert refused(world.subscribe) == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    world.now_ms += INTERVAL_MS
    assert world.subscribe().metrics == []


def test_who_says_goodbye_may_do_so_early_and_then_no_more() -> None:
    world = World()
    world.subscribe()
    assert [world.push(), world.push(last=True), world.push()] == [0, 0, ErrorCode.INVALID_REQUEST]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"number": 5}, ErrorCode.UNKNOWN_SUBSCRIPTION_ID),
        ({"compression_type": 9}, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        ({"size_bytes": 1001}, ErrorCode.TELEMETRY_TOO_LARGE),
        ({"client": ZERO_UUID}, ErrorCode.INVALID_REQUEST),
        ({"client": bytes(15) + b"\x01"}, ErrorCode.INVALID_REQUEST),
        ({"client": bytes(15) + b"\x02"}, 0),
    ],
)
def test_what_is_wrong_is_said(fields: Any, code: int) -> None:
    assert World().push(**fields) == code


def test_subscriptions_that_match_are_one() -> None:
    world = World(
        a={"metrics": "m.one,m.two", "interval.ms": "5000"},
        b={"metrics": "m.two,m.three", "interval.ms": "7000", "match": "client_id=c.*,client_source_address=1\\.2.*"},
        c={"metrics": "*", "interval.ms": "100", "match": "client_software_name=unknown"},
        d={"metrics": "*", "interval.ms": "100", "match": "client_id=["},
    )
    found = world.subscribe()
    assert (found.metrics, found.push_interval_ms) == (["m.one", "m.two", "m.three"], 5000)
    other = world.subscribe(b"o" * 16, client_id="xc")
    assert (other.metrics, other.push_interval_ms) == (["m.one", "m.two"], 5000)
    world.image = MetadataImage(configs={(16, "e"): {"metrics": "x,*"}})
    assert world.subscribe().metrics == ["*"], "a changed subscription is told before the interval is over"


def test_a_pattern_of_endless_ways_matches_nobody() -> None:
    world = World(a={"metrics": "m", "match": "client_id=(a+)+"}, b={"metrics": "n", "match": "client_id=a+!"})
    assert world.subscribe(client_id="a" * 50 + "!").metrics == ["n"]


def test_a_client_is_forgotten_with_its_connection() -> None:
    world = World()
    for number in range(10):
        world.telemetry.subscribe(world.context(), bytes([number + 1]) * 16)
    assert (len(world.telemetry), len(world.connection.notices)) == (10, 1), "one notice, however many it asks for"
    world.subscribe()
    world.connection.close()
    assert world.subscribe() is not None, "as if it had never been there"
    assert not world.telemetry._of_connection or world.telemetry._of_connection[world.connection] == CLIENT


def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "INSTANCES_MAX", 3)
    world = World()
    for number in range(5):
        world.subscribe(bytes([number + 1]) * 16)
    assert len(world.telemetry) == 3
    assert refused(lambda: world.subscribe(b"\x05" * 16)) == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    world.subscribe(b"\x01" * 16)


def test_one_that_was_silent_for_long_begins_anew() -> None:
    world = World()
    world.push(last=True)
    world.now_ms += 3 * INTERVAL_MS + 1
    assert world.push() == 0


async def test_both_calls_are_answered_though_not_advertised(wire: Any) -> None:
    answer = await wire.call(
        GetTelemetrySubscriptionsRequest(client_instance_id=CLIENT), 0, GetTelemetrySubscriptionsResponse
    )
    assert (answer.error_code, answer.client_instance_id, answer.subscription_id) == (0, CLIENT, -725132322)
    assert (answer.accepted_compression_types, answer.telemetry_max_bytes) == ([4, 3, 1, 2], 1_048_576)
    assert (answer.push_interval_ms, answer.delta_temporality, answer.requested_metrics) == (INTERVAL_MS, True, [])
    push = PushTelemetryRequest(client_instance_id=CLIENT, subscription_id=-725132322, metrics=b"m")
    assert (await wire.call(push, 0, PushTelemetryResponse)).error_code == 0
    assert (await wire.call(push, 0, PushTelemetryResponse)).error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    again = await wire.call(
        GetTelemetrySubscriptionsRequest(client_instance_id=CLIENT), 0, GetTelemetrySubscriptionsResponse
    )
    assert (again.error_code, again.client_instance_id) == (ErrorCode.THROTTLING_QUOTA_EXCEEDED, ZERO_UUID)
