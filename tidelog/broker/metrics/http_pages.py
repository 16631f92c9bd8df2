"""The HTTP pages of a node: metrics, liveness, readiness.

`/healthz` is for supervisors that restart nodes: it answers 200 while the event loop runs and the
node can follow the metadata. `/readyz` is for load balancers: it answers 200 if the broker is
registered, unfenced and caught up with the metadata, else 503 with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tidelog.broker.network.http_server import Page

if TYPE_CHECKING:
    from tidelog.broker.broker_side import BrokerSide
    from tidelog.broker.metadata_side import MetadataSide
    from tidelog.broker.metrics.collector import Metrics


# The bound of committed records not yet applied by a ready node; a few are always on their way.
RECORDS_BEHIND_MAX = 1_000


class NodePages:
    """`liveness` and `readiness` return a problem, or None."""

    def __init__(
        self, metrics: Metrics, liveness: Callable[[], str | None], readiness: Callable[[], str | None]
    ) -> None:
        self._metrics = metrics
        self._checks = {"/healthz": liveness, "/readyz": readiness}

    async def __call__(self, path: str) -> Page:
        if path == "/metrics":
            return Page(200, *await self._metrics.scrape())
        check = self._checks.get(path)
        if check is None:
            return Page(404, b"there are /metrics, /healthz and /readyz\n")
        problem = check()
        return Page(200, b"ok\n") if problem is None else Page(503, f"{problem}\n".encode())


def liveness_problem(metadata: MetadataSide) -> str | None:
    """The problem that only a restart can solve, or None."""
    failure = metadata.tracker.failure
    return None if failure is None else f"the metadata log cannot be followed: {failure}"


def readiness_problem(metadata: MetadataSide, broker: BrokerSide | None) -> str | None:
    """Why clients should avoid this broker, or why this controller takes no part in the quorum.

    Brokers stay ready while the cluster has no controller, because they still serve clients.
    """
    liveness = liveness_problem(metadata)
    if liveness is not None:
        return liveness
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
