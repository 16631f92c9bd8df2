"""Brokers to which this node has just lost its connection, and their part in Metadata responses.

A client that loses its leader asks another broker for the new leader at once, before the controller
can have elected it. If the response names the old leader, librdkafka asks again only a second
later. Three rules avoid that second:

- A response that would name a lost leader waits until the metadata change, for a bounded time.
- A client may notice the loss first, because a dying process closes its connections one by one.
  Therefore this node probes a leader that it is connected to before it names it. A leader that
  refuses the probe, or breaks it off, is lost.
- A recently fenced broker is still listed, without partitions that it leads. librdkafka needs
  another second to take a partition from a broker that is not listed. A fenced broker that is still
  connected to this node is not listed: it hangs, or is cut off from the others, and would name
  itself as leader to a client for ever.

Kafka answers at once and lists no fenced broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from tidelog.broker.scheduling.callbacks import call_all
from tidelog.replication.ports import PortState

if TYPE_CHECKING:
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage

logger = logging.getLogger("tidelog.broker")

HOLD_MS_MAX = 1_000  # as long as librdkafka would wait
PROBE_MS_MAX = 100
# The time until the next probe of a broker, after a probe with an answer and after one without.
ANSWERED_MS = 5  # a killed process closes its last connection some milliseconds later
UNANSWERED_MS = 1_000
# A response that names more leaders is sent without probes: no client that lost
# its leader asks for so many.
PROBED_AT_ONCE_MAX = 8
LISTED_MS = 9_000  # as long as Kafka lists a dead broker: the default of broker.session.timeout.ms
WAITING_MAX = 10_000


class LostBrokers:
    """Follows connections and images; `bool()` is whether any broker is lost.

    `probe(broker_id)` returns ACCEPTS for a broker that answers a request, REFUSES for one that is
    gone, UNKNOWN for one that does not answer within PROBE_MS_MAX. Without it no broker is probed.
    """

    def __init__(self, probe: Callable[[int], Awaitable[PortState]] | None = None) -> None:
        self._probe = probe
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._next_probe_s: dict[int, float] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._waiting: list[Callable[[], object]] = []
        self._fenced_at_s: dict[int, float] = {}
        self._unfenced: set[int] = set()
        self._connected: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._timers)

    def on_connection_lost(self, broker_id: int) -> None:
        self._connected.discard(broker_id)
        if broker_id not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[broker_id] = loop.call_later(HOLD_MS_MAX / 1000, self._resolve, broker_id)

    def on_connection_made(self, broker_id: int) -> None:
        """The broker answers, for the first time or again."""
        self._connected.add(broker_id)
        self._resolve(broker_id)

    def _resolve(self, broker_id: int) -> None:
        """The broker is no longer lost: it answers, its metadata changed, or the hold time is over."""
        timer = self._timers.pop(broker_id, None)
        if timer is not None:
            timer.cancel()
            self._wake()

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """An image has taken effect on this node."""
        now = asyncio.get_running_loop().time()
        for broker_id in sorted(delta.changed_brokers):
            broker = image.brokers.get(broker_id)
            if broker is None or not broker.fenced:
                self._fenced_at_s.pop(broker_id, None)
            elif broker_id in self._unfenced:
                self._fenced_at_s[broker_id] = now
            # A broker that has only registered, for instance this one at its start, is
            # not listed before it serves.
            self._unfenced.discard(broker_id)
            if broker is not None and not broker.fenced:
                self._unfenced.add(broker_id)
            self._resolve(broker_id)

    def recently_fenced(self) -> set[int]:
        """The fenced brokers that are still listed: those fenced recently and not connected to this
        node.
        """
        if not self._fenced_at_s:
            return set()
        since_s = asyncio.get_running_loop().time() - LISTED_MS / 1000
        self._fenced_at_s = {
            broker_id: fenced_at_s for broker_id, fenced_at_s in self._fenced_at_s.items() if fenced_at_s > since_s
        }
        return self._fenced_at_s.keys() - self._connected

    def contains_any(self, broker_ids: Iterable[int]) -> bool:
        # Very many requests for very many partitions may wait for one probe: nearly always nothing is lost then.
        return bool(self._timers) and not self._timers.keys().isdisjoint(broker_ids)

    def unverified(self, broker_ids: Iterable[int]) -> list[int]:
        """The brokers that must be probed before a response names them."""
        if self._probe is None or not self._connected:
            return []
        now = asyncio.get_running_loop().time()
        due_ids = [
            broker_id
            for broker_id in self._connected.intersection(broker_ids)
            if self._next_probe_s.get(broker_id, 0.0) < now
        ]
        return due_ids if len(due_ids) <= PROBED_AT_ONCE_MAX else []

    def probe_all(self, broker_ids: Iterable[int], then: Callable[[], object]) -> None:
        """Probe each broker, with one probe of a broker at a time. Call back when all
        brokers that are gone are lost.
        """
        probes = {self._probes.get(broker_id) or self._begin_probe(broker_id) for broker_id in broker_ids}

        def on_probed(task: asyncio.Task[None]) -> None:
            probes.discard(task)
            if not probes:
                then()

        for task in list(probes):
            task.add_done_callback(on_probed)

    def _begin_probe(self, broker_id: int) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._run_probe(broker_id), name=f"try broker {broker_id}")
        self._probes[broker_id] = task
        return task

    async def _run_probe(self, broker_id: int) -> None:
        state = PortState.UNKNOWN
        try:
            assert self._probe is not None
            state = await self._probe(broker_id)
        except Exception:
            logger.exception("cannot probe broker %d", broker_id)
        finally:
            del self._probes[broker_id]
        if state is PortState.REFUSES and broker_id in self._connected:
            self.on_connection_lost(broker_id)
        pause_ms = ANSWERED_MS if state is PortState.ACCEPTS else UNANSWERED_MS
        self._next_probe_s[broker_id] = asyncio.get_running_loop().time() + pause_ms / 1000

    def when_resolved(self, answer: Callable[[], object]) -> None:
        """Call back when any lost broker is resolved; at once when too many callbacks wait."""
        if len(self._waiting) >= WAITING_MAX:
            answer()
        else:
            self._waiting.append(answer)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        call_all(waiting)

    def close(self) -> None:
        for task in list(self._probes.values()):
            task.cancel()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._wake()
