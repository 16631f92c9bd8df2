"""Is a broker whose connection broke gone, or only cut off? Asks its host; a broker that is gone is fenced at once.

Only a refusal counts: the host says that no process listens there. It counts only of an address that accepted a
connection in this broker epoch (`proven_addresses.py`), and only while the broker says nothing. A broker that hangs, or
that the network hides, is left to its session's timeout. When one is gone, the others are asked too, so that all that
died at one moment are fenced by one decision. An old suspicion never fences a broker that registered again meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from tidelog.replication.controller.decisions.state import ControllerSettings
from tidelog.replication.controller.proven_addresses import ProvenAddresses
from tidelog.replication.ports import Endpoint, PortState

logger = logging.getLogger("tidelog.controller")

Probe = Callable[[Endpoint], Awaitable[PortState]]

# A dying process may close its listeners after its connections.
RETRY_DELAYS_MS = (20, 50, 100, 200, 400)
# A new broker listens before it registers; only the network may come later.
LEARN_DELAYS_MS = (0, 200, 1000, 5000)
PROBES_AT_ONCE = 64


class Fencing(Protocol):
    """What the detector needs of the controller."""

    def unfenced_epochs(self) -> dict[int, int]: ...
    def last_contact_ms(self, broker_id: int) -> float: ...
    def broker_endpoint(self, broker_id: int) -> Endpoint | None: ...
    def now_ms(self) -> float: ...
    def fence(self, broker_ids: Sequence[int], why: str) -> None: ...


class Suspicion(NamedTuple):
    epoch: int
    since_ms: float
    times_asked: int = 0


class FailureDetector:
    def __init__(
        self,
        fencing: Fencing,
        probe: Probe,
        loop: asyncio.AbstractEventLoop,
        settings: ControllerSettings,
    ) -> None:
        self._fencing = fencing
        self._probe = probe
        self._loop = loop
        self._timeout_ms = settings.probe_timeout_ms
        self._proven = ProvenAddresses()
        self._suspects: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None
        self._epochs: Mapping[int, int] = {}
        self._learning: dict[int, asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(PROBES_AT_ONCE)

    # -- which addresses can be believed: on every controller, active or not -----------------------------------------

    def learn(self, epochs: Mapping[int, int]) -> None:
        """`epochs`: of all registered brokers. Connects once to each that is new, or registered anew."""
        changed = [broker_id for broker_id, epoch in epochs.items() if self._epochs.get(broker_id) != epoch]
        self._epochs = epochs
        self._proven.keep_only(epochs)
        for broker_id in changed:
            earlier = self._learning.get(broker_id)
            if earlier is not None:
                earlier.cancel()
            task = self._loop.create_task(self._learn(broker_id, epochs[broker_id]), name=f"address of {broker_id}")
            self._learning[broker_id] = task
            task.add_done_callback(partial(self._learned, broker_id))

    def _learned(self, broker_id: int, task: asyncio.Task[None]) -> None:
        if self._learning.get(broker_id) is task:
            del self._learning[broker_id]

    async def _learn(self, broker_id: int, epoch: int) -> None:
        for delay_ms in LEARN_DELAYS_MS:
            if delay_ms:
                await asyncio.sleep(delay_ms / 1000)
            if self._epochs.get(broker_id) != epoch:
                return
            async with self._turn:
                endpoint = self._fencing.broker_endpoint(broker_id)
                if endpoint is None or await self._state_of(broker_id, epoch, endpoint) is PortState.ACCEPTS:
                    return

    async def _state_of(self, broker_id: int, epoch: int, endpoint: Endpoint) -> PortState:
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                state = await self._probe(endpoint)
        except (TimeoutError, OSError):
            return PortState.UNKNOWN
        if state is PortState.ACCEPTS:
            self._proven.accepted(broker_id, epoch, endpoint)
        return state

    # -- who is gone -------------------------------------------------------------------------------------------------

    def suspect(self, broker_id: int, broker_epoch: int) -> None:
        self._suspects[broker_id] = broker_epoch
        self._start()

    def suspect_all(self) -> None:
        self._suspects.update(self._fencing.unfenced_epochs())
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
            await self._ask()
        except Exception:
            logger.exception("asking after brokers failed; silent ones are found by their sessions' timeouts")
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _ask(self) -> None:
        asked: dict[int, Suspicion] = {}
        while self._suspects or asked:
            now_ms = self._fencing.now_ms()
            for broker_id, epoch in self._suspects.items():
                asked[broker_id] = Suspicion(epoch, now_ms)
            self._suspects.clear()
            gone = await self._gone(asked)
            if gone:
                now_ms = self._fencing.now_ms()
                unfenced = self._fencing.unfenced_epochs()
                others = {one: Suspicion(epoch, now_ms) for one, epoch in unfenced.items() if one not in asked}
                gone |= await self._gone(others)
                self._fence(gone)
            asked = self._still_suspect(asked, gone)
            if asked and not self._suspects:
                delay_ms = RETRY_DELAYS_MS[min(one.times_asked for one in asked.values()) - 1]
                await asyncio.sleep(delay_ms / 1000)

    def _still_suspect(self, asked: dict[int, Suspicion], gone: Iterable[int]) -> dict[int, Suspicion]:
        """Those to be asked again: silent since, and neither gone nor asked often enough."""
        return {
            broker_id: one._replace(times_asked=one.times_asked + 1)
            for broker_id, one in asked.items()
            if broker_id not in gone and self._is_silent(broker_id, one) and one.times_asked < len(RETRY_DELAYS_MS)
        }

    def _is_silent(self, broker_id: int, suspicion: Suspicion) -> bool:
        """Not fenced since, not registered anew, and no heartbeat came since."""
        is_same = self._fencing.unfenced_epochs().get(broker_id) == suspicion.epoch
        return is_same and self._fencing.last_contact_ms(broker_id) <= suspicion.since_ms

    async def _gone(self, brokers: dict[int, Suspicion]) -> dict[int, Suspicion]:
        """Those of them whose hosts refuse, where that can be believed."""
        refusals = await asyncio.gather(*(self._refuses(broker_id, one.epoch) for broker_id, one in brokers.items()))
        return {broker_id: one for (broker_id, one), refused in zip(brokers.items(), refusals) if refused}

    async def _refuses(self, broker_id: int, epoch: int) -> bool:
        endpoint = self._fencing.broker_endpoint(broker_id)
        if endpoint is None:
            return False
        if await self._state_of(broker_id, epoch, endpoint) is not PortState.REFUSES:
            return False
        return self._proven.believes_refusal(broker_id, epoch, endpoint)

    def _fence(self, gone: dict[int, Suspicion]) -> None:
        silent = [broker_id for broker_id, one in gone.items() if self._is_silent(broker_id, one)]
        if silent:
            for broker_id in silent:
                self._proven.spend(broker_id)
            self._fencing.fence(silent, "no process listens at their addresses any more")
