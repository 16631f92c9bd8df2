"""The rows of a task that the driver writes: from the task to the driver in the task's commit message.

Rows travel as Arrow's IPC stream, which names its schema and is read without running anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tidelog.protocol.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa


class HeldRows(NamedTuple):
    """The rows of one task. Nothing of them is written yet."""

    content: bytes
    """An IPC stream; empty for a task without rows."""
    size_bytes: int
    """The size of the rows in memory."""


def hold_rows(batches: Iterable[pa.RecordBatch], max_bytes: int) -> HeldRows:
    """Take the rows of a task. Raises ConfigError when they are larger than `max_bytes`."""
    import pyarrow as pa

    held: list[pa.RecordBatch] = []
    size_bytes = 0
    for batch in batches:
        if batch.num_rows:
            size_bytes += batch.nbytes
            _check_size(size_bytes, max_bytes)
            held.append(batch)
    if not held:
        return HeldRows(b"", 0)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, held[0].schema) as stream:
        for batch in held:
            stream.write_batch(batch)
    return HeldRows(sink.getvalue().to_pybytes(), size_bytes)


def release_rows(tasks: Sequence[HeldRows], max_bytes: int) -> Iterator[pa.RecordBatch]:
    """The rows of all tasks in their order. Raises ConfigError when they are larger than `max_bytes`."""
    import pyarrow as pa

    _check_size(sum(task.size_bytes for task in tasks), max_bytes)
    return (batch for task in tasks if task.content for batch in pa.ipc.open_stream(task.content))


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise ConfigError(
            f"atomic=true takes {max_bytes} bytes of rows to the driver at most, and there are {size_bytes} or more. "
            "Raise maxAtomicBytes, read less in a micro-batch (maxOffsetsPerTrigger), or leave atomic out"
        )
