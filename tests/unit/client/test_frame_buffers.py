"""Memory of large responses is used again, and never while bytes of an earlier response are referred to."""

from __future__ import annotations

import gc

import pytest

from tidelog.client.network.frame_buffers import FrameBuffers

MIB = 1024 * 1024


def test_a_buffer_is_used_again_once_no_view_of_it_is_left() -> None:
    buffers = FrameBuffers()
    first = buffers.take(MIB)
    memory = id(first.obj)
    records = first[10:20]
    del first
    assert id(buffers.take(MIB).obj) != memory  # `records` is a view of it
    del records
    again = buffers.take(MIB - 100_000)
    assert id(again.obj) == memory
    assert len(again) == MIB - 100_000


def test_an_array_of_the_bytes_keeps_its_buffer() -> None:
    numpy = pytest.importorskip("numpy")
    buffers = FrameBuffers()
    array = numpy.frombuffer(buffers.take(MIB), numpy.uint8)
    memory = id(array.base.obj if isinstance(array.base, memoryview) else array.base)
    taken = [buffers.take(MIB) for _ in range(3)]
    assert memory not in [id(view.obj) for view in taken]
    assert len(array) == MIB


def test_few_buffers_of_a_bounded_size_are_kept() -> None:
    buffers = FrameBuffers()
    taken = [buffers.take(size) for size in (MIB, 2 * MIB, 3 * MIB, 4 * MIB, 50 * MIB)]
    assert [len(view) for view in taken] == [MIB, 2 * MIB, 3 * MIB, 4 * MIB, 50 * MIB]
    assert [len(buffer) for buffer in buffers._spare_buffers] == [2 * MIB, 3 * MIB, 4 * MIB]


@pytest.mark.slow
def test_columns_that_are_read_to_the_end_leave_no_view() -> None:
    pytest.importorskip("pyarrow")
    from tidelog.client.consuming.completed_fetch import CompletedFetch
    from tidelog.client.model import TopicPartition
    from tidelog.protocol.batches.columnar import COLUMNS
    from tidelog.protocol.batches.records import encode_batch

    batch = encode_batch([(1, None, b"v" * 100, ()) for _ in range(50)])
    gc.disable()
    try:
        fetch = CompletedFetch(TopicPartition("t", 0), 0, memoryview(batch))
        piece = fetch.take_columns(COLUMNS)
        assert piece is not None
        assert piece.num_rows == 50
        assert fetch.exhausted
        batch.append(0)  # raises BufferError while there is a view
    finally:
        gc.enable()
