"""Which key table a cleaning gets: the compiled one where numba is there and the log worth it, else the plain one."""

from __future__ import annotations

import logging
from typing import Final

from tidelog.storage.cleaner.keys import KeyTable, PlainKeyTable

logger = logging.getLogger("tidelog.storage")

COMPILED_FROM_BYTES: Final = 16 * 1024 * 1024
"""Below that much to read the plain table is done before numba is loaded (a second, and 100 MB of memory)."""


def key_table(memory_bytes: int, load_factor: float, dirty_bytes: int, secret: bytes) -> KeyTable:
    """Of a cleaning that has so much to read. On a thread: it takes a second when numba is loaded, or compiles."""
    if dirty_bytes >= COMPILED_FROM_BYTES:
        try:
            from tidelog.storage.cleaner.kernel import CompiledKeyTable
        except ImportError:
            logger.debug("numba is not installed")
        else:
            return CompiledKeyTable(memory_bytes, load_factor, secret)
    return PlainKeyTable(memory_bytes, load_factor)
