"""The controller of a node: standby until its node leads the quorum, then commands in and records out. A thin shell.

Decisions are the pure modules' and made at once on the newest state, committed or not; their records are appended, and
a command is answered when they are committed and published: in log order, image before answer. When the lead is lost
everything undecided fails with NOT_CONTROLLER, and what was not committed is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata_records import AbortTransactionRecord
from tidelog.replication.controller.commands import ControllerCommands
from tidelog.replication.controller.decisions.activation import ControllerIdentity, activation_records
from tidelog.replication.controller.decisions.leaders import (
    elect_preferred_leaders,
    elect_unclean_leaders,
    fence_brokers,
)
from tidelog.replication.controller.decisions.liveness import BrokerSessions
from tidelog.replication.controller.decisions.state import ControllerSettings, ControllerState
from tidelog.replication.controller.failure_detection import FailureDetector, Probe
from tidelog.replication.controller.metadata.image import METADATA_VERSION, BrokerImage, MetadataImage
from tidelog.replication.controller.metadata.image_delta import everything
from tidelog.replication.controller.metadata.record_codec import LATEST_METADATA_VERSION, encode_record
from tidelog.replication.controller.metadata.records import ImageBuilder
from tidelog.replication.controller.metadata.tracker import BuiltImage, MetadataTracker
from tidelog.replication.controller.raft_port import RaftLog
from tidelog.replication.ports import Endpoint

if TYPE_CHECKING:
    import random

logger = logging.getLogger("tidelog.controller")

T = TypeVar("T")

# What one request may create is one batch, so that it is there whole or not at all.
RECORDS_PER_BATCH = 20_000
TICKS_PER_SESSION = 8
TICK_MS_MIN, TICK_MS_MAX = 20, 250


class Controller(ControllerCommands):
    """The commands are in `commands.py`; here is how they are carried out, and what goes on between them.

    `probe(endpoint)`: what the host there says to an attempt to connect. `bootstrap_values()`: what Kafka's `format`
    left for the first start of a cluster.
    """

    def __init__(
        self,
        *,
        node_id: int,
        raft: RaftLog,
        tracker: MetadataTracker,
        settings: ControllerSettings,
        identity: ControllerIdentity,
        loop: asyncio.AbstractEventLoop,
        clock_ms: Callable[[], int],
        rng: random.Random,
        probe: Probe,
        bootstrap_values: Callable[[], Sequence[bytes]] = lambda: (),
    ) -> None:
        self.node_id = node_id
        self.is_active = False
        self.epoch = -1
        self._raft = raft
        self._tracker = tracker
        self._settings = settings
        self._identity = identity
        self._loop = loop
        self._clock_ms = clock_ms
        self._rng = rng
        self._bootstrap_values = bootstrap_values
        self._state = ControllerState(settings, rng, node_id)
        self._sessions = BrokerSessions(settings.session_timeout_ms)
        self._seen_brokers: Mapping[int, BrokerImage] = {}
        self._detector = FailureDetector(self, probe, loop, settings)
        self._built: deque[BuiltImage] = deque()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._tick_ms = min(max(settings.session_timeout_ms // TICKS_PER_SESSION, TICK_MS_MIN), TICK_MS_MAX)
        self._tick_due_ms = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._balance_due_ms = 0.0
        self._unclean_due_ms = 0.0
        tracker.controller = self

    @property
    def image(self) -> MetadataImage:
        """The newest committed one."""
        return self._tracker.image

    # -- the lead comes and goes -------------------------------------------------------------------------------------

    def on_lead(self, epoch: int, *, in_transaction: bool) -> None:
        """This node leads, and the tracker has published everything from before."""
        now_ms = self.now_ms()
        image = self._tracker.image
        self._state = ControllerState(self._settings, self._rng, self.node_id)
        self._state.adopt(image, everything(image))
        self._sessions = BrokerSessions(self._settings.session_timeout_ms)
        for broker in image.brokers.values():
            self._sessions.register(broker.node_id, broker.epoch, fenced=broker.fenced, now_ms=now_ms)
        self.epoch, self.is_active = epoch, True
        logger.info("controller %d is active in epoch %d", self.node_id, epoch)
        try:
            self._append(
                activation_records(self._state, self._identity, self._bootstrap_values, in_transaction=in_transaction)
            )
        except Exception:
            logger.critical("controller %d cannot take over", self.node_id, exc_info=True)
            self._raft.resign()
            return
        self._balance_due_ms = now_ms + self._settings.imbalance_check_interval_ms
        self._unclean_due_ms = now_ms + self._settings.unclean_check_interval_ms
        self._start_timer(now_ms)
        # A broker that died with the last controller would otherwise have a whole session.
        self._detector.suspect_all()

    def on_resign(self, epoch: int) -> None:
        if not self.is_active:
            return
        logger.info("controller %d is no longer active, epoch %d is over", self.node_id, epoch)
        self.is_active = False
        self._built.clear()
        self._detector.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(not_controller())

    async def close(self) -> None:
        """The quorum is closed first, or the node no longer leads; nothing is waited for."""
        self.on_resign(self.epoch)
        await self._detector.close()

    # -- commands ----------------------------------------------------------------------------------------------------

    def now_ms(self) -> float:
        """Of the monotonic clock."""
        return self._loop.time() * 1000

    async def command(self, decide: Callable[[], tuple[list[Any], T]], timeout_ms: int = 0) -> T:
        """Decide, append, wait until it is committed. Raises what `decide` does, NOT_CONTROLLER, REQUEST_TIMED_OUT."""
        self._check_active()
        records, answer = decide()
        self._append(records)
        # An answer without records may still rest on an image that is not committed yet: it waits too.
        if not self._built:
            return answer
        if timeout_ms <= 0:
            await self._committed()
            return answer
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._committed()
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT) from None
        return answer

    def _check_active(self) -> None:
        if not self.is_active:
            raise not_controller()

    def _append(self, records: Sequence[Any]) -> None:
        """As few atomic batches as their size allows. Raises KafkaError(NOT_CONTROLLER, UNKNOWN_SERVER_ERROR)."""
        for start in range(0, len(records), RECORDS_PER_BATCH):
            self._append_batch(records[start : start + RECORDS_PER_BATCH])

    def _append_batch(self, records: Sequence[Any]) -> None:
        now_ms = self._clock_ms()
        # A batch may raise the level itself, and then its other records are of the new one already.
        builder = ImageBuilder(self._state.image)
        builder.replay_all(record for record in records if not isinstance(record, AbortTransactionRecord))
        metadata_version = builder.feature_level(METADATA_VERSION) or LATEST_METADATA_VERSION
        values = [encode_record(record, metadata_version) for record in records]
        try:
            last_offset = self._raft.append(values, now_ms)
        except KafkaError:
            raise
        except Exception as error:
            if not self._raft.is_leader:
                raise not_controller() from error
            logger.critical("the metadata log cannot be written: %s", error)
            self._raft.resign()
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the metadata log failed: {error}") from error
        image, delta = builder.build(last_offset, self._raft.epoch, now_ms, self.node_id)
        self._state.adopt(image, delta)
        self._built.append(BuiltImage(image, delta, sum(map(len, values))))

    async def _committed(self) -> None:
        """Until everything appended so far is committed and published."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append((self._state.image.offset, future))
        await future

    def take_committed(self, end_offset: int) -> Sequence[BuiltImage] | None:
        if not self.is_active:
            return None
        committed: list[BuiltImage] = []
        while self._built and self._built[0].image.offset < end_offset:
            committed.append(self._built.popleft())
        return committed

    def on_published(self, end_offset: int) -> None:
        brokers = self._tracker.image.brokers
        if brokers is not self._seen_brokers:  # an image that changes none shares them with the one before
            self._seen_brokers = brokers
            self._detector.learn({broker.node_id: broker.epoch for broker in brokers.values()})
        while self._waiting and self._waiting[0][0] < end_offset:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)

    # -- between commands --------------------------------------------------------------------------------------------

    def _start_timer(self, now_ms: float) -> None:
        self._tick_due_ms = now_ms + self._tick_ms
        self._timer = self._loop.call_later(self._tick_ms / 1000, self._tick)

    def _tick(self) -> None:
        now_ms = self.now_ms()
        late_ms = now_ms - self._tick_due_ms
        if late_ms > self._tick_ms:
            self._sessions.forgive(late_ms)
        self._start_timer(now_ms)
        stale = self._sessions.stale(now_ms)
        if stale:
            self.fence(stale, "said nothing for the session timeout")
        if self._settings.auto_rebalance and now_ms >= self._balance_due_ms and self.is_active:
            more = self._do(elect_preferred_leaders)
            self._balance_due_ms = now_ms + (0 if more else self._settings.imbalance_check_interval_ms)
        if now_ms >= self._unclean_due_ms and self.is_active:
            more = self._do(elect_unclean_leaders)
            self._unclean_due_ms = now_ms + (0 if more else self._settings.unclean_check_interval_ms)

    def _do(self, decide: Callable[[ControllerState], list[Any]]) -> bool:
        """Something nobody waits for; whether there was anything to do."""
        try:
            records = decide(self._state)
            self._append(records)
        except KafkaError as error:
            logger.warning("%s came to nothing: %s", decide, error)
            return False
        return bool(records)

    def unfenced_epochs(self) -> dict[int, int]:
        """Broker id -> epoch of those whose session lives."""
        return {broker_id: self._sessions.epoch_of(broker_id) for broker_id in self._sessions.unfenced()}

    def last_contact_ms(self, broker_id: int) -> float:
        return self._sessions.last_contact_ms(broker_id)

    def broker_endpoint(self, broker_id: int) -> Endpoint | None:
        """Where other brokers reach it; None where it has no listener of the name that this controller knows.

        Another listener says nothing: its address may be meant for clients, and lead to this host here.
        """
        broker = self.image.brokers.get(broker_id)
        listener = None if broker is None else broker.endpoints.get(self._settings.inter_broker_listener)
        return None if listener is None else Endpoint(listener.host, listener.port)

    def fence(self, broker_ids: Sequence[int], why: str) -> None:
        """All in one decision."""
        self._sessions.fence(broker_ids)
        known = [
            broker_id
            for broker_id in broker_ids
            if broker_id in self._state.image.brokers and not self._state.image.brokers[broker_id].fenced
        ]
        if known:
            logger.info("fencing brokers %s: %s", known, why)
            self._do(lambda state: fence_brokers(state, known))

    def broker_connection_lost(self, broker_id: int, broker_epoch: int) -> None:
        """A broker's connection to this controller is gone; if its process is too, it is fenced at once."""
        if self.is_active and self.unfenced_epochs().get(broker_id) == broker_epoch:
            self._detector.suspect(broker_id, broker_epoch)


def not_controller() -> KafkaError:
    return KafkaError(ErrorCode.NOT_CONTROLLER, "This node is not the active controller.")
