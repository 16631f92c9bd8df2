"""Brokers that this node has just lost touch with, and what clients are told of them meanwhile.

A client that loses its leader asks another broker for the new one at once, before the controller can have chosen it;
told of the old one, librdkafka asks again only a second later. So an answer that would name a lost leader waits until
the metadata say what became of it, for a moment at most. A client may be ahead of this node in that: a dying process
closes its connections one by one. So a leader that this node has a link to is asked for a sign of life before it is
named, and one that refuses or breaks off is lost. And a broker fenced moments ago is still listed, though
nothing is led by it: librdkafka takes a partition away from a broker that is no longer listed by a detour that costs
another second. Not so one whose link to this node still stands: it hangs, or is cut off from the others, and a client
sent there would be told for ever that it leads. Kafka answers at once and lists no fenced broker.
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
# A broker that answered is believed to live for so long; one that did not is not tried again for so long.
ANSWERED_MS = 20
UNANSWERED_MS = 1_000
# An answer that names more leaders is not a client's that has lost one.
PROBED_AT_ONCE_MAX = 8
LISTED_MS = 5_000
WAITING_MAX = 10_000


class LostBrokers:
    """To be told of lost and found connections and of every image; `bool()` says whether any broker is lost.

    `probe(broker_id)` says whether a broker answers a request (ACCEPTS), is gone (REFUSES), or says nothing within
    PROBE_MS_MAX; without it none is tried.
    """

    def __init__(self, probe: Callable[[int], Awaitable[PortState]] | None = None) -> None:
        self._probe = probe
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._probed_until: dict[int, float] = {}
        self._lost: dict[int, asyncio.TimerHandle] = {}
        self._waiting: list[Callable[[], None]] = []
        self._fenced_at: dict[int, float] = {}
        self._unfenced: set[int] = set()
        self._linked: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._lost)

    def lost(self, broker_id: int) -> None:
        self._linked.discard(broker_id)
        if broker_id not in self._lost:
            loop = asyncio.get_running_loop()
            self._lost[broker_id] = loop.call_later(HOLD_MS_MAX / 1000, self._settled, broker_id)

    def found(self, broker_id: int) -> None:
        """It answers, for the first time or again."""
        self._linked.add(broker_id)
        self._settled(broker_id)

    def _settled(self, broker_id: int) -> None:
        """It answers again, the metadata say what became of it, or nobody knows."""
        timer = self._lost.pop(broker_id, None)
        if timer is not None:
            timer.cancel()
            self._wake()

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """After it took effect here."""
        now = asyncio.get_running_loop().time()
        for broker_id in sorted(delta.changed_brokers):
            broker = image.brokers.get(broker_id)
            if broker is None or not broker.fenced:
                self._fenced_at.pop(broker_id, None)
            elif broker_id in self._unfenced:
                self._fenced_at[broker_id] = now
            # One that has only registered, this one after a start say, is not listed before it serves.
            self._unfenced.discard(broker_id)
            if broker is not None and not broker.fenced:
                self._unfenced.add(broker_id)
            self._settled(broker_id)

    def lately_fenced(self) -> set[int]:
        """Those that are still to be listed: they were fenced moments ago, and are gone."""
        if not self._fenced_at:
            return set()
        since = asyncio.get_running_loop().time() - LISTED_MS / 1000
        self._fenced_at = {one: at for one, at in self._fenced_at.items() if at > since}
        return self._fenced_at.keys() - self._linked

    def any_of(self, broker_ids: Iterable[int]) -> bool:
        return not self._lost.keys().isdisjoint(broker_ids)

    def doubtful(self, broker_ids: Iterable[int]) -> list[int]:
        """Those of them that are to be tried before they are named."""
        if self._probe is None or not self._linked:
            return []
        now = asyncio.get_running_loop().time()
        found = [one for one in self._linked.intersection(broker_ids) if self._probed_until.get(one, 0.0) < now]
        return found if len(found) <= PROBED_AT_ONCE_MAX else []

    def try_all(self, broker_ids: Iterable[int], then: Callable[[], None]) -> None:
        """Ask each, and call back: one that is gone is lost by then. One attempt a broker is under way."""
        waiting = {self._probes.get(one) or self._begin_probe(one) for one in broker_ids}

        def tried(task: asyncio.Task[None]) -> None:
            waiting.discard(task)
            if not waiting:
                then()

        for task in list(waiting):
            task.add_done_callback(tried)

    def _begin_probe(self, broker_id: int) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._try(broker_id), name=f"try broker {broker_id}")
        self._probes[broker_id] = task
        return task

    async def _try(self, broker_id: int) -> None:
        state = PortState.UNKNOWN
        try:
            assert self._probe is not None
            state = await self._probe(broker_id)
        except Exception:
            logger.exception("broker %d cannot be tried", broker_id)
        finally:
            del self._probes[broker_id]
        if state is PortState.REFUSES and broker_id in self._linked:
            self.lost(broker_id)
        pause_ms = ANSWERED_MS if state is PortState.ACCEPTS else UNANSWERED_MS
        self._probed_until[broker_id] = asyncio.get_running_loop().time() + pause_ms / 1000

    def when_settled(self, answer: Callable[[], None]) -> None:
        """Call back as soon as something is known, of whichever broker; at once where too many wait."""
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
        for timer in self._lost.values():
            timer.cancel()
        self._lost.clear()
        self._wake()
