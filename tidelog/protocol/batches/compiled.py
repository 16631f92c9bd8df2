"""Compiles loops with numba, and keeps the result on disk for later processes.

numba gives its files their names before their bytes are on the device. So after a loss of power a file of the cache may
be empty, and numba would fail on it in every later process. Invariant: no state of the cache makes a loop fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache

Function = TypeVar("Function", bound=Callable[..., Any])


class _Cache(FunctionCache):
    """A cache that is made anew where it cannot be read, and left as it is where it cannot be written."""

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
