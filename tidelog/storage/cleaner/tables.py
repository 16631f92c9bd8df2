"""Chooses the key table of a cleaning: the compiled one for a large log if numba is installed, otherwise the plain."""

from __future__ import annotations

import logging
from typing import Final

from tidelog.storage.cleaner.keys import KeyTable, PlainKeyTable

logger = logging.getLogger("tidelog.storage")

COMPILED_FROM_BYTES: Final = 16 * 1024 * 1024
"""For fewer bytes the plain table is faster than loading numba, which costs a second and 100 MB of memory."""


def key_table(memory_bytes: int, load_factor: float, dirty_bytes: int, secret: bytes) -> KeyTable:
    """The key table for `dirty_bytes`. Call it on a thread, because loading numba or compiling takes a second."""
    if dirty_bytes >= COMPILED_FROM_BYTES:
        try:
            from tidelog.storage.cleaner.kernel import CompiledKeyTable
        except ImportError:
            logger.debug("numba is not installed")
        else:
            return CompiledKeyTable(memory_bytes, load_factor, secret)
    return PlainKeyTable(memory_bytes, load_factor)
