"""Record batches of Arrow tables for the producer: checks, partitions, bytes.

`columnar_input.py` reads the columns, `column_partitions.py` chooses, `columnar_encoder.py` writes.
Here: the producer's limits and options, applied to whole columns. No I/O and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.client.assignment.column_partitions import RECORD_OVERHEAD_BYTES, hash_keys, spread_unkeyed
from tidelog.client.assignment.partitioner import UnkeyedPartitioner, choose_custom
from tidelog.client.config import DEFAULT_BATCH_SIZE, ProducerConfig
from tidelog.protocol.batches.columnar_encoder import ColumnEncoder, EncodedBatch
from tidelog.protocol.batches.columnar_input import Rows, iter_rows
from tidelog.protocol.errors import ErrorCode, KafkaError

if TYPE_CHECKING:
    import pyarrow as pa

_PIECE_BYTES_MIN = 1024 * 1024
_PIECE_BYTES_MAX = 4 * 1024 * 1024
"""The partitions of a piece's rows are chosen at once."""
_BATCHES_PER_PARTITION = 8
_BATCH_BYTES = 500 * 1024
"""Where `batch_size` is not set. The rows of a table are all there: to wait for small batches would save neither time
nor memory. Two such batches fit into a request of the default `max_request_size`, and one into the default
`max.message.bytes` of a topic.
"""
_BATCH_BYTES_ZSTD = 128 * 1024
"""At its default level zstd takes 1.5 times the time for larger inputs, and saves little with them."""
_BATCH_BYTES_MIN = 128 * 1024
_loaded_batch_bytes: set[int] = set()
"""The sizes of batches for which this process has loaded the loops. They stay: a later producer need not wait again."""


class TableSummary(NamedTuple):
    """What a producer must know of a table before it sends the first row."""

    row_count: int
    partition_max: int
    """The largest partition in the column `partition`, -1 without one."""


class ArrowBatches:
    """Makes batches of tables for one producer."""

    def __init__(self, config: ProducerConfig) -> None:
        self._config = config
        self._batch_bytes = min(_batch_bytes(config), config.max_request_size)
        self._encoder = ColumnEncoder(self._batch_bytes)
        self._custom_partitioner = None if isinstance(config.partitioner, str) else config.partitioner
        self._hashes_keys = config.partitioner == "default" and not config.partitioner_ignore_keys

    def load_kernel(self) -> None:
        """Import and compile what `check` and `encode` use: seconds at the first time. May run on a thread of its own.

        Raises ImportError without pyarrow or numpy, and what a numba that does not work raises. Returns at once where
        a producer with batches of the same size has loaded them in this process.
        """
        if self._batch_bytes in _loaded_batch_bytes:
            return
        import numpy as np
        import pyarrow as pa

        header_type = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        columns = {
            "key": pa.array([b"k", None]),
            "value": pa.array([b"v", None]),
            "headers": pa.array([[{"key": "h", "value": b"v"}], None], header_type),
        }
        whole = pa.table(columns)
        # numba compiles a loop for each kind of array that it meets.
        for table in (whole, whole.slice(0, 1), whole.select(["value"])):
            self.check(table)
            for rows in iter_rows(table, _PIECE_BYTES_MAX):
                partitions = np.zeros(rows.row_count, np.int64)
                hash_keys(rows.keys, 1, partitions)
                for batch_bytes in (1, self._batch_bytes):
                    for _ in ColumnEncoder(batch_bytes).encode(rows, partitions):
                        pass
        _loaded_batch_bytes.add(self._batch_bytes)

    def check(self, table: pa.Table | pa.RecordBatch) -> TableSummary:
        """Check every row. Raises TypeError and ValueError for wrong columns, KafkaError(MESSAGE_TOO_LARGE),
        ImportError without pyarrow or numpy."""
        try:
            import numpy  # noqa: F401
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise ImportError("send_arrow() needs pyarrow and numpy: pip install 'tidelog[arrow]'") from error
        limit = self._config.max_request_size
        row_count = 0
        partition_max = -1
        for rows in iter_rows(table, _PIECE_BYTES_MAX):
            row_count += rows.row_count
            partition_max = max(partition_max, int(rows.partitions.max()))
            size = int(rows.payload_sizes.max())
            if size > limit:
                raise KafkaError(ErrorCode.MESSAGE_TOO_LARGE, f"a record of {size} bytes, max_request_size is {limit}")
        return TableSummary(row_count, partition_max)

    def pieces(self, table: pa.Table | pa.RecordBatch, partition_count: int) -> Iterator[Rows]:
        """The rows in pieces that fill several batches of each partition and a part of the memory."""
        config = self._config
        piece_bytes = max(_PIECE_BYTES_MIN, _BATCHES_PER_PARTITION * self._batch_bytes * partition_count)
        return iter_rows(table, min(piece_bytes, _PIECE_BYTES_MAX, max(1, config.buffer_memory // 2)))

    def encode(
        self,
        rows: Rows,
        topic: str,
        partition_count: int,
        available_partitions: Sequence[int],
        unkeyed_partitioner: UnkeyedPartitioner,
        now_ms: int,
    ) -> Iterator[EncodedBatch]:
        """The batches of a piece, whose partitions are chosen now. Rows without a timestamp get `now_ms`."""
        import numpy as np

        partitions = rows.partitions.copy()
        if self._custom_partitioner is not None:
            self._partition_by_function(rows, topic, partition_count, partitions)
        else:
            if self._hashes_keys:
                is_chosen = partitions >= 0
                hash_keys(rows.keys, partition_count, partitions)
                partitions[is_chosen] = rows.partitions[is_chosen]
            unkeyed = np.flatnonzero(partitions < 0)
            sizes = np.maximum(rows.keys.sizes, 0) + np.maximum(rows.values.sizes, 0) + RECORD_OVERHEAD_BYTES
            spread_unkeyed(
                unkeyed_partitioner, available_partitions, sizes[unkeyed], unkeyed, partitions, self._batch_bytes
            )
        timestamps = np.where(rows.timestamps < 0, np.int64(now_ms), rows.timestamps)
        return self._encoder.encode(rows._replace(timestamps=timestamps), partitions)

    def _partition_by_function(self, rows: Rows, topic: str, partition_count: int, partitions: Any) -> None:
        """Call the user's partitioner, which takes Python objects, for each row without a partition."""
        import numpy as np

        assert self._custom_partitioner is not None
        for row in np.flatnonzero(partitions < 0).tolist():
            key, value = (
                None if column.sizes[row] < 0 else bytes(column.data[column.starts[row] :][: column.sizes[row]])
                for column in (rows.keys, rows.values)
            )
            partitions[row] = choose_custom(self._custom_partitioner, topic, key, value, partition_count)


def _batch_bytes(config: ProducerConfig) -> int:
    if config.batch_size != DEFAULT_BATCH_SIZE:
        return max(config.batch_size, _BATCH_BYTES_MIN)
    return _BATCH_BYTES_ZSTD if config.compression_type == "zstd" else _BATCH_BYTES
