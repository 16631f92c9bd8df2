"""A broker's lifecycle: registration, heartbeats, readiness, controlled shutdown.

A thin shell in the order of Kafka's BrokerLifecycleManager. The node passes in the content of
registrations and heartbeats; the controller's decisions come back through the metadata. Invariant:
`epoch` is that of the last accepted registration, and every request that carries a broker epoch
carries this one.
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
# The controller refuses a registration while a broker of the same id has a
# session, which ends with time.
REGISTRATION_RETRY_MS = 200
_LINE_INTERVAL_S = 10.0
"""The log says this often that a registration still waits."""
# A controlled shutdown ends without an answer of a controller after this time: the
# whole cluster may be stopping.
SHUTDOWN_SILENCE_MS = 3_000
# The leaderships move with the first heartbeat. The rest of the wait is for the other brokers to learn that; a
# broker that hangs does not. `cluster stop` kills a node after 30 s, and a killed node does not close its logs.
SHUTDOWN_MS_MAX = 20_000

# Errors that a retry of the registration cannot resolve.
_FATAL_ERRORS = frozenset(
    {
        ErrorCode.INCONSISTENT_CLUSTER_ID,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.INVALID_REGISTRATION,
    }
)
_REREGISTRATION_ERRORS = frozenset({ErrorCode.BROKER_ID_NOT_REGISTERED, ErrorCode.STALE_BROKER_EPOCH})


@dataclass(frozen=True, slots=True)
class LifecycleSettings:
    heartbeat_interval_ms: int = 2_000
    heartbeat_timeout_ms: int = 4_500
    session_timeout_ms: int = 9_000
    deposed_controller_ms: float = 3_000
    """How long a controller may answer heartbeats after another has taken over."""
    directory_failure_timeout_ms: int = 30_000


class RegistrationRefused(Exception):
    """The controller refuses this broker for good; the text is meant for the operator."""


class BrokerLifecycle:
    """`registration(previous_epoch)` makes the request; `metadata_offset()` is the last one
    published here.

    `on_report_timeout(directory_id)`: no controller has acknowledged the failure of this directory
    in time. `cordoned()`: the cordoned directories, or None while they are unknown, or while it is
    unknown whether the controller supports them. `on_registered(epoch)`: a controller has accepted
    a registration, the first or a later one.
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
        on_report_timeout: Callable[[bytes], None] = lambda directory_id: None,
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
        self._on_report_timeout = on_report_timeout
        self._cordoned = cordoned
        self._on_registered = on_registered
        self._offline_directories: dict[bytes, asyncio.TimerHandle | None] = {}
        """The failed directories, sent in every heartbeat, each with the timer of its unacknowledged report."""
        self._is_ready = False
        self._wants_shutdown = False
        self._may_shut_down = False
        self._last_response_s = loop.time()
        self._session_start_s = loop.time()
        """When the last heartbeat that was acknowledged was sent."""
        self._wake_event = asyncio.Event()
        self._state_changed = asyncio.Event()
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._registration_task: asyncio.Task[None] | None = None

    async def register(self, previous_epoch: int) -> int:
        """Retry until a controller accepts the registration; returns the broker
        epoch. Raises RegistrationRefused.

        `previous_epoch`: the broker's last epoch if its logs have lost nothing since, else -1
        (KIP-966).
        """
        self._previous_epoch = previous_epoch
        began_s = next_line_s = self._loop.time()
        while True:
            try:
                response = await self._channel.call(self._registration(self._previous_epoch), REGISTRATION_VERSION)
            except KafkaError:
                logger.warning("no controller has answered yet; still trying to register")
                continue
            code = ErrorCode.of(response.error_code)
            if code == ErrorCode.NONE:
                break
            if code in _FATAL_ERRORS:
                raise RegistrationRefused(
                    f"the controller refuses broker {self._node_id}: {code.name} (its log has the reason)"
                )
            now_s = self._loop.time()
            if now_s >= next_line_s:
                next_line_s = now_s + _LINE_INTERVAL_S
                self._say_that_it_waits(code, (now_s - began_s) * 1000)
            await asyncio.sleep(REGISTRATION_RETRY_MS / 1000)
        self.epoch = self._previous_epoch = response.broker_epoch
        logger.info("broker %d is registered in epoch %d", self._node_id, self.epoch)
        self._on_registered(self.epoch)
        if self._heartbeat_task is None:
            self._last_response_s = self._loop.time()
            self._heartbeat_task = self._loop.create_task(self._send_heartbeats(), name="heartbeats")
        return self.epoch

    def _say_that_it_waits(self, code: ErrorCode, waited_ms: float) -> None:
        """A line of the log. An earlier process of this node has a session for a while; a longer one is another's."""
        if code == ErrorCode.DUPLICATE_BROKER_REGISTRATION and waited_ms > self._settings.session_timeout_ms:
            logger.warning(
                "broker %d cannot register: another process that runs has this id; give each node a node.id of its own",
                self._node_id,
            )
        else:
            logger.info("the registration of broker %d must wait: %s", self._node_id, code.name)

    def has_session(self) -> bool:
        """Whether the controller surely counts this broker among the active ones.

        Its session timeout starts when it receives a heartbeat, which is after this broker has sent it. That of the
        next controller starts when it takes over, and the last one may have answered a heartbeat since.
        """
        return not self.is_fenced and self._silence_ms() < (
            self._settings.session_timeout_ms - self._settings.deposed_controller_ms
        )

    def is_heard(self) -> bool:
        """Whether a controller, perhaps a replaced one, has answered within the session timeout."""
        return not self.is_fenced and self._silence_ms() < self._settings.session_timeout_ms

    def _silence_ms(self) -> float:
        return (self._loop.time() - self._session_start_s) * 1000

    async def become_ready(self) -> None:
        """This broker can serve: request to be unfenced, and wait for it."""
        self._is_ready = True
        self.request_heartbeat()
        while self.is_fenced:
            self._state_changed.clear()
            await self._state_changed.wait()

    def request_heartbeat(self) -> None:
        """Send a heartbeat now, because its content or the controller has changed."""
        self._wake_event.set()

    def directory_failed(self, directory_id: bytes) -> None:
        """Report to the controller that the replicas in this log directory are offline."""
        timeout_s = self._settings.directory_failure_timeout_ms / 1000
        self._offline_directories[directory_id] = self._loop.call_later(
            timeout_s, self._on_report_timeout, directory_id
        )
        self.request_heartbeat()

    def register_again(self) -> None:
        """Send the registration again, because the controller does not hold it, or not all of it."""
        if self._registration_task is None and not self._wants_shutdown:
            self._registration_task = self._loop.create_task(self._register_again(), name="register again")

    async def shut_down(self) -> None:
        """Let the controller move the leaderships of this broker away, if a controller answers."""
        if self._heartbeat_task is None:
            return
        self._wants_shutdown = True
        self._last_response_s = start_s = self._loop.time()
        self.request_heartbeat()
        while not self._may_shut_down:
            now = self._loop.time()
            if (now - self._last_response_s) * 1000 > SHUTDOWN_SILENCE_MS:
                logger.warning("giving up the controlled shutdown: no controller answers")
                break
            if (now - start_s) * 1000 > SHUTDOWN_MS_MAX:
                logger.warning(
                    "giving up the controlled shutdown: another broker may hang and not know the new leaders"
                )
                break
            self._state_changed.clear()
            try:
                async with asyncio.timeout(RETRY_MS / 1000):
                    await self._state_changed.wait()
            except TimeoutError:
                self.request_heartbeat()

    async def close(self) -> None:
        for task in (self._registration_task, self._heartbeat_task):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._registration_task = self._heartbeat_task = None
        for timer in self._offline_directories.values():
            if timer is not None:
                timer.cancel()

    async def _send_heartbeats(self) -> None:
        backoff = Backoff(RETRY_MS, RETRY_MS_MAX)
        while True:
            self._wake_event.clear()
            heartbeat = self._heartbeat()
            version = HEARTBEAT_VERSION if heartbeat.cordoned_log_dirs is None else HEARTBEAT_VERSION_CORDONED
            sent_s = self._loop.time()
            try:
                response = await self._channel.attempt(
                    heartbeat, version, timeout_ms=self._settings.heartbeat_timeout_ms, lane="heartbeat"
                )
                wait_ms = self._handle_response(heartbeat, response, sent_s)
            except PeerUnreachable as error:
                logger.debug("heartbeat: %s", error)
                wait_ms = -1
            except Exception:  # a bug here or in the controller must not end the heartbeats
                logger.exception("a heartbeat failed")
                wait_ms = -1
            if wait_ms < 0:
                wait_ms = int(backoff.next_ms(self._rng))
            else:
                backoff.reset()
            try:
                async with asyncio.timeout(wait_ms / 1000):
                    await self._wake_event.wait()
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

    def _handle_response(self, heartbeat: BrokerHeartbeatRequest, response: Any, sent_s: float) -> int:
        """Handle a heartbeat's response; returns the ms until the next heartbeat,
        or -1 for the backoff's delay.
        """
        code = ErrorCode.of(response.error_code)
        if code in _REREGISTRATION_ERRORS and not self._wants_shutdown:
            logger.warning("broker %d is not known in epoch %d: registering again", self._node_id, self.epoch)
            self.register_again()
            return self._settings.heartbeat_interval_ms
        if code != ErrorCode.NONE:
            logger.debug("heartbeat refused: %s", code.name)
            return -1
        self._last_response_s = self._loop.time()
        self._session_start_s = sent_s
        for directory_id in heartbeat.offline_log_dirs:
            timer = self._offline_directories[directory_id]
            if timer is not None:
                timer.cancel()
                self._offline_directories[directory_id] = None
        is_fenced = bool(response.is_fenced)
        if is_fenced != self.is_fenced:
            logger.info("broker %d is %s", self._node_id, "fenced" if is_fenced else "unfenced")
        self.is_fenced = is_fenced
        self._may_shut_down = bool(response.should_shut_down)
        self._state_changed.set()
        if self._is_ready and is_fenced and not self._wants_shutdown:
            return -1
        return self._settings.heartbeat_interval_ms

    async def _register_again(self) -> None:
        try:
            await self.register(self.epoch)
            self.request_heartbeat()
        except RegistrationRefused as error:
            logger.error("%s", error)
        finally:
            self._registration_task = None
