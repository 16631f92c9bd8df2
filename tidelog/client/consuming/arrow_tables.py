"""What `poll_arrow` needs of pyarrow: the schema of its tables, and a table of the record batches of a poll."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from tidelog.client.arguments import shown
from tidelog.client.network.kernel_loading import run_in_own_thread
from tidelog.protocol.batches.columnar import COLUMNS, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa


def check_columns(columns: tuple[str, ...]) -> None:
    if unknown := [name for name in columns if name not in COLUMNS]:
        raise ValueError(f"columns: there is no column {shown(unknown[0])}; the columns are {', '.join(COLUMNS)}")
    if len(set(columns)) < len(columns):
        raise ValueError(f"a column is named twice: {', '.join(columns)}")


async def load_schema(columns: tuple[str, ...], *, is_loaded: bool) -> pa.Schema:
    """The import of pyarrow takes a quarter of a second: a thread does it, and the event loop goes on."""
    try:
        if not is_loaded:
            await run_in_own_thread(partial(importlib.import_module, "pyarrow"))
        return arrow_schema(columns)
    except ImportError as error:
        raise ImportError("poll_arrow() needs pyarrow and numpy: pip install 'tidelog[arrow]'") from error


def arrow_table(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_batches(batches, schema)
