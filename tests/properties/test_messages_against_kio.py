"""Every message at every version says the same in our codecs and in kio's, which are generated from Kafka's schemas.

`filled` makes a message from a random number generator: a plain seeded one in the fast tests, hypothesis's own in the
wide ones, so that failures shrink. Messages that kio lacks (metadata and group records) take part in what needs no kio;
`tests/unit/protocol/test_messages_golden.py` holds those to bytes written by Kafka.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import pkgutil
import types
import typing
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import BytesIO
from pathlib import Path
from random import Random
from typing import Any

import kio.schema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode as KioErrorCode
from kio.serial import entity_reader, entity_writer

from tidelog.protocol import messages
from tidelog.protocol.codec.fields import Field
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import MalformedMessage
from tidelog.protocol.messages.metadata_records import ClientQuotaRecord

# ------------------------------------------------------------------------------------------- what there is to compare


def declared() -> list[type[Message]]:
    """Every message that is not only part of another."""
    found: list[type[Message]] = []
    for module in pkgutil.iter_modules(messages.__path__):
        for each in vars(importlib.import_module(f"tidelog.protocol.messages.{module.name}")).values():
            if isinstance(each, type) and issubclass(each, Message) and each.VERSIONS and each not in found:
                found.append(each)
    nested = {field.element for each in found for _, field in each.FIELDS if isinstance(field.element, type)}
    return [each for each in found if each not in nested]


def snake(name: str) -> str:
    out = ""
    for place, letter in enumerate(name):
        after = name[place + 1 : place + 2]
        if letter.isupper() and place and (not name[place - 1].isupper() or (after and after.islower())):
            out += "_"
        out += letter.lower()
    return out


def kio_module(message: type[Message], version: int) -> str:
    name = message.__name__
    kind = next((each for each in ("Request", "Response", "Header") if name.endswith(each)), "Data").lower()
    api = snake(name) if kind in ("data", "header") else snake(name.removesuffix(kind.capitalize()))
    return f"{api}.v{version}.{kind}"


def is_in_kio(message: type[Message], version: int) -> bool:
    """Without importing it: all of kio takes seconds, and every run of pytest asks for the list."""
    return Path(kio.schema.__path__[0], *kio_module(message, version).split(".")).with_suffix(".py").exists()


def kio_class(message: type[Message], version: int) -> Any:
    return getattr(importlib.import_module(f"kio.schema.{kio_module(message, version)}"), message.__name__)


MESSAGES = declared()
PAIRS = [(message, version) for message in MESSAGES for version in message.VERSIONS]
IN_KIO = [pair for pair in PAIRS if is_in_kio(*pair)]


Check = Callable[[type[Message], int], None]


def in_each_version(pairs: list[tuple[type[Message], int]]) -> Callable[[Check], Callable[[type[Message]], None]]:
    """Makes a check of one version a test of a message in all of these: 2,400 tests cost more than what they do."""
    versions: dict[type[Message], list[int]] = {}
    for message, version in pairs:
        versions.setdefault(message, []).append(version)

    def decorate(check: Check) -> Callable[[type[Message]], None]:
        @pytest.mark.parametrize("message", versions, ids=lambda message: message.__name__)
        def test(message: type[Message]) -> None:
            for version in versions[message]:
                try:
                    check(message, version)
                except BaseException as error:
                    error.add_note(f"{message.__name__} in version {version}")
                    raise

        return test

    return decorate


def fields_of(message: type[Message], version: int) -> list[tuple[str, Field]]:
    return [(name, field) for name, field in message.FIELDS if version in field.versions]


def kio_type(field: dataclasses.Field[Any]) -> tuple[Any, bool]:
    """A field's type without `None` and `tuple[..., ...]`, and whether it may be None."""
    kind: Any = field.type
    nullable = False
    if isinstance(kind, types.UnionType):
        (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
        nullable = True
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind, nullable


def wire_type(field: dataclasses.Field[Any]) -> str | None:
    return typing.cast("str | None", field.metadata.get("kafka_type"))


# --------------------------------------------------------------------------------------------------- making messages

_INTEGERS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
_TEXTS = ["", "a", "orders-7", "größe", "日本語", "\U0001f30a", "x" * 126, "x" * 127, "y" * 300, "\x00"]


def filled(rng: Random, message: type[Message], version: int, kio: Any = None) -> Message:
    """A message with a random value in every field of this version; kept to what `kio` can express, if given."""
    theirs = dataclasses.fields(kio) if kio is not None else [None] * len(message.FIELDS)
    values: dict[str, Any] = {}
    for (name, field), other in zip(fields_of(message, version), theirs):
        if version in field.nullable and rng.random() < 0.2:
            values[name] = None
        elif field.tag is not None and rng.random() < 0.3:
            continue
        elif field.kind == "array":
            many = rng.choice([0, 1, 2, 3]) if isinstance(field.element, type) else rng.choice([0, 1, 2, 16, 17, 18])
            values[name] = [_value(rng, field.element, version, other) for _ in range(many)]
        else:
            values[name] = _value(rng, field.element if field.kind == "struct" else field.kind, version, other)
    return message(**values)


def _value(rng: Random, kind: Any, version: int, other: dataclasses.Field[Any] | None) -> Any:
    wire = None if other is None else wire_type(other)
    if isinstance(kind, type):
        return filled(rng, kind, version, None if other is None else kio_type(other)[0])
    if wire == "error_code":
        return int(rng.choice(list(KioErrorCode)))
    if wire is not None and wire.startswith(("timedelta", "datetime")):
        return rng.choice([0, 1, 1500, rng.randrange(1 << 31)])
    if kind == "bool":
        return rng.random() < 0.5
    if kind in _INTEGERS:
        half = 1 << (_INTEGERS[kind] - 1)
        return rng.choice([0, 1, -1, half - 1, -half, rng.randrange(-half, half)])
    if kind == "uint16":
        return rng.choice([0, 9092, 65535])
    if kind == "float64":
        return rng.choice([0.0, -1.5, 1e300])
    if kind == "uuid":
        return bytes(rng.randrange(256) for _ in range(16))
    if kind == "string":
        return rng.choice(_TEXTS)
    size = rng.choice([0, 1, 5, 127, 128, 200])
    return bytes([rng.randrange(256)]) * size


# -------------------------------------------------------------------------------------------------------- converting


def to_kio(ours: Message, version: int, kio: Any) -> Any:
    values = {}
    for (name, field), other in zip(fields_of(type(ours), version), dataclasses.fields(kio)):
        values[other.name] = _to_kio(getattr(ours, name), field.element or field.kind, version, other)
    return kio(**values)


def _to_kio(value: Any, kind: Any, version: int, other: dataclasses.Field[Any]) -> Any:
    their_type, _ = kio_type(other)
    wire = wire_type(other)
    if value is None:
        return None
    if isinstance(value, list):
        return tuple(_to_kio(each, kind, version, other) for each in value)
    if isinstance(value, Message):
        return to_kio(value, version, their_type)
    if kind == "uuid":
        return uuid.UUID(bytes=value) if any(value) else None
    if wire == "error_code":
        return KioErrorCode(value)
    if wire is not None and wire.startswith("timedelta"):
        return timedelta(milliseconds=value)
    if wire is not None and wire.startswith("datetime"):
        return None if value == -1 else datetime.fromtimestamp(value / 1000, UTC)
    return value


def kio_encode(entity: Any) -> bytes:
    out = BytesIO()
    entity_writer(type(entity))(out, entity)
    return out.getvalue()


def assert_same(ours: Message, version: int, kio: Any) -> None:
    theirs = to_kio(ours, version, kio)
    encoded = ours.encode(version)
    decoded, size = entity_reader(kio)(encoded, 0)
    assert size == len(encoded)
    assert decoded == theirs, "what we encode, kio decodes otherwise"
    written_by_kio = kio_encode(theirs)
    assert type(ours).decode(written_by_kio, version) == ours, "what kio encodes, we decode otherwise"
    assert written_by_kio == encoded


# ------------------------------------------------------------------------------------------------------------- tests


def test_kio_has_every_request_and_response_we_declare():
    lacking = {message for message, version in PAIRS if (message, version) not in IN_KIO}
    rooms = {message.__module__.rpartition(".")[2] for message in lacking}
    assert rooms == {"metadata_records", "group_records", "transaction_records"}
    assert len(IN_KIO) > 250


@in_each_version(IN_KIO)
def test_a_declaration_agrees_with_kio(message: type[Message], version: int):
    _compare(message, version, kio_class(message, version))


def _compare(message: type[Message], version: int, kio: Any) -> None:
    ours = fields_of(message, version)
    theirs = dataclasses.fields(kio)
    assert kio.__flexible__ == (version >= message.FLEXIBLE_FROM)
    assert (kio.__api_key__ if hasattr(kio, "__api_key__") else None) == message.API_KEY or not message.API_KEY
    assert len(ours) == len(theirs)
    for (name, field), other in zip(ours, theirs):
        wire = wire_type(other)
        timed = wire is not None and wire.startswith(("timedelta", "datetime"))
        theirs_name = other.name.removesuffix("_")  # kio's way around Python's own names
        assert name in (theirs_name, f"{theirs_name}_ms") if timed else name == theirs_name
        assert other.metadata.get("tag") == field.tag
        their_type, nullable = kio_type(other)
        if field.kind not in ("uuid", "records") and not (timed and wire and wire.startswith("datetime")):
            assert nullable == (version in field.nullable), name
        assert (typing.get_origin(other.type) is tuple or "tuple[" in str(other.type)) == (field.kind == "array")
        kind = field.element or field.kind
        if isinstance(kind, type):
            _compare(kind, version, their_type)
            continue
        expected = {"error_code": "int16"}.get(wire or "", (wire or "").replace("timedelta_i", "int"))
        assert expected.replace("datetime_i", "int") == kind, name
        if other.default is not dataclasses.MISSING and field.kind != "array":
            assert _to_kio(field.default, kind, version, other) == other.default, name
        elif field.kind != "array":
            assert field.default in (0, "", b"", None, False, 0.0, bytes(16)), name


@in_each_version(IN_KIO)
def test_a_few_random_messages_read_the_same_here_and_in_kio(message: type[Message], version: int):
    kio = kio_class(message, version)
    for seed in range(4):
        assert_same(filled(Random(seed), message, version, kio), version, kio)


@given(st.randoms(use_true_random=False), st.sampled_from(IN_KIO))
def test_any_message_reads_the_same_here_and_in_kio(rng: Random, pair: tuple[type[Message], int]):
    message, version = pair
    kio = kio_class(message, version)
    assert_same(filled(rng, message, version, kio), version, kio)


@pytest.mark.hunt
@pytest.mark.parametrize("message", dict(IN_KIO), ids=lambda message: message.__name__)
def test_many_messages_read_the_same_here_and_in_kio(message: type[Message]):
    @given(st.randoms(use_true_random=False), st.sampled_from(message.VERSIONS))
    def property_(rng: Random, version: int) -> None:
        kio = kio_class(message, version)
        assert_same(filled(rng, message, version, kio), version, kio)

    property_()


@in_each_version(PAIRS)
def test_what_is_encoded_is_decoded_from_any_kind_of_buffer(message: type[Message], version: int):
    for seed in range(3):
        made = filled(Random(seed), message, version)
        encoded = made.encode(version)
        out = bytearray(b"before")
        made.write(out, version)
        assert out == b"before" + encoded
        for buffer in (encoded, bytearray(encoded), memoryview(encoded)):
            assert message.decode(buffer, version) == made
        assert message.read(out + b"after", 6, version) == (made, 6 + len(encoded))
        with pytest.raises(MalformedMessage):
            message.decode(encoded + b"\0", version)


def assert_only_malformed(message: type[Message], version: int, data: bytes) -> None:
    try:
        decoded = message.decode(data, version)
    except MalformedMessage:
        return
    again = message.decode(decoded.encode(version), version)  # what can be decoded can be encoded again
    if isinstance(decoded, ClientQuotaRecord) and math.isnan(decoded.value):  # what is not equal to itself
        assert isinstance(again, ClientQuotaRecord)
        assert math.isnan(again.value)
        decoded.value = again.value = 0.0
    assert decoded == again


def test_a_quota_that_is_no_number_is_read_as_it_was_written():
    quota = ClientQuotaRecord(entity=[], key="producer_byte_rate", value=math.nan)
    assert_only_malformed(ClientQuotaRecord, 0, quota.encode(0))


@in_each_version(PAIRS)
def test_a_message_cut_short_is_malformed(message: type[Message], version: int):
    encoded = filled(Random(1), message, version).encode(version)
    for size in range(0, len(encoded), max(1, len(encoded) // 60)):
        with pytest.raises(MalformedMessage):
            message.decode(encoded[:size], version)


@in_each_version(PAIRS)
def test_a_few_changed_bytes_are_malformed_or_another_message(message: type[Message], version: int):
    rng = Random(version)
    encoded = filled(rng, message, version).encode(version)
    for _ in range(40):
        data = bytearray(encoded)
        for _ in range(rng.choice([1, 1, 2, 5])):
            if data:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        assert_only_malformed(message, version, bytes(data))


@given(st.sampled_from(PAIRS), st.binary(max_size=200))
def test_arbitrary_bytes_are_malformed_or_a_message(pair: tuple[type[Message], int], data: bytes):
    assert_only_malformed(*pair, data)


@pytest.mark.hunt
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.__name__)
def test_many_changed_bytes_are_malformed_or_another_message(message: type[Message]):
    @given(st.randoms(use_true_random=False), st.sampled_from(message.VERSIONS), st.data())
    def property_(rng: Random, version: int, data: st.DataObject) -> None:
        encoded = bytearray(filled(rng, message, version).encode(version))
        for place in data.draw(st.lists(st.integers(0, max(0, len(encoded) - 1)), max_size=6)):
            if encoded:
                encoded[place] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0x81, 0xFE, 0xFF]))
        cut = data.draw(st.integers(0, len(encoded)))
        assert_only_malformed(message, version, bytes(encoded))
        assert_only_malformed(message, version, bytes(encoded[:cut]))

    property_()
