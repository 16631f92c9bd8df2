"""Blocking versions of the clients: the asynchronous clients on an event loop in a thread.

The public names are imported on first use, as in `tidelog.client`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog.client.sync.admin import Admin
    from tidelog.client.sync.consumer import Consumer, RawReader
    from tidelog.client.sync.producer import Producer

_HOMES = {"Admin": "admin", "Consumer": "consumer", "Producer": "producer", "RawReader": "consumer"}

__all__ = ["Admin", "Consumer", "Producer", "RawReader"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidelog.client.sync' has no attribute {name!r}")
    value = getattr(import_module(f"tidelog.client.sync.{home}"), name)
    globals()[name] = value
    return value
