"""Our own client inside a simulation: its clock and its chance are those of the host it runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from tidelog.client.network import cluster
from tidelog.client.producing import producer, record_appender


class _Clock:
    """In the place of the `time` module."""

    @staticmethod
    def time() -> float:
        return _host().clock_ms() / 1000

    @staticmethod
    def time_ns() -> int:
        return int(_host().clock_ms()) * 1_000_000


class _Chance:
    """In the place of the `random` module."""

    @staticmethod
    def Random() -> Random:
        return Random(_host().rng.getrandbits(64))


def _host() -> Any:
    return asyncio.get_running_loop().host  # type: ignore[attr-defined]


@contextmanager
def simulated_client() -> Iterator[None]:
    """While it lasts, clients take time and chance from the simulated loop they run on."""
    places: list[tuple[Any, str, Any]] = [
        (producer, "time", _Clock), (record_appender, "time", _Clock),
        (producer, "random", _Chance), (cluster, "random", _Chance),
    ]  # fmt: skip
    kept = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, replacement in places:
        setattr(module, name, replacement)
    try:
        yield
    finally:
        for module, name, original in kept:
            setattr(module, name, original)
