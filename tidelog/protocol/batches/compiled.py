"""Compiles loops with numba, and keeps the result on disk for later processes.

numba gives its files their names before their bytes are on the device. So after a loss of power parts of a file of the
cache may be empty, and numba would fail on it in every later process, or run what is left of the machine code. Two
processes that compile at once, as on two machines with one directory, may also give two entries the same file. So each
entry holds its key and a digest. Invariant: no state of the cache makes a loop fail, or runs code that is not its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

Function = TypeVar("Function", bound=Callable[..., Any])


class _CheckedFile:
    """The files of a cache, whose entries are refused where they are not whole or belong to another key."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def flush(self) -> None:
        self._file.flush()

    def save(self, key: Any, data: Any) -> None:
        entry = dumps((key, data))
        self._file.save(key, (hashlib.sha256(entry).digest(), entry))

    def load(self, key: Any) -> Any:
        stored = self._file.load(key)
        if stored is None:
            return None
        digest, entry = stored
        if hashlib.sha256(entry).digest() != digest:
            raise ValueError("the entry is damaged")
        owner, data = pickle.loads(entry)  # noqa: S301 - as numba itself does with the whole file
        if owner != key:
            raise ValueError("the entry is that of another loop or another kind of machine")
        return data


class _Cache(FunctionCache):
    """A cache that is made anew where it cannot be read, and left as it is where it cannot be written."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        file: Any = _CheckedFile(self._cache_file)
        self._cache_file = file

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            with contextlib.suppress(Exception):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):  # as where the device is full
            super().save_overload(sig, data)


def compiled(function: Function, *, nogil: bool = False) -> Function:
    """Compile on first use and cache on disk for later processes where a directory is writable."""
    dispatcher: Any = njit(nogil=nogil)(function)
    with contextlib.suppress(RuntimeError):  # neither the package's directory nor the user's cache is writable
        dispatcher._cache = _Cache(function)
    return cast(Function, dispatcher)
