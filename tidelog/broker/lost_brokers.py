"""Brokers that this node has just lost touch with, and what clients are told of them meanwhile.

A client that loses its leader asks another broker for the new one at once, before the controller can have chosen it;
told of the old one, librdkafka asks again only a second later. So an answer that would name a lost leader waits until
the metadata say what became of it, for a moment at most. And a broker fenced moments ago is still listed, though
nothing is led by it: librdkafka takes a partition away from a broker that is no longer listed by a detour that costs
another second. Not so one whose link to this node still stands: it hangs, or is cut off from the others, and a client
sent there would be told for ever that it leads. Kafka answers at once and lists no fenced broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tidelog.broker.callbacks import call_all

if TYPE_CHECKING:
    from tidelog.replication.controller.image import MetadataDelta, MetadataImage

HOLD_MS_MAX = 500
LISTED_MS = 5_000
WAITING_MAX = 10_000


class LostBrokers:
    """To be told of lost and found connections and of every image; `bool()` says whether any broker is lost."""

    def __init__(self) -> None:
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
        for timer in self._lost.values():
            timer.cancel()
        self._lost.clear()
        self._wake()
