"""Is a broker whose connection broke gone, or only cut off? Asks its host; whoever is gone is fenced at once.

Only a refusal counts: the host says that nobody listens there. A broker that hangs, or that the network hides, is left
to its session's timeout. When one is found gone, the others are asked too, so that all that died at one moment are
fenced by one decision. A broker that registered again meanwhile is never fenced by an old suspicion.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from tidelog.replication.controller.state import ControllerSettings
from tidelog.replication.ports import Endpoint

log = logging.getLogger("tidelog.controller")

# A dying process may close its listeners after its connections.
RETRY_DELAYS_MS = (20, 50, 100, 200, 400)


class Fencing(Protocol):
    """What the detector needs of the active controller."""

    def unfenced_epochs(self) -> dict[int, int]: ...
    def last_contact_ms(self, broker_id: int) -> float: ...
    def broker_endpoint(self, broker_id: int) -> Endpoint | None: ...
    def now_ms(self) -> float: ...
    def fence(self, broker_ids: Sequence[int], why: str) -> None: ...


class FailureDetector:
    def __init__(
        self,
        fencing: Fencing,
        probe: Callable[[Endpoint], Awaitable[bool]],
        loop: asyncio.AbstractEventLoop,
        settings: ControllerSettings,
    ) -> None:
        self._fencing = fencing
        self._probe = probe
        self._loop = loop
        self._timeout_ms = settings.probe_timeout_ms
        self._suspects: dict[int, int] = {}
        self._task: asyncio.Task[None] | None = None

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

    async def _run(self) -> None:
        try:
            await self._ask()
        except Exception:
            log.exception("asking after brokers failed; silent ones are found by their sessions' timeouts")
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _ask(self) -> None:
        # Broker id -> (epoch, when suspected, times asked)
        asked: dict[int, tuple[int, float, int]] = {}
        while self._suspects or asked:
            now_ms = self._fencing.now_ms()
            for broker_id, epoch in self._suspects.items():
                asked[broker_id] = (epoch, now_ms, 0)
            self._suspects.clear()
            gone = await self._gone({broker_id: epoch for broker_id, (epoch, _, _) in asked.items()})
            if gone:
                others = {one: epoch for one, epoch in self._fencing.unfenced_epochs().items() if one not in asked}
                gone |= await self._gone(others)
                self._fence(gone)
            asked = self._still_suspect(asked, gone)
            if asked and not self._suspects:
                delay_ms = RETRY_DELAYS_MS[min(times for _, _, times in asked.values()) - 1]
                await asyncio.sleep(delay_ms / 1000)

    def _still_suspect(
        self, asked: dict[int, tuple[int, float, int]], gone: Iterable[int]
    ) -> dict[int, tuple[int, float, int]]:
        """Those to be asked again: silent since, and neither gone nor asked often enough."""
        unfenced = self._fencing.unfenced_epochs()
        return {
            broker_id: (epoch, since_ms, times + 1)
            for broker_id, (epoch, since_ms, times) in asked.items()
            if broker_id not in gone
            and unfenced.get(broker_id) == epoch
            and self._fencing.last_contact_ms(broker_id) <= since_ms
            and times < len(RETRY_DELAYS_MS)
        }

    async def _gone(self, brokers: dict[int, int]) -> dict[int, int]:
        """Those of them (id -> epoch) whose hosts refuse."""
        if not brokers:
            return {}
        refusals = await asyncio.gather(*(self._refuses(broker_id) for broker_id in brokers))
        return {one: epoch for (one, epoch), refused in zip(brokers.items(), refusals) if refused}

    async def _refuses(self, broker_id: int) -> bool:
        endpoint = self._fencing.broker_endpoint(broker_id)
        if endpoint is None:
            return False
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                return await self._probe(endpoint)
        except (TimeoutError, OSError):
            return False

    def _fence(self, gone: dict[int, int]) -> None:
        unfenced = self._fencing.unfenced_epochs()
        same = [broker_id for broker_id, epoch in gone.items() if unfenced.get(broker_id) == epoch]
        if same:
            self._fencing.fence(same, "nobody listens at their addresses any more")
