"""Records and Arrow columns, taken from one fetched partition in any alternation, are each record once, in order."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.test_records_columnar import batch, encoded
from tidelog.client.consuming.completed_fetch import CompletedFetch
from tidelog.client.model import TopicPartition
from tidelog.protocol.batches import columnar
from tidelog.protocol.batches.columnar import COLUMNS
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import KafkaError

pytest.importorskip("pyarrow")

PARTITION = TopicPartition("t", 3)
# A number takes that many records, None a piece of columns.
steps = st.lists(st.none() | st.integers(1, 40), max_size=60)


def drain(fetch: CompletedFetch, plan: list[int | None]) -> list[tuple[Any, ...]]:
    """(offset, key, value) of all records, taken as planned and the rest as columns; an error ends it."""
    rows: list[tuple[Any, ...]] = []
    positions = [fetch.position]
    try:
        for step in [*plan, *[None] * 1000]:
            if fetch.exhausted:
                break
            if step is None:
                piece = fetch.take_columns(COLUMNS)
                if piece is not None:
                    columns = [piece[name].to_pylist() for name in ("offset", "key", "value")]
                    rows += zip(*columns)
            else:
                rows += [(record.offset, record.key, record.value) for record in fetch.take(step)]
            positions.append(fetch.position)
            assert not rows or fetch.position > rows[-1][0]
    except KafkaError:
        rows.append(("error",))
    assert positions == sorted(positions)
    return rows


@pytest.mark.slow
@given(st.lists(batch, min_size=1, max_size=5), st.integers(0, 40), steps)
def test_any_alternation_is_every_record_once(batches, first, plan):
    original = columnar.PIECE_ROWS, columnar.PIECE_BYTES
    columnar.PIECE_ROWS, columnar.PIECE_BYTES = 7, 400  # type: ignore[misc]
    try:
        buffer = encoded(batches)
        expected = [(row.offset, row.key, row.value) for row in iter_records(buffer) if row.offset >= first]
        try:
            fetch = CompletedFetch(PARTITION, first, buffer)
        except KafkaError:  # the first batch lies before the offset
            return
        assert drain(fetch, plan) == expected
        assert fetch.position == fetch.end_offset
        assert fetch.leader_epoch == fetch.end_epoch
    finally:
        columnar.PIECE_ROWS, columnar.PIECE_BYTES = original  # type: ignore[misc]


@pytest.mark.slow
@given(st.lists(batch, min_size=1, max_size=5), st.data(), steps, st.booleans())
def test_a_damaged_byte_costs_columns_no_record_that_polls_hand_out(batches, data, plan, check_crcs):
    buffer = bytearray(encoded(batches))
    place = data.draw(st.integers(17, len(buffer) - 1))
    buffer[place] ^= data.draw(st.integers(1, 255))
    try:
        records, columns = (CompletedFetch(PARTITION, 0, bytes(buffer), check_crcs=check_crcs) for _ in range(2))
    except KafkaError:
        return
    found = drain(columns, plan)
    # Without the check of CRCs what a damaged record says may count or not, as long as the position only advances.
    if check_crcs:
        assert found == drain(records, [1000] * 20)
