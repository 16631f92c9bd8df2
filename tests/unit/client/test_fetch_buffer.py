"""Errors of some partitions among the records of others."""

from __future__ import annotations

import pytest

from tests.unit.client.test_consumer import T0, T1
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.consuming.fetch_buffer import FetchBuffer
from tidelog.client.consuming.subscription import Subscription
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError


def batch(base_offset: int) -> bytes:
    return bytes(encode_batch([(1, None, b"value", ())], base_offset=base_offset))


def test_a_deserializer_that_refuses_a_record_gets_it_once_in_a_call() -> None:
    """It may have waited for a schema registry that is away."""
    subscription = Subscription()
    subscription.assign([T0, T1])
    subscription.seek(T0, 0)
    subscription.seek(T1, 0)
    buffer, refused = FetchBuffer(subscription, lambda _: None), list[bytes]()

    def refuse(value: bytes) -> bytes:
        refused.append(value)
        raise ConnectionError

    buffer.add(CompletedFetch(T0, 0, batch(0), value_deserializer=refuse))
    for offset in range(4):
        buffer.add(CompletedFetch(T1, offset, batch(offset)))
    assert [record.offset for record in buffer.take(10)[T1]] == [0, 1, 2, 3]
    assert len(refused) == 1
    with pytest.raises(ConnectionError):
        buffer.take(10)
    assert len(refused) == 2


@pytest.mark.parametrize("takes_columns", [False, True])
@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_error_is_raised_in_the_call_after_one_that_has_returned_records_in_its_place(takes_columns, is_damaged):
    if takes_columns:
        pytest.importorskip("pyarrow")
    subscription = Subscription()
    subscription.assign([T0, T1])
    subscription.seek(T0, 0)
    subscription.seek(T1, 0)
    buffer = FetchBuffer(subscription, lambda _: None)
    if is_damaged:
        buffer.add(CompletedFetch(T0, 0, batch(0)[:-1] + b"?"))
    else:
        buffer.errors[T0] = KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
    for offset in range(4):
        buffer.add(CompletedFetch(T1, offset, batch(offset)))

    def take() -> object:
        return buffer.take_columns(["offset"], 1, 1000) if takes_columns else buffer.take(1)

    assert take()
    with pytest.raises(KafkaError, match="CORRUPT" if is_damaged else "RANGE"):
        take()
    for _ in range(3):
        assert take()
    assert not take()
