"""Detection of dead brokers: probes the port of a broker whose connection closed,
and fences a dead one at once.

Only a refused connection proves a broker dead: no process listens on its port. The refusal
counts only for an address that accepted a connection in this broker epoch
(`proven_addresses.py`), and only while the broker sends no heartbeat. A broker that hangs, or
that the network cuts off, is fenced by its session timeout. When one broker is dead, all others
are probed, so that one decision fences brokers that died together. Invariant: a suspicion
fences only the broker epoch that it is about.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple, Protocol

from tidelog.replication.controller.decisions.state import ControllerSettings
from tidelog.replication.controller.proven_addresses import ProvenAddresses
from tidelog.replication.ports import Endpoint, PortState

logger = logging.getLogger("tidelog.controller")

Probe = Callable[[Endpoint], Awaitable[PortState]]

# A dying process may close its listeners after its connections.
RETRY_DELAYS_MS = (20, 50, 100, 200, 400)
# A new broker listens before it registers, but the network may not reach it yet.
LEARN_DELAYS_MS = (0, 200, 1000, 5000)
CONCURRENT_PROBES_MAX = 64


class FencingController(Protocol):
    """The part of the controller that the detector uses."""

    def unfenced_epochs(self) -> dict[int, int]: ...
    def last_contact_ms(self, broker_id: int) -> float: ...
    def broker_endpoint(self, broker_id: int) -> Endpoint | None: ...
    def now_ms(self) -> float: ...
    def fence(self, broker_ids: Sequence[int], reason: str) -> None: ...


class Suspicion(NamedTuple):
    epoch: int
    since_ms: float
    probe_count: int = 0


class FailureDetector:
    def __init__(
        self,
        controller: FencingController,
        probe: Probe,
        loop: asyncio.AbstractEventLoop,
        settings: ControllerSettings,
    ) -> None:
        self._controller = controller
        self._probe = probe
        self._loop = loop
        self._timeout_ms = settings.probe_timeout_ms
        self._proven_addresses = ProvenAddresses()
        self._suspects: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._epochs: Mapping[int, int] = {}
        self._serving: Set[int] = frozenset()
        self._learning: dict[int, asyncio.Task[None]] = {}
        self._probe_slots = asyncio.Semaphore(CONCURRENT_PROBES_MAX)

    # -- proof of addresses, on every controller, active or not ------------------------------------------------------

    def learn(self, epochs: Mapping[int, int], serving: Set[int] = frozenset()) -> None:
        """Connect once to each broker with a new epoch, and again when it begins to serve: not before then does it
        listen for sure. `epochs`: those of all registered brokers. `serving`: the unfenced ones.
        """
        changed = [
            broker_id
            for broker_id, epoch in epochs.items()
            if self._epochs.get(broker_id) != epoch or (broker_id in serving and broker_id not in self._serving)
        ]
        self._epochs, self._serving = epochs, serving
        self._proven_addresses.retain(epochs)
        for broker_id in changed:
            old_task = self._learning.get(broker_id)
            if old_task is not None:
                old_task.cancel()
            task = self._loop.create_task(self._learn(broker_id, epochs[broker_id]), name=f"address of {broker_id}")
            self._learning[broker_id] = task
            task.add_done_callback(partial(self._on_learned, broker_id))

    def _on_learned(self, broker_id: int, task: asyncio.Task[None]) -> None:
        if self._learning.get(broker_id) is task:
            del self._learning[broker_id]

    async def _learn(self, broker_id: int, epoch: int) -> None:
        for delay_ms in LEARN_DELAYS_MS:
            if delay_ms:
                await asyncio.sleep(delay_ms / 1000)
            if self._epochs.get(broker_id) != epoch:
                return
            async with self._probe_slots:
                endpoint = self._controller.broker_endpoint(broker_id)
                if endpoint is None or self._proven_addresses.has_proof(broker_id, epoch, endpoint):
                    return
                if await self._probe_state(broker_id, epoch, endpoint) is PortState.ACCEPTS:
                    return

    async def _probe_state(self, broker_id: int, epoch: int, endpoint: Endpoint) -> PortState:
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                state = await self._probe(endpoint)
        except (TimeoutError, OSError):
            return PortState.UNKNOWN
        if state is PortState.ACCEPTS:
            self._proven_addresses.add_proof(broker_id, epoch, endpoint)
        return state

    # -- suspects ----------------------------------------------------------------------------------------------------

    def suspect(self, broker_id: int, broker_epoch: int) -> None:
        self._suspects[broker_id] = broker_epoch
        self._start()

    def suspect_all(self) -> None:
        self._suspects.update(self._controller.unfenced_epochs())
        self._start()

    def _start(self) -> None:
        if self._suspects and self._task is None:
            self._task = self._loop.create_task(self._run(), name="failure detection")

    def stop(self) -> None:
        self._suspects.clear()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        self.stop()
        for task in list(self._learning.values()):
            task.cancel()

    async def _run(self) -> None:
        try:
            await self._probe_suspects()
        except Exception:
            logger.exception("the check of brokers' ports failed; session timeouts still find silent brokers")
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _probe_suspects(self) -> None:
        suspects: dict[int, Suspicion] = {}
        while self._suspects or suspects:
            now_ms = self._controller.now_ms()
            for broker_id, epoch in self._suspects.items():
                suspects[broker_id] = Suspicion(epoch, now_ms)
            self._suspects.clear()
            dead_brokers = await self._find_dead(suspects)
            if dead_brokers:
                now_ms = self._controller.now_ms()
                unfenced = self._controller.unfenced_epochs()
                other_brokers = {
                    broker_id: Suspicion(epoch, now_ms)
                    for broker_id, epoch in unfenced.items()
                    if broker_id not in suspects
                }
                dead_brokers |= await self._find_dead(other_brokers)
                self._fence(dead_brokers)
            suspects = self._remaining_suspects(suspects, dead_brokers)
            if suspects and not self._suspects:
                delay_ms = RETRY_DELAYS_MS[min(suspicion.probe_count for suspicion in suspects.values()) - 1]
                await asyncio.sleep(delay_ms / 1000)

    def _remaining_suspects(self, suspects: dict[int, Suspicion], dead_brokers: Iterable[int]) -> dict[int, Suspicion]:
        """The suspects for another probe: still silent, not gone, and with probes left."""
        return {
            broker_id: suspicion._replace(probe_count=suspicion.probe_count + 1)
            for broker_id, suspicion in suspects.items()
            if broker_id not in dead_brokers
            and self._is_silent(broker_id, suspicion)
            and suspicion.probe_count < len(RETRY_DELAYS_MS)
        }

    def _is_silent(self, broker_id: int, suspicion: Suspicion) -> bool:
        """Whether the broker is unfenced, in the same epoch, and without a
        heartbeat since the suspicion.
        """
        is_same = self._controller.unfenced_epochs().get(broker_id) == suspicion.epoch
        return is_same and self._controller.last_contact_ms(broker_id) <= suspicion.since_ms

    async def _find_dead(self, brokers: dict[int, Suspicion]) -> dict[int, Suspicion]:
        """The brokers of which a trusted address refuses a connection."""
        refusals = await asyncio.gather(
            *(self._refuses(broker_id, suspicion.epoch) for broker_id, suspicion in brokers.items())
        )
        return {broker_id: suspicion for (broker_id, suspicion), refused in zip(brokers.items(), refusals) if refused}

    async def _refuses(self, broker_id: int, epoch: int) -> bool:
        endpoint = self._controller.broker_endpoint(broker_id)
        if endpoint is None:
            return False
        if await self._probe_state(broker_id, epoch, endpoint) is not PortState.REFUSES:
            return False
        return self._proven_addresses.trusts_refusal(broker_id, epoch, endpoint)

    def _fence(self, dead_brokers: dict[int, Suspicion]) -> None:
        silent_ids = [
            broker_id for broker_id, suspicion in dead_brokers.items() if self._is_silent(broker_id, suspicion)
        ]
        if silent_ids:
            for broker_id in silent_ids:
                self._proven_addresses.mark_spent(broker_id)
            self._controller.fence(silent_ids, "no process listens at their addresses any more")
