"""Real brokers for tests: on a thread of the test process, as processes of their own, and clusters of them.

Users' tests, Tidelog's tests and `bench/` use this package. `pytest_plugin.py` has fixtures; all else
needs no test framework. Each name below is imported on its first use, because pytest loads the plugin
in every run of a user who has installed Tidelog.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidelog.testing.cluster import EmbeddedCluster
    from tidelog.testing.container import TidelogContainer
    from tidelog.testing.embedded import EmbeddedBroker
    from tidelog.testing.expectations import produced, wait_for_lag, wait_for_topic

__all__ = ["EmbeddedBroker", "EmbeddedCluster", "TidelogContainer", "produced", "wait_for_lag", "wait_for_topic"]

_HOMES = {
    "EmbeddedBroker": "embedded",
    "EmbeddedCluster": "cluster",
    "TidelogContainer": "container",
    "produced": "expectations",
    "wait_for_lag": "expectations",
    "wait_for_topic": "expectations",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tidelog.testing' has no attribute {name!r}")
    value = getattr(import_module(f"tidelog.testing.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
