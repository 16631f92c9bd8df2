"""What a declaration means: constructors, defaults, version rules, and what the compiled codecs do at the edges."""

from __future__ import annotations

import copy
import pickle
import tracemalloc

import pytest

from tidelog.protocol.codec.decoding import (
    BUDGET,
    ELEMENT_COST,
    ELEMENTS_MAX,
    REQUEST_BUDGET,
    STEP_BYTES,
    TAGGED_FIELDS_MAX,
    DecoderSource,
    minimum_size,
)
from tidelog.protocol.codec.encoding import EncoderSource
from tidelog.protocol.codec.fields import NEVER, parse_versions
from tidelog.protocol.codec.primitives import write_uvarint
from tidelog.protocol.codec.schema import (
    Bytes,
    Message,
    array,
    boolean,
    byte_string,
    int16,
    int32,
    int64,
    record_batches,
    string,
    struct,
    uuid,
)
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from tidelog.protocol.messages.metadata import MetadataRequest, MetadataResponse


class Berth(Message):
    name: str = string()
    depth: int = int32(default=-1)


class Tide(Message):
    height: int = int16()
    at: int = int64(default=-1)


class Numbers(Message, versions="0", flexible="0+"):
    numbers: list[int] = array(int32)


class Harbour(Message, key=99, versions="0-4", flexible="2+"):
    open: bool = boolean(default=True)
    name: str | None = string(nullable="1+")
    harbour_id: bytes = uuid("1+", ignorable=True)
    berths: list[Berth] | None = array(Berth, nullable="1+")
    depths: list[int] = array(int32, "2+")
    nicknames: list[str] = array(string, "2+")
    chart: bytes | None = byte_string("2+", nullable="2+", default=None)
    cargo: Bytes | None = record_batches("3+", nullable="3+")
    pilot: Berth | None = struct(Berth, "4+", nullable="4+", default=None)
    light: int = int32("2+", default=7, tag=0, ignorable=True)
    tide: Tide = struct(Tide, "3+", tag=1)


SMALLEST = bytes.fromhex("01 0001 41 00000000")  # version 0, named A


def test_versions_are_written_as_in_kafkas_schemas():
    assert parse_versions("3+") == range(3, NEVER)
    assert parse_versions("2-5") == range(2, 6)
    assert parse_versions("4") == range(4, 5)
    assert not parse_versions("none")


def test_the_constructor_gives_defaults_and_takes_keywords_only():
    harbour = Harbour()
    assert (harbour.open, harbour.name, harbour.berths, harbour.light, harbour.pilot) == (True, "", [], 7, None)
    assert harbour.tide == Tide(height=0, at=-1)
    assert harbour.cargo is None
    assert harbour.harbour_id == bytes(16)
    with pytest.raises(TypeError):
        Harbour(True)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Harbour(closed=True)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        harbour.closed = True  # type: ignore[attr-defined]


def test_defaults_are_not_shared():
    first, second = Harbour(), Harbour()
    assert first.berths is not None
    first.berths.append(Berth())
    first.tide.height = 5
    first.depths.append(1)
    assert second == Harbour()
    decoded = Harbour.decode(SMALLEST, 0)
    decoded.depths.append(1)
    assert Harbour.decode(SMALLEST, 0).depths == []


def test_messages_compare_by_value_and_show_their_fields():
    assert Berth(name="a") == Berth(name="a")
    assert Berth(name="a") != Berth(name="b")
    assert Berth() != Tide()
    assert repr(Berth(name="a", depth=3)) == "Berth(name='a', depth=3)"
    assert "cargo=<4 bytes>" in repr(Harbour(cargo=memoryview(b"fish")))
    with pytest.raises(TypeError):
        hash(Berth())


def test_messages_can_be_copied_and_sent_to_another_process():
    harbour = Harbour(name="Cuxhaven", berths=[Berth(name="a")])
    assert copy.deepcopy(harbour) == harbour
    assert pickle.loads(pickle.dumps(harbour)) == harbour  # noqa: S301 - our own bytes


def test_class_facts():
    for message in (Harbour, Berth):
        assert list(message.VERSIONS) == [0, 1, 2, 3, 4]
        assert message.FLEXIBLE_FROM == 2
    assert Harbour.API_KEY == 99
    assert Berth.API_KEY is None
    assert Harbour.HAS_RECORDS
    assert not Berth.HAS_RECORDS


def full(version: int) -> Harbour:
    harbour = Harbour(open=False, name="Cuxhaven", berths=[Berth(name="a", depth=9), Berth(name="b" * 200)])
    if version >= 1:
        harbour.harbour_id = bytes(range(16))
    if version >= 2:
        harbour.depths, harbour.nicknames, harbour.chart, harbour.light = [1, -2, 3], ["Cux", ""], b"\0\1", 8
    if version >= 3:
        harbour.cargo, harbour.tide = b"fish", Tide(height=2, at=99)
    if version >= 4:
        harbour.pilot = Berth(name="p")
    return harbour


@pytest.mark.parametrize("version", range(5))
def test_what_is_encoded_is_decoded(version: int):
    assert Harbour.decode(full(version).encode(version), version) == full(version)
    assert Harbour.decode(Harbour().encode(version), version) == Harbour()


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("size", [0, 4095, 4096, 100_000])
def test_pieces_are_the_encoded_bytes_and_large_records_are_not_copied(version: int, size: int):
    harbour = full(version)
    if version >= 3:
        harbour.cargo = bytes(size)
    pieces = harbour.write_pieces(bytearray(b"head"), version)
    assert b"".join(pieces) == b"head" + harbour.encode(version)
    is_uncopied = any(piece is harbour.cargo for piece in pieces)
    assert is_uncopied == (version >= 3 and size >= 4096)


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize(("berths", "steps"), [(0, 0), (1999, 0), (2000, 1), (5000, 2)])
def test_steps_write_the_encoded_bytes(version: int, berths: int, steps: int):
    harbour = full(version)
    harbour.berths = [Berth(name=f"b{number}", depth=number) for number in range(berths)]
    out = bytearray(b"head")
    assert len(list(harbour.write_in_steps(out, version))) == steps
    assert out == b"head" + harbour.encode(version)


def in_steps(data: bytes, version: int) -> tuple[Harbour, int, int]:
    """A decoded message, its end, and the number of pauses."""
    steps, count = Harbour.read_in_steps(data, 4, version), 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return *end.value, count
        count += 1


@pytest.mark.parametrize("version", range(5))
@pytest.mark.parametrize("berths", [0, 1, 5000])
def test_steps_read_what_was_encoded(version: int, berths: int):
    harbour = full(version)
    harbour.berths = [Berth(name=f"b{number}", depth=number) for number in range(berths)]
    data = harbour.encode(version)
    decoded, end, pauses = in_steps(b"head" + data + b"tail", version)
    assert (decoded, end) == (harbour, 4 + len(data))
    assert abs(pauses - len(data) / STEP_BYTES) <= 1
    for stop in range(4, 4 + len(data), max(1, len(data) // 20)):
        with pytest.raises(MalformedMessage):
            in_steps((b"head" + data)[:stop], version)


def test_long_names_are_read_and_written_one_after_the_other():
    """3,000 names of 32 KB were read in one turn of the loop."""
    harbour = Harbour(nicknames=["x" * 32_000] * 50, berths=[Berth(name="y" * 32_000)] * 50)
    data = harbour.encode(2)
    decoded, _, pauses = in_steps(b"head" + data, 2)
    assert decoded == harbour
    assert pauses >= 98
    out = bytearray()
    assert len(list(harbour.write_in_steps(out, 2))) >= 5
    assert out == data


def test_the_bytes_of_an_old_and_a_flexible_version():
    harbour = Harbour(open=False, name="A", berths=[Berth(name="x", depth=3)])
    assert harbour.encode(0).hex(" ") == "00 00 01 41 00 00 00 01 00 01 78 00 00 00 03"
    harbour.harbour_id = b"\xaa" * 16
    harbour.light = 8
    assert harbour.encode(2).hex(" ") == (
        "00 02 41 " + "aa " * 16 + "02 02 78 00 00 00 03 00 01 01 00 01 00 04 00 00 00 08"
    )


def test_null_where_the_version_allows_it():
    for version in range(1, 5):
        harbour = Harbour(name=None, berths=None)
        assert Harbour.decode(harbour.encode(version), version) == harbour
    with pytest.raises(KafkaError) as refused:
        Harbour(name=None).encode(0)
    assert refused.value.code is ErrorCode.UNSUPPORTED_VERSION
    with pytest.raises(MalformedMessage, match="name"):
        Harbour.decode(b"\1\xff\xff" + bytes(4), 0)
    with pytest.raises(ValueError):
        Harbour(depths=None).encode(2)  # type: ignore[arg-type]


def test_a_field_the_version_lacks_must_be_default_or_ignorable():
    assert Harbour(harbour_id=b"1" * 16, light=3).encode(0) == Harbour().encode(0)
    for harbour, version in [
        (Harbour(depths=[1]), 1),
        (Harbour(chart=b""), 1),
        (Harbour(tide=Tide(at=4)), 2),
        (Harbour(cargo=b""), 2),
        (Harbour(pilot=Berth()), 3),
    ]:
        with pytest.raises(KafkaError) as refused:
            harbour.encode(version)
        assert refused.value.code is ErrorCode.UNSUPPORTED_VERSION
        assert "Harbour." in str(refused.value)


@pytest.mark.parametrize("version", [-1, 5, 1000])
def test_an_undeclared_version_is_refused_both_ways(version: int):
    for act in (lambda: Harbour().encode(version), lambda: Harbour.decode(b"", version)):
        with pytest.raises(KafkaError) as refused:
            act()
        assert refused.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_values_that_do_not_fit_are_a_value_error():
    for harbour in (
        Harbour(berths=[Berth(depth=1 << 31)]),
        Harbour(name="x" * 32768),
        Harbour(name=b"bytes"),  # type: ignore[arg-type]
        Harbour(name="\ud800"),
        Harbour(berths=[None]),  # type: ignore[list-item]
    ):
        with pytest.raises(ValueError):
            harbour.encode(0)
    assert len(Harbour(name="x" * 32768).encode(2)) > 32768  # compact lengths know no such limit


def test_records_are_a_view_into_the_buffer_and_any_bytes_are_encoded():
    for cargo in (b"fish", bytearray(b"fish"), memoryview(b"fish")):
        encoded = Harbour(cargo=cargo).encode(3)
        frame = bytearray(encoded)
        decoded = Harbour.decode(frame, 3)
        assert isinstance(decoded.cargo, memoryview)
        assert bytes(decoded.cargo) == b"fish"
        decoded.cargo[0] = ord("d")
        assert b"dish" in frame


def test_unknown_tagged_fields_are_skipped_wherever_they_stand():
    tagged = Harbour(light=8, tide=Tide(height=1)).encode(3)
    section = bytes.fromhex("02 00 04 00000008 01 0b 0001 ffffffffffffffff 00")
    assert tagged.endswith(section)
    unknown = bytes.fromhex("04 00 04 00000008 01 0e 0001 ffffffffffffffff 01 05 01 ff 05 00 ac02 03 616263")
    decoded = Harbour.decode(tagged[: -len(section)] + unknown, 3)
    assert decoded == Harbour(light=8, tide=Tide(height=1))
    nested = Berth.decode(bytes.fromhex("02 61 00000001 01 07 02 ffff"), 2)
    assert nested == Berth(name="a", depth=1)


def test_a_known_tagged_field_must_be_of_the_size_it_claims():
    good = Harbour(light=8).encode(2)
    section = bytes.fromhex("01 00 04 00000008")
    assert good.endswith(section)
    for bad in ("01 00 05 00000008 00", "01 00 03 00000008", "01 00 04 000000", "02 00 04 00000008"):
        with pytest.raises(MalformedMessage):
            Harbour.decode(good[: -len(section)] + bytes.fromhex(bad), 2)


def test_a_nullable_struct_has_a_presence_byte():
    absent, present = Harbour().encode(4), Harbour(pilot=Berth(name="p", depth=1)).encode(4)
    assert absent == Harbour().encode(3)[:-1] + b"\xff\0"
    assert present == Harbour().encode(3)[:-1] + bytes.fromhex("01 02 70 00000001 00 00")


@pytest.mark.parametrize("count", ["7fffffff", "40000000", "00010000"])
def test_a_count_of_elements_is_checked_before_anything_is_allocated(count: str):
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage, match="elements"):
            Harbour.decode(b"\1\0\1A" + bytes.fromhex(count) + bytes(50), 0)
        flexible = b"\1\2A" + bytes(16) + b"\1"
        for many in (b"\xff\xff\xff\xff\x0f", b"\xff\xff\xff\x07"):
            with pytest.raises(MalformedMessage, match="elements"):
                Harbour.decode(flexible + many + bytes(50), 2)
            with pytest.raises(MalformedMessage, match="elements"):
                Harbour.decode(flexible + b"\1" + many + bytes(50), 2)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "data",
    [
        "",
        "01",
        "01 0003 4142",  # a string that ends early
        "01 0002 c328 00000000",  # not UTF-8
        "01 8000 00000000",  # a negative length that is not even null in this version
        "01 0001 41 ffffffff",  # a null array
        "01 0001 41 00000001 0001 78 000000",  # an element that ends early
        "01 0001 41 00000000 00",  # a byte too many
    ],
)
def test_malformed_bytes(data: str):
    with pytest.raises(MalformedMessage):
        Harbour.decode(bytes.fromhex(data), 0)


def test_reading_stops_where_the_message_ends_and_never_beyond_the_buffer():
    data = b"##" + Tide(height=1, at=2).encode(0) + b"rest"
    assert Tide.read(data, 2, 0) == (Tide(height=1, at=2), len(data) - 4)
    with pytest.raises(MalformedMessage):
        Harbour.read(b"\1\0\5ab", 0, 0)


def test_neighbours_of_fixed_width_are_read_and_written_by_one_struct():
    source = DecoderSource(Tide, 0, views=False).source
    assert source.count("unpack") == 1
    assert EncoderSource(Tide, 2).source.count("pack1(") == 1
    # two runs in version 1: (open, length of name), then (id, count of berths)
    assert DecoderSource(Harbour, 1, views=False).source.count(" = unpack") == 3 + 1


def test_the_least_size_bounds_the_count_of_an_array():
    assert minimum_size(Berth, 0) == 2 + 4
    assert minimum_size(Berth, 2) == 1 + 4 + 1
    assert minimum_size(Harbour, 4) == len(Harbour(name="").encode(4))


def test_a_struct_shared_by_messages_that_differ_in_flexibility_is_our_own_bug():
    with pytest.raises(AssertionError, match="Berth"):

        class Marina(Message, versions="0-1", flexible="1+"):
            berths: list[Berth] = array(Berth)


def test_a_request_names_no_more_than_can_be_served_while_others_wait():
    most = REQUEST_BUDGET // ELEMENT_COST
    for count in (most, most + 1):
        body = bytearray()
        write_uvarint(body, count + 1)
        body += b"\1\0" * count + bytes(4)
        if count == most:
            assert len(MetadataRequest.decode(bytes(body), 9).topics or ()) == most
            continue
        with pytest.raises(MalformedMessage, match="elements"):
            MetadataRequest.decode(bytes(body), 9)
    assert f"left = {BUDGET}\n" in DecoderSource(MetadataResponse, 9, views=False).source


def test_an_array_in_an_answer_holds_no_more_than_a_million_elements_however_small():
    for count in (ELEMENTS_MAX, ELEMENTS_MAX + 1):
        body = bytearray()
        write_uvarint(body, count + 1)
        body += bytes(4 * count)
        if count == ELEMENTS_MAX:
            assert len(Numbers.decode(bytes(body + b"\0"), 0).numbers) == count
            continue
        with pytest.raises(MalformedMessage, match="elements"):
            Numbers.decode(bytes(body + b"\0"), 0)


def test_a_message_holds_so_many_tagged_fields():
    most = TAGGED_FIELDS_MAX
    for count in (most, most + 1):
        body = bytearray(b"\0\1\0\0")  # all topics
        write_uvarint(body, count)
        body += b"\7\0" * count
        if count == most:
            MetadataRequest.decode(bytes(body), 9)
            continue
        with pytest.raises(MalformedMessage, match="elements"):
            MetadataRequest.decode(bytes(body), 9)


@pytest.mark.parametrize("version", [5, 9])  # 9 is flexible
def test_a_string_in_a_request_has_at_most_32767_bytes(version: int) -> None:
    """A JoinGroup with a group id of 50 MB was decoded, answered and logged: Kafka closes the connection."""
    longest = JoinGroupRequest(group_id="ä" + "g" * 32_765)
    data = longest.encode(version)
    assert JoinGroupRequest.decode(data, version) == longest
    with pytest.raises(ValueError, match="cannot be encoded"):
        JoinGroupRequest(group_id="ä" + "g" * 32_766).encode(version)


def test_a_longer_string_in_a_request_is_not_decoded() -> None:
    body = bytearray(b"\0")
    write_uvarint(body, 32_769)
    with pytest.raises(MalformedMessage, match="a string of 32768 bytes"):
        MetadataRequest.decode(bytes(b"\x02" + bytes(16) + body[1:] + b"x" * 32_768 + bytes(4)), 12)


def test_a_string_in_an_answer_may_be_longer() -> None:
    """The message of an error may repeat the name that it is about."""
    answer = JoinGroupResponse(protocol_name="p" * 40_000)
    assert JoinGroupResponse.decode(answer.encode(9), 9) == answer


def test_a_section_claims_no_more_tagged_fields_than_there_are_bytes_for():
    body = bytearray(b"\0\1\0\0")
    write_uvarint(body, TAGGED_FIELDS_MAX)
    with pytest.raises(MalformedMessage, match="elements"):
        MetadataRequest.decode(bytes(body + bytes(2 * TAGGED_FIELDS_MAX - 1)), 9)
