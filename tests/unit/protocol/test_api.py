"""The table of APIs: Kafka 4.3's ranges, what of them is served, header versions; error codes and ids."""

from __future__ import annotations

import importlib
import pkgutil
import random

import pytest

from tidelog.protocol import api, messages, uuids
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.protocol.messages.headers import RequestHeader, ResponseHeader

# key -> versions a Kafka 4.3 broker advertises, for what this broker serves
SERVED = {
    0: (0, 13), 1: (4, 18), 2: (1, 11), 3: (0, 13), 8: (2, 10), 9: (1, 10), 10: (0, 6), 11: (0, 9), 12: (0, 4),
    13: (0, 5), 14: (0, 5), 15: (0, 6), 16: (0, 5), 18: (0, 4), 19: (2, 7), 20: (1, 6), 21: (0, 2),
    22: (0, 5), 23: (2, 4), 24: (0, 5), 25: (0, 4), 26: (0, 5), 27: (1, 2), 28: (0, 5),
    32: (1, 4), 33: (0, 2), 34: (1, 2), 35: (1, 5), 37: (0, 3), 42: (0, 2), 43: (0, 2), 44: (0, 1), 45: (0, 1),
    46: (0, 0), 47: (0, 0), 55: (0, 2), 57: (0, 2), 60: (0, 2), 61: (0, 0),
    64: (0, 0), 65: (0, 0), 66: (0, 2), 74: (0, 1), 75: (0, 0), 80: (0, 1), 81: (0, 0),
}  # fmt: skip
# The same for a Kafka 4.3 controller.
CONTROLLER_SERVED = {
    1: (4, 18), 18: (0, 4), 19: (2, 7), 20: (1, 6), 32: (1, 4), 33: (0, 2), 37: (0, 3), 43: (0, 2), 44: (0, 1),
    45: (0, 1), 46: (0, 0), 52: (0, 2), 53: (0, 1), 54: (0, 1), 55: (0, 2), 56: (2, 3), 57: (0, 2), 58: (0, 0),
    59: (0, 1), 60: (0, 2), 62: (0, 4), 63: (0, 2), 64: (0, 0), 67: (0, 0), 70: (0, 0), 73: (0, 0), 80: (0, 1),
    81: (0, 0), 82: (0, 0),
}  # fmt: skip


def requests() -> dict[int, type[Message]]:
    found: dict[int, type[Message]] = {}
    for module in pkgutil.iter_modules(messages.__path__):
        for name, each in vars(importlib.import_module(f"tidelog.protocol.messages.{module.name}")).items():
            if name.endswith("TopicRequest"):
                continue  # Kafka calls parts of two requests so
            if name.endswith("Request") and isinstance(each, type) and issubclass(each, Message):
                assert each.API_KEY is not None
                found[each.API_KEY] = each
    return found


@pytest.mark.parametrize(
    ("table", "kafkas"),
    [(api.SERVED, SERVED), (api.CONTROLLER_SERVED, CONTROLLER_SERVED)],
    ids=["broker", "controller"],
)
def test_what_is_served_is_advertised_exactly_as_kafka_does(table, kafkas):
    assert {key: (versions.start, versions.stop - 1) for key, versions in table.items()} == kafkas


def test_everything_served_is_declared_in_the_versions_advertised():
    declared = requests()
    for key, versions in [*api.SERVED.items(), *api.CONTROLLER_SERVED.items()]:
        served = versions[3:] if key == api.ApiKey.PRODUCE else versions
        assert served == declared[key].VERSIONS, api.api_name(key)


@pytest.mark.parametrize("key", sorted(requests()))
def test_the_table_agrees_with_the_declarations(key: int):
    request = requests()[key]
    module = importlib.import_module(request.__module__)
    response = getattr(module, request.__name__.replace("Request", "Response"))
    assert f"{api.api_name(key)}Request" == request.__name__
    assert response.API_KEY == request.API_KEY
    assert response.VERSIONS == request.VERSIONS
    for version in request.VERSIONS:
        flexible = version >= request.FLEXIBLE_FROM
        assert flexible == (version >= response.FLEXIBLE_FROM)
        assert api.request_header_version(key, version) == (2 if flexible else 1)
        assert api.response_header_version(key, version) == (1 if flexible and request is not ApiVersionsRequest else 0)


def test_every_key_has_a_name_and_a_range():
    assert {int(key) for key in api.ApiKey} == set(api.KAFKA_VERSIONS)
    for key in api.ApiKey:
        assert key.name.replace("_", "") == api.api_name(key).upper()
    assert api.api_name(4711) == "API 4711"


def test_api_versions_answers_with_the_old_header_always():
    assert [api.response_header_version(18, version) for version in range(5)] == [0] * 5


def test_the_client_id_keeps_its_old_length_in_the_flexible_header():
    header = RequestHeader(request_api_key=18, request_api_version=3, correlation_id=7, client_id="me")
    assert header.encode(1).hex(" ", 2) == "0012 0003 0000 0007 0002 6d65"
    assert header.encode(2) == header.encode(1) + b"\0"
    assert RequestHeader.read(memoryview(header.encode(2) + b"body"), 0, 2) == (header, 13)
    header.client_id = None
    assert header.encode(1).hex(" ", 2) == "0012 0003 0000 0007 ffff"
    assert RequestHeader.decode(header.encode(2), 2) == header
    assert ResponseHeader(correlation_id=7).encode(1) == b"\0\0\0\7\0"


def test_error_codes():
    assert ErrorCode.of(6) is ErrorCode.NOT_LEADER_OR_FOLLOWER
    assert ErrorCode.of(31999) is ErrorCode.UNKNOWN_SERVER_ERROR
    assert [int(code) for code in ErrorCode] == list(range(-1, 134))
    assert ErrorCode.NOT_ENOUGH_REPLICAS.retriable
    assert not ErrorCode.NOT_ENOUGH_REPLICAS.invalidates_metadata
    assert ErrorCode.LEADER_NOT_AVAILABLE.retriable
    assert ErrorCode.LEADER_NOT_AVAILABLE.invalidates_metadata
    assert not ErrorCode.MESSAGE_TOO_LARGE.retriable
    assert str(KafkaError(ErrorCode.INVALID_CONFIG, "no")) == "INVALID_CONFIG: no"
    assert str(KafkaError(ErrorCode.INVALID_CONFIG)) == "INVALID_CONFIG"
    assert KafkaError(ErrorCode.REQUEST_TIMED_OUT).retriable


def test_ids_are_written_as_kafka_writes_them():
    assert uuids.uuid_to_text(uuids.METADATA_TOPIC_ID) == "AAAAAAAAAAAAAAAAAAAAAQ"
    rng = random.Random(3)
    for _ in range(200):
        value = rng.randbytes(16)
        text = uuids.uuid_to_text(value)
        assert len(text) == 22
        assert uuids.uuid_from_text(text) == uuids.uuid_from_text(text + "==") == value


@pytest.mark.parametrize("text", ["", "short", "A" * 21, "A" * 23, "+" * 22, "/" * 22, "é" * 22, "A" * 21 + "!"])
def test_what_is_no_id_is_a_value_error(text: str):
    with pytest.raises(ValueError, match="22"):
        uuids.uuid_from_text(text)
