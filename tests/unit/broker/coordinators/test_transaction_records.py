"""The records of `__transaction_state`, to the byte as Kafka 4.3.1's own class `TransactionLog` writes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.coordinators.transaction.records import TransactionRecord, decode, encode, value_by_declaration
from tidelog.broker.coordinators.transaction.states import STATE_NAMES, STATES_BY_NAME, TransactionState
from tidelog.broker.coordinators.transaction.transitions import TransactionMetadata
from tidelog.protocol.errors import MalformedMessage

KEY = "0000000474782d31"
EMPTY = TransactionMetadata(
    9, 60_000, 5, producer_epoch=1, previous_producer_id=9, start_ms=-1, state=TransactionState.EMPTY, client_version=2
)
ONGOING = EMPTY._replace(state=TransactionState.ONGOING, partitions=frozenset({("t", 3)}), start_ms=4)
ABORTING = ONGOING._replace(state=TransactionState.PREPARE_ABORT, producer_epoch=32_767, next_producer_id=1_009)
V0: dict[str, Any] = {"previous_producer_id": -1, "next_producer_id": -1, "client_version": 0}

# (metadata, transaction version, Kafka's bytes of the value)
BY_KAFKA = [
    (EMPTY, 0, "0000000000000000000900010000ea6000ffffffff0000000000000005ffffffffffffffff"),
    (ONGOING, 0, "0000000000000000000900010000ea600100000001000174000000010000000300000000000000050000000000000004"),
    (ABORTING, 0, "000000000000000000097fff0000ea600300000001000174000000010000000300000000000000050000000000000004"),
    (EMPTY, 1, "0001000000000000000900010000ea6000000000000000000005ffffffffffffffff020008000000000000000902020002"),
    (
        ONGOING, 2,
        "0001000000000000000900010000ea600102027402000000030000000000000000050000000000000004020008000000000000000902020002",
    ),
    (
        ABORTING, 2,
        "000100000000000000097fff0000ea600302027402000000030000000000000000050000000000000004"
        "0300080000000000000009010800000000000003f102020002",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("metadata", "version", "value"), BY_KAFKA)
def test_a_record_has_kafkas_bytes(metadata: TransactionMetadata, version: int, value: str):
    key_bytes, value_bytes = encode(TransactionRecord("tx-1", metadata), version)
    assert value_bytes is not None
    assert (key_bytes.hex(), value_bytes.hex()) == (KEY, value)
    held = metadata if version else metadata._replace(**V0)
    assert decode(key_bytes, value_bytes) == TransactionRecord("tx-1", held)


def test_the_page_about_the_format_is_true():
    page = (Path(__file__).parents[4] / "docs/formats/transaction_state.md").read_text()
    blocks = re.findall(r"```(key|value)\n(.*?)```", page, re.DOTALL)
    (_, key), (_, value) = [
        (kind, bytes.fromhex("".join(line.split("   ")[0] for line in text.splitlines()))) for kind, text in blocks
    ]
    assert decode(key, value) == TransactionRecord("tx-1", ABORTING)
    assert encode(TransactionRecord("tx-1", ABORTING), 2) == (key, value)


def test_a_tombstone_deletes_an_id():
    key, value = encode(TransactionRecord("tx-1", None), 2)
    assert (key.hex(), value) == (KEY, None)
    assert decode(key, None) == TransactionRecord("tx-1", None)


def test_a_later_value_version_is_read_as_ours_and_an_unknown_kind_passed_over():
    key, value = encode(TransactionRecord("tx-1", ONGOING), 2)
    assert value is not None
    assert decode(key, b"\0\7" + value[2:]) == TransactionRecord("tx-1", ONGOING)
    assert decode(b"\0\1" + key[2:], value) is None


@pytest.mark.parametrize("value", [b"", b"\0", b"\0\1\0", bytes.fromhex(BY_KAFKA[3][2])[:-1]])
def test_a_malformed_value_is_refused(value: bytes):
    with pytest.raises(MalformedMessage):
        decode(bytes.fromhex(KEY), value)


def test_an_unknown_state_is_refused():
    _, value = encode(TransactionRecord("tx-1", EMPTY), 0)
    assert value is not None
    with pytest.raises(MalformedMessage, match="unknown transaction status 9"):
        decode(bytes.fromhex(KEY), value[:16] + b"\x09" + value[17:])


def test_every_state_has_kafkas_name_and_number():
    assert [STATE_NAMES[TransactionState(number)] for number in range(8)] == [
        "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort", "Dead",
        "PrepareEpochFence",
    ]  # fmt: skip
    assert STATES_BY_NAME["CompleteAbort"] is TransactionState.COMPLETE_ABORT


int64s = st.integers(-(2**63), 2**63 - 1)


@given(
    st.builds(
        TransactionMetadata,
        producer_id=int64s, timeout_ms=st.integers(0, 2**31 - 1), update_ms=int64s,
        state=st.sampled_from(list(TransactionState)[1:6]), producer_epoch=st.integers(-1, 32_767),
        last_producer_epoch=st.just(-1),
        previous_producer_id=int64s, next_producer_id=int64s, start_ms=int64s, client_version=st.integers(0, 2),
        partitions=st.frozensets(st.tuples(st.sampled_from("ab"), st.integers(0, 2**31 - 1)), max_size=4),
    ),
    st.sampled_from([1, 2]),
)  # fmt: skip
def test_a_record_comes_back_as_it_was(metadata: TransactionMetadata, version: int):
    key, value = encode(TransactionRecord("id", metadata), version)
    assert decode(key, value) == TransactionRecord("id", metadata)
    assert value == value_by_declaration(metadata, version)
