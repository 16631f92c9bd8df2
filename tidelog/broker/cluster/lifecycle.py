"""A broker's standing with the controller: registration, heartbeats, readiness, controlled shutdown.

A thin shell in the order of Kafka's BrokerLifecycleManager. What the broker says of itself is given in; what the
controller makes of it comes back through the metadata. Invariant: `epoch` is that of the last accepted registration,
and it is the one in every request that is fenced by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.broker_heartbeat import BrokerHeartbeatRequest
from tidelog.replication.backoff import Backoff
from tidelog.replication.ports import PeerUnreachable

if TYPE_CHECKING:
    import random

    from tidelog.broker.cluster.controller_channel import ControllerChannel
    from tidelog.protocol.messages.broker_registration import BrokerRegistrationRequest

logger = logging.getLogger("tidelog.lifecycle")

REGISTRATION_VERSION = 4
HEARTBEAT_VERSION = 1
HEARTBEAT_VERSION_CORDONED = 2
RETRY_MS = 50
RETRY_MS_MAX = 500
# Registration is refused while a broker of the same id still counts as alive; such things pass.
REGISTRATION_RETRY_MS = 200
# A controlled shutdown is given up when no controller has answered for so long: a whole cluster may be stopping.
SHUTDOWN_SILENCE_MS = 3_000
SHUTDOWN_MS_MAX = 60_000

# What makes a registration pointless, now and later.
_FATAL = frozenset(
    {
        ErrorCode.INCONSISTENT_CLUSTER_ID,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.INVALID_REGISTRATION,
    }
)
_FORGOTTEN = frozenset({ErrorCode.BROKER_ID_NOT_REGISTERED, ErrorCode.STALE_BROKER_EPOCH})


@dataclass(frozen=True, slots=True)
class LifecycleSettings:
    heartbeat_interval_ms: int = 2_000
    heartbeat_timeout_ms: int = 4_500
    directory_failure_timeout_ms: int = 30_000


class RegistrationRefused(Exception):
    """The controller will never take this broker as it is; the text is fit to be shown."""


class BrokerLifecycle:
    """`registration(previous_epoch)` is what to register with; `metadata_offset()` the last one published here.

    `on_unheard(directory_id)`: no controller could be told in time that this directory has failed. `cordoned()`: the
    directories that want no new replicas; None while that, or whether the controller knows such, is not known.
    `on_registered(epoch)`: a controller has taken this broker in, the first time or again.
    """

    def __init__(
        self,
        *,
        node_id: int,
        registration: Callable[[int], BrokerRegistrationRequest],
        metadata_offset: Callable[[], int],
        channel: ControllerChannel,
        settings: LifecycleSettings,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        on_unheard: Callable[[bytes], None] = lambda directory_id: None,
        cordoned: Callable[[], list[bytes] | None] = lambda: None,
        on_registered: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self.epoch = -1
        self.is_fenced = True
        self._node_id = node_id
        self._registration = registration
        self._previous_epoch = -1
        self._metadata_offset = metadata_offset
        self._channel = channel
        self._settings = settings
        self._loop = loop
        self._rng = rng
        self._on_unheard = on_unheard
        self._cordoned = cordoned
        self._on_registered = on_registered
        self._offline_directories: dict[bytes, asyncio.TimerHandle | None] = {}
        """Told in every heartbeat; with each the time by which the controller must have heard of it, if it has not."""
        self._is_ready = False
        self._wants_shutdown = False
        self._may_shut_down = False
        self._heard_at = loop.time()
        self._poked = asyncio.Event()
        self._changed = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None
        self._registering: asyncio.Task[None] | None = None

    async def register(self, previous_epoch: int) -> int:
        """Until a controller has taken us in; the broker epoch. Raises RegistrationRefused.

        `previous_epoch`: the last one of this broker if all that it wrote is there, else -1 (KIP-966).
        """
        self._previous_epoch = previous_epoch
        while True:
            try:
                response = await self._channel.call(self._registration(self._previous_epoch), REGISTRATION_VERSION)
            except KafkaError:
                logger.warning("no controller has answered yet; still trying to register")
                continue
            code = ErrorCode(response.error_code)
            if code == ErrorCode.NONE:
                break
            if code in _FATAL:
                raise RegistrationRefused(f"the controller refuses broker {self._node_id}: {code.name}")
            logger.info("registration of broker %d is put off: %s", self._node_id, code.name)
            await asyncio.sleep(REGISTRATION_RETRY_MS / 1000)
        self.epoch = self._previous_epoch = response.broker_epoch
        logger.info("broker %d is registered in epoch %d", self._node_id, self.epoch)
        self._on_registered(self.epoch)
        if self._beating is None:
            self._heard_at = self._loop.time()
            self._beating = self._loop.create_task(self._beat(), name="heartbeats")
        return self.epoch

    async def become_ready(self) -> None:
        """Everything is served: ask to be unfenced, and wait for it."""
        self._is_ready = True
        self.poke()
        while self.is_fenced:
            self._changed.clear()
            await self._changed.wait()

    def poke(self) -> None:
        """Send a heartbeat now: there is something new to say, or somebody new to say it to."""
        self._poked.set()

    def directory_failed(self, directory_id: bytes) -> None:
        """The controller is to know that the replicas in this log directory are gone."""
        timeout_s = self._settings.directory_failure_timeout_ms / 1000
        self._offline_directories[directory_id] = self._loop.call_later(timeout_s, self._on_unheard, directory_id)
        self.poke()

    async def shut_down(self) -> None:
        """Have this broker's leaderships moved away, as far as somebody is there to do it."""
        if self._beating is None:
            return
        self._wants_shutdown = True
        self._heard_at = began = self._loop.time()
        self.poke()
        while not self._may_shut_down:
            now = self._loop.time()
            if (now - self._heard_at) * 1000 > SHUTDOWN_SILENCE_MS or (now - began) * 1000 > SHUTDOWN_MS_MAX:
                logger.warning("controlled shutdown is given up: no controller answers")
                break
            self._changed.clear()
            try:
                async with asyncio.timeout(RETRY_MS / 1000):
                    await self._changed.wait()
            except TimeoutError:
                self.poke()

    async def close(self) -> None:
        for task in (self._registering, self._beating):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._registering = self._beating = None
        for timer in self._offline_directories.values():
            if timer is not None:
                timer.cancel()

    async def _beat(self) -> None:
        backoff = Backoff(RETRY_MS, RETRY_MS_MAX)
        while True:
            self._poked.clear()
            heartbeat = self._heartbeat()
            version = HEARTBEAT_VERSION if heartbeat.cordoned_log_dirs is None else HEARTBEAT_VERSION_CORDONED
            try:
                response = await self._channel.attempt(
                    heartbeat, version, timeout_ms=self._settings.heartbeat_timeout_ms, lane="heartbeat"
                )
                wait_ms = self._heard(heartbeat, response)
            except PeerUnreachable as error:
                logger.debug("heartbeat: %s", error)
                wait_ms = -1
            except Exception:  # a bug of ours, or of who answered: this broker lives, and is to go on saying so
                logger.exception("a heartbeat came to nothing")
                wait_ms = -1
            if wait_ms < 0:
                wait_ms = int(backoff.next_ms(self._rng))
            else:
                backoff.reset()
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._poked.wait()
            except TimeoutError:
                pass

    def _heartbeat(self) -> BrokerHeartbeatRequest:
        return BrokerHeartbeatRequest(
            broker_id=self._node_id,
            broker_epoch=self.epoch,
            current_metadata_offset=self._metadata_offset(),
            want_fence=not self._is_ready,
            want_shut_down=self._wants_shutdown,
            offline_log_dirs=list(self._offline_directories),
            cordoned_log_dirs=self._cordoned(),
        )

    def _heard(self, heartbeat: BrokerHeartbeatRequest, response: Any) -> int:
        """Take in an answer; how long to the next heartbeat, -1 for soon."""
        code = ErrorCode(response.error_code)
        if code in _FORGOTTEN and not self._wants_shutdown:
            logger.warning("broker %d is not known in epoch %d: registering again", self._node_id, self.epoch)
            if self._registering is None:
                self._registering = self._loop.create_task(self._register_again(), name="register again")
            return self._settings.heartbeat_interval_ms
        if code != ErrorCode.NONE:
            logger.debug("heartbeat refused: %s", code.name)
            return -1
        self._heard_at = self._loop.time()
        for directory_id in heartbeat.offline_log_dirs:
            timer = self._offline_directories[directory_id]
            if timer is not None:
                timer.cancel()
                self._offline_directories[directory_id] = None
        fenced = bool(response.is_fenced)
        if fenced != self.is_fenced:
            logger.info("broker %d is %s", self._node_id, "fenced" if fenced else "unfenced")
        self.is_fenced = fenced
        self._may_shut_down = bool(response.should_shut_down)
        self._changed.set()
        if self._is_ready and fenced and not self._wants_shutdown:
            return -1
        return self._settings.heartbeat_interval_ms

    async def _register_again(self) -> None:
        try:
            await self.register(self.epoch)
            self.poke()
        except RegistrationRefused as error:
            logger.error("%s", error)
        finally:
            self._registering = None
