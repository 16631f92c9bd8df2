"""What `tidelog consume --json` writes is read back as the same record, whatever is in it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.cli.record_format import FORMATS, as_json, decode, encode, from_json
from tidelog.client import ConsumerRecord

texts = st.text(st.characters(codec="utf-8"), max_size=20)
payloads = st.one_of(st.none(), st.binary(max_size=40), texts.map(str.encode))
records = st.builds(
    ConsumerRecord,
    topic=texts,
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**63 - 1),
    timestamp_ms=st.integers(-1, 2**63 - 1),
    timestamp_type=st.just(0),
    key=payloads,
    value=payloads,
    headers=st.lists(st.tuples(texts, payloads), max_size=3).map(tuple),
    leader_epoch=st.just(0),
)
exact = st.sampled_from([form for form in FORMATS if form != "json"])


@given(records, exact, exact)
def test_a_record_comes_back(record: ConsumerRecord, key_form: str, value_form: str):
    line = as_json(record, key_form, value_form)
    assert line.count(b"\n") == 1
    parsed = from_json(line)
    assert (parsed.topic, parsed.partition, parsed.key, parsed.value) == record[:2] + record[5:7]
    assert parsed.timestamp_ms == (None if record.timestamp_ms == -1 else record.timestamp_ms)
    assert tuple(parsed.headers) == record.headers


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | texts, lambda inner: st.lists(inner) | st.dictionaries(texts, inner)
    )
)
def test_json_means_the_same(value: object):
    written = json.dumps(value, indent=1).encode()
    record = ConsumerRecord("t", 0, 0, 0, 0, written, written, (), 0)
    line = as_json(record, "json", "json")
    assert json.loads(line)["value_json"] == value
    parsed = from_json(line)
    assert parsed.key is not None
    assert json.loads(parsed.key) == value


@given(st.binary(max_size=60), exact)
def test_bytes_of_any_form_come_back(data: bytes, form: str):
    assert decode(encode(data, form), form) == data


@given(st.binary(max_size=60))
def test_any_line_is_a_record_or_a_value_error(line: bytes):
    problem = ""
    try:
        from_json(line)
    except ValueError as error:
        problem = str(error)
    assert "\n" not in problem


@pytest.mark.parametrize("text", [b"[" * 100_000, b"1" * 5000, b"NaN", b"1e999", b"\xff", b"", b'"\\ud800"'])
def test_what_is_no_json_of_ours_is_shown_as_it_is(text: bytes):
    record = ConsumerRecord("t", 0, 0, 0, 0, None, text, (), 0)
    assert from_json(as_json(record, "text", "json")).value == text
