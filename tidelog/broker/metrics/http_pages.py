"""What a node shows over HTTP: its metrics, whether it lives, whether it serves.

`/healthz` is for whoever restarts what has died: it answers while the event loop turns and the metadata can be
followed. `/readyz` is for whoever sends clients here: registered, unfenced, caught up with the metadata; else 503 and
why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.broker.network.http_server import Page

if TYPE_CHECKING:
    from tidelog.broker.broker_side import BrokerSide
    from tidelog.broker.metadata_side import MetadataSide
    from tidelog.broker.metrics.collector import Metrics


# What is committed and not acted upon yet: a few records are always on their way.
RECORDS_BEHIND_MAX = 1_000


class NodePages:
    """`sick` and `unready` say what is wrong, None if nothing is."""

    def __init__(self, metrics: Metrics, sick: Callable[[], str | None], unready: Callable[[], str | None]) -> None:
        self._metrics = metrics
        self._checks = {"/healthz": sick, "/readyz": unready}

    async def __call__(self, path: str) -> Page:
        if path == "/metrics":
            return Page(200, *await self._metrics.scrape())
        check = self._checks.get(path)
        if check is None:
            return Page(404, b"there are /metrics, /healthz and /readyz\n")
        problem = check()
        return Page(200, b"ok\n") if problem is None else Page(503, f"{problem}\n".encode())


def what_is_sick(metadata: MetadataSide) -> str | None:
    """What only a restart can mend."""
    failure = metadata.tracker.failure
    return None if failure is None else f"the metadata log cannot be followed: {failure}"


def what_is_unready(metadata: MetadataSide, broker: BrokerSide | None) -> str | None:
    """Why clients should not be sent here, or for a controller, why it takes no part in the quorum.

    Brokers serve on while there is no controller, so all of them are ready then: turning every client away would make
    it worse.
    """
    sick = what_is_sick(metadata)
    if sick is not None:
        return sick
    if metadata.tracker.offset < 0:
        return "no metadata yet"
    behind = metadata.raft.high_watermark - 1 - metadata.tracker.offset
    if behind > RECORDS_BEHIND_MAX:
        return f"{behind} metadata records behind"
    if broker is None:
        return "no leader of the metadata quorum is known" if metadata.raft.leader_id < 0 else None
    if broker.lifecycle.epoch < 0:
        return "not registered with the controller"
    return "fenced by the controller" if broker.lifecycle.is_fenced else None
