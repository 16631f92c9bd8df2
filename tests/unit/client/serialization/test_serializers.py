from __future__ import annotations

import contextlib
import json
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.unit.client.serialization.fake_registry import FakeRegistry, running
from tidelog.client.serialization.avro import AvroDeserializer, AvroSerializer
from tidelog.client.serialization.json import from_json, to_json
from tidelog.client.serialization.registry import (
    RegisteredSchema,
    SchemaReference,
    SchemaRegistry,
    SchemaRegistryError,
)
from tidelog.testing import EmbeddedBroker

pytest.importorskip("fastavro")

FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [{"name": "carrier", "type": "string"}, {"name": "delay", "type": "int"}],
}
VALUE = {"carrier": "UA", "delay": 17}
# By Avro's specification: a string is its length (zigzag) and its bytes, an int is zigzag.
VALUE_BYTES = b"\x04UA\x22"


@pytest.fixture
def fake() -> Iterator[FakeRegistry]:
    with running() as registry:
        yield registry


def test_json_is_compact_utf_8_and_none_is_no_value():
    assert to_json({"a": [1, "ä"]}) == '{"a":[1,"ä"]}'.encode()
    assert from_json(to_json({"a": [1, "ä", None]}) or b"") == {"a": [1, "ä", None]}
    assert to_json(None) is None
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json(float("nan"))


def test_an_avro_value_begins_with_the_id_of_its_schema(fake: FakeRegistry):
    registry = SchemaRegistry(fake.url)
    serialize = AvroSerializer(registry, "flights-value", FLIGHT)
    assert fake.requests == []
    data = serialize(VALUE)
    assert data == b"\x00" + struct.pack(">I", 1) + VALUE_BYTES
    assert serialize(None) is None
    deserialize = AvroDeserializer(SchemaRegistry(fake.url))
    assert deserialize(data) == deserialize(data) == VALUE
    assert [request[:2] for request in fake.requests] == [
        ("POST", "/subjects/flights-value/versions"),
        ("GET", "/schemas/ids/1"),
    ]


def test_a_subject_is_quoted_in_the_path(fake: FakeRegistry):
    AvroSerializer(SchemaRegistry(fake.url), "a/b c-value", FLIGHT).prepare()
    assert fake.requests[0][1] == "/subjects/a%2Fb%20c-value/versions"


def test_a_schema_can_be_looked_up_without_registering_it(fake: FakeRegistry):
    registry = SchemaRegistry(fake.url)
    with pytest.raises(SchemaRegistryError, match="Schema not found") as refusal:
        AvroSerializer(registry, "s", FLIGHT, register=False)(VALUE)
    assert (refusal.value.status, refusal.value.code) == (404, 40403)
    AvroSerializer(registry, "s", FLIGHT).prepare()
    assert AvroSerializer(registry, "s", FLIGHT, register=False)(VALUE) is not None


def test_a_reader_with_its_own_schema_resolves_the_writers(fake: FakeRegistry):
    registry = SchemaRegistry(fake.url)
    data = AvroSerializer(registry, "s", FLIGHT)(VALUE) or b""
    widened = {
        "type": "record",
        "name": "Flight",
        "fields": [{"name": "delay", "type": "long"}, {"name": "gate", "type": "string", "default": "?"}],
    }
    assert AvroDeserializer(registry, widened)(data) == {"delay": 17, "gate": "?"}
    with pytest.raises(ValueError, match="does not fit schema 1"):
        AvroDeserializer(registry, {**FLIGHT, "fields": [{"name": "gate", "type": "string"}]})(data)


def test_references_are_read_from_the_registry(fake: FakeRegistry):
    registry = SchemaRegistry(fake.url)
    registry.register("flight", RegisteredSchema(json.dumps(FLIGHT)))
    trip = {
        "type": "record",
        "name": "Trip",
        "fields": [{"name": "flights", "type": {"type": "array", "items": "Flight"}}],
    }
    serialize = AvroSerializer(registry, "trip", trip, references=(SchemaReference("Flight", "flight", 1),))
    data = serialize({"flights": [VALUE]}) or b""
    assert AvroDeserializer(SchemaRegistry(fake.url))(data) == {"flights": [VALUE]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes are no Avro value"),
        (b"\x01\x00\x00\x00\x01" + VALUE_BYTES, "begins with a zero byte, not with 1"),
        (b"\x00\x00\x00\x00\x01" + VALUE_BYTES[:2], "does not fit schema 1"),
        (b"\x00\x00\x00\x00\x01\xff\xff\xff\xff\x0fUA", "does not fit schema 1"),
        (b"\x00\x00\x00\x00\x01" + VALUE_BYTES + b"x", "1 bytes follow the value"),
    ],
)
def test_damaged_values_are_refused_in_one_line(fake: FakeRegistry, data: bytes, message: str):
    registry = SchemaRegistry(fake.url)
    registry.register("s", RegisteredSchema(json.dumps(FLIGHT)))
    with pytest.raises(ValueError, match=message) as refusal:
        AvroDeserializer(registry)(data)
    assert "\n" not in str(refusal.value)


def test_a_value_that_does_not_fit_names_the_subject(fake: FakeRegistry):
    serialize = AvroSerializer(SchemaRegistry(fake.url), "flights-value", FLIGHT)
    for value in (
        {"carrier": "UA", "delay": "late"},
        {"carrier": "UA"},
        17,
        {**VALUE, "delay": 2**40},
        {**VALUE, "delay": 1.5},
    ):
        with pytest.raises(ValueError, match="does not fit the schema of flights-value"):
            serialize(value)
    with pytest.raises(ValueError, match="no Avro schema"):
        AvroSerializer(SchemaRegistry(fake.url), "s", '{"type": "nothing"}')(VALUE)


def test_refusals_of_the_registry_are_one_line_with_its_code(fake: FakeRegistry):
    registry = SchemaRegistry(fake.url)
    with pytest.raises(SchemaRegistryError, match=r"Schema being registered is incompatible \(HTTP 409\)") as refusal:
        registry.register("s", RegisteredSchema('"reject"'))
    assert refusal.value.code == 409
    with pytest.raises(SchemaRegistryError, match="Schema not found"):
        AvroDeserializer(registry)(b"\x00\x00\x00\x00\x63x")


@pytest.mark.parametrize(
    ("status", "data"),
    [
        (200, b"<html>"),
        (200, b"[" * 100_000),
        (200, b"[]"),
        (200, b"{}"),
        (302, b"{}"),
        (200, b'{"schema": "x", "references": 7}'),
    ],
)
def test_what_is_no_registry_is_refused(fake: FakeRegistry, status: int, data: bytes):
    fake.raw_answer = (status, data)
    with pytest.raises(SchemaRegistryError):
        SchemaRegistry(fake.url).schema(1)


@pytest.mark.parametrize("schema_id", [b"-1", b"4294967296", b"true"])
def test_an_id_that_is_no_number_of_four_bytes_is_refused(fake: FakeRegistry, schema_id: bytes):
    fake.raw_answer = (200, b'{"id": ' + schema_id + b"}")
    with pytest.raises(SchemaRegistryError, match="no id"):
        AvroSerializer(SchemaRegistry(fake.url), "s", '"string"')("x")


NODE = '{"type": "record", "name": "Node", "namespace": "n", "fields": [{"name": "next", "type": ["null", "Node"]}]}'
TREE = '{"type": "record", "name": "Tree", "fields": [{"name": "parts", "type": {"type": "array", "items": "Tree"}}]}'
ENDLESS = '{"type": "record", "name": "A", "fields": [{"name": "a", "type": "A"}]}'


@pytest.mark.parametrize(
    ("schema", "level"), [(NODE, b"\x02"), (TREE, b"\x02"), (ENDLESS, b""), (f'["null", {NODE}]', b"\x02")]
)
def test_a_value_of_any_depth_ends_no_process(fake: FakeRegistry, schema: str, level: bytes):
    fake.schemas = [{"schema": schema}]
    with pytest.raises(ValueError, match="RecursionError"):
        AvroDeserializer(SchemaRegistry(fake.url))(b"\0\0\0\0\1" + level * 100_000 + b"\0")


def test_recursive_values_are_written_and_read(fake: FakeRegistry):
    registry = SchemaRegistry(fake.url)
    value: dict[str, Any] | None = None
    for _ in range(20):
        value = {"next": value}
    data = AvroSerializer(registry, "s", NODE)(value)
    assert data is not None
    assert AvroDeserializer(registry)(data) == value
    for _ in range(100_000):
        value = {"next": value}
    with pytest.raises(ValueError, match="RecursionError"):
        AvroSerializer(registry, "s", NODE)(value)


def test_an_endless_answer_is_refused(fake: FakeRegistry):
    fake.raw_answer = (200, b'{"schema": "' + b"x" * (4 * 1024 * 1024) + b'"}')
    with pytest.raises(SchemaRegistryError, match="larger than"):
        SchemaRegistry(fake.url).schema(1)


def test_a_registry_that_is_not_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(SchemaRegistryError, match=f"127.0.0.1:{port}\\) does not answer"):
        SchemaRegistry(f"http://127.0.0.1:{port}").schema(1)


def test_credentials_are_sent_and_never_shown(fake: FakeRegistry):
    registry = SchemaRegistry(fake.url, username="ann", password="secret")
    with pytest.raises(SchemaRegistryError) as refusal:
        registry.schema(9)
    assert fake.requests[0][2] == "Basic YW5uOnNlY3JldA=="
    assert "secret" not in repr(registry) + str(refusal.value)
    with pytest.raises(ValueError, match="without a user"):
        SchemaRegistry("http://ann:secret@127.0.0.1:8081")


async def test_records_go_through_a_topic_as_avro(fake: FakeRegistry):
    from tidelog import Consumer, Producer

    registry = SchemaRegistry(fake.url)
    with EmbeddedBroker() as broker:
        address = broker.bootstrap_servers
        serializer = AvroSerializer(registry, "flights-value", FLIGHT)
        async with Producer(bootstrap_servers=address, value_serializer=serializer, key_serializer=to_json) as producer:
            await producer.send_and_wait("flights", VALUE, key=["UA", 17])
        async with Consumer(
            "flights",
            bootstrap_servers=address,
            auto_offset_reset="earliest",
            value_deserializer=AvroDeserializer(registry),
            key_deserializer=from_json,
        ) as consumer:
            async for record in consumer:
                found: tuple[Any, Any] = (record.key, record.value)
                assert found == (["UA", 17], VALUE)
                break


async def test_a_record_is_read_again_when_the_registry_is_back(fake: FakeRegistry):
    from tidelog import Consumer, Producer, TopicPartition

    registry = SchemaRegistry(fake.url)
    flights = TopicPartition("flights", 0)
    with EmbeddedBroker() as broker:
        options = {"bootstrap_servers": broker.bootstrap_servers}
        async with Producer(**options, value_serializer=AvroSerializer(registry, "s", FLIGHT)) as producer:
            await producer.send_and_wait("flights", VALUE)
        deserializer = AvroDeserializer(registry)
        async with Consumer(
            "flights", **options, auto_offset_reset="earliest", value_deserializer=deserializer
        ) as consumer:
            fake.raw_answer = (500, b'{"error_code": 50001, "message": "no"}')
            for _ in range(2):
                with pytest.raises(SchemaRegistryError, match="HTTP 500"):
                    await consumer.poll(60_000)
            fake.raw_answer = None
            batch = await consumer.poll(30_000)
            values: list[Any] = [record.value for record in batch[flights]]
            assert values == [VALUE]


def test_without_fastavro_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastavro", None)
    with pytest.raises(ImportError, match=r"pip install 'tidelog\[avro\]'"):
        AvroDeserializer(SchemaRegistry("http://127.0.0.1:1"), {"type": "string"})


@pytest.mark.parametrize(
    "start", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"]
)
def test_an_answer_that_comes_byte_by_byte_ends_with_the_time(start: bytes) -> None:
    """The time limited each byte alone, and the event loop of the client stood for as long as bytes came."""
    is_over = threading.Event()

    def drip() -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(start)
            for _ in range(400):
                connection.sendall(b"x")
                if is_over.wait(0.05):
                    break

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip)
        thread.start()
        registry = SchemaRegistry(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.3)
        begin_s = time.monotonic()
        with pytest.raises(SchemaRegistryError, match=r"no whole answer in 0\.3 s"):
            registry.schema(1)
        assert time.monotonic() - begin_s < PATIENCE_S / 2
        is_over.set()
        thread.join(PATIENCE_S)
    assert not any(isinstance(each, threading.Timer) for each in threading.enumerate())
