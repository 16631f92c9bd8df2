"""The controller of a node: a thin shell that turns commands into records while the node leads the
quorum.

The pure modules in `decisions` decide, at once and on the newest state, committed or not. The
controller appends their records. Invariant: a command is answered after its records are committed
and their image is published, in log order. When the node loses the lead, pending commands fail with
NOT_CONTROLLER, and the uncommitted state is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
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
from tidelog.replication.controller.decisions.state import ControllerSettings, ControllerState, Steps, at_once
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

# A client's request for more records is refused, so that its records are one atomic batch.
RECORDS_PER_BATCH = 20_000
TICKS_PER_SESSION = 8
TICK_MS_MIN, TICK_MS_MAX = 20, 250
TRIES_IN_STEPS = 3
# Fewer than a broker forwards at a time (FORWARDED_REQUESTS_MAX): small requests must not wait behind them there.
LARGE_UNDER_WAY_MAX = 100


class Controller(ControllerCommands):
    """Carries out the commands of `commands.py`, and the periodic tasks between them.

    `probe(endpoint)`: the result of an attempt to connect. `bootstrap_values()`: the records that
    Kafka's `format` wrote for the first start of a cluster.
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
        self._published_brokers: Mapping[int, BrokerImage] = {}
        self._detector = FailureDetector(self, probe, loop, settings)
        self._uncommitted_images: deque[BuiltImage] = deque()
        self._pending_commands: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._tick_ms = min(max(settings.session_timeout_ms // TICKS_PER_SESSION, TICK_MS_MIN), TICK_MS_MAX)
        self._tick_due_ms = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._balance_due_ms = 0.0
        self._unclean_due_ms = 0.0
        self._large_decision = asyncio.Lock()  # one at a time: each holds up to 10,000 records until its end
        self._large_under_way = 0
        self.pause: Callable[[], Awaitable[None]] = partial(asyncio.sleep, 0)
        """Lets others be served; the node has a fairer one."""
        tracker.controller = self

    @property
    def image(self) -> MetadataImage:
        """The newest committed image."""
        return self._tracker.image

    # -- changes of leadership ---------------------------------------------------------------------------------------

    def on_lead(self, epoch: int, *, in_transaction: bool) -> None:
        """This node leads the quorum, and the tracker has published all earlier records. Their replay takes time: the
        lead may be over, and this node may lead in a later epoch.
        """
        if not self._raft.is_leader or self._raft.epoch != epoch:
            return
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
        # Otherwise a broker that died together with the last controller would keep
        # its session until the timeout.
        self._detector.suspect_all()

    def on_resign(self, epoch: int) -> None:
        if not self.is_active:
            return
        logger.info("controller %d is no longer active, epoch %d is over", self.node_id, epoch)
        self.is_active = False
        self._uncommitted_images.clear()
        self._detector.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._pending_commands:
            _, future = self._pending_commands.popleft()
            if not future.done():
                future.set_exception(not_controller())

    async def close(self) -> None:
        """Stop without waiting for commits. The quorum is closed before, or the node no longer
        leads.
        """
        self.on_resign(self.epoch)
        await self._detector.close()

    # -- commands ----------------------------------------------------------------------------------------------------

    def now_ms(self) -> float:
        """Monotonic time."""
        return self._loop.time() * 1000

    async def command(self, decide: Callable[[], tuple[list[Any], T]], timeout_ms: int = 0) -> T:
        """Decide, append, and wait for the commit. Raises the errors of `decide`,
        NOT_CONTROLLER, REQUEST_TIMED_OUT.
        """
        self._check_active()
        records, result = decide()
        self._append(records)
        # A result without records may depend on an uncommitted image, so it waits too.
        if not self._uncommitted_images:
            return result
        if timeout_ms <= 0:
            await self._wait_until_committed()
            return result
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._wait_until_committed()
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT) from None
        return result

    async def command_in_steps(self, decide: Callable[[], Steps[T]], timeout_ms: int = 0) -> T:
        """As `command`; others are served between the steps of the decision. If one of them has changed the image, it
        is made again, the last time in one step. Raises also POLICY_VIOLATION for more than one atomic batch, and
        THROTTLING_QUOTA_EXCEEDED.
        """
        self._check_active()
        try:
            next(steps := decide())
        except StopIteration as end:
            small: tuple[list[Any], T] = end.value
            return await self.command(lambda: _in_one_batch(small), timeout_ms)
        steps.close()
        if self._large_under_way >= LARGE_UNDER_WAY_MAX:
            raise KafkaError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "too many large requests are under way")
        self._large_under_way += 1
        try:
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms > 0 else None):
                async with self._large_decision:
                    decided = await self._decided_in_steps(decide)
                return await self.command(lambda: _in_one_batch(decided or at_once(decide())))
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT) from None
        finally:
            self._large_under_way -= 1

    async def _decided_in_steps(self, decide: Callable[[], Steps[T]]) -> tuple[list[Any], T] | None:
        """None if others have changed the image again and again."""
        for _ in range(TRIES_IN_STEPS):
            self._check_active()
            state, image = self._state, self._state.image
            steps = decide()
            while True:
                try:
                    next(steps)
                except StopIteration as end:
                    decided: tuple[list[Any], T] = end.value
                    break
                await self.pause()
            if self._state is state and (state.image is image or not decided[0]):
                return decided
        return None

    def _check_active(self) -> None:
        """An answer without records is not proven by a commit: it must come from the present controller, too."""
        if not self.is_active or self._raft.has_lost_majority:
            raise not_controller()

    def _append(self, records: Sequence[Any]) -> None:
        """Append in atomic batches, as few as possible. Raises
        KafkaError(NOT_CONTROLLER, UNKNOWN_SERVER_ERROR).
        """
        for start in range(0, len(records), RECORDS_PER_BATCH):
            self._append_batch(records[start : start + RECORDS_PER_BATCH])

    def _append_batch(self, records: Sequence[Any]) -> None:
        now_ms = self._clock_ms()
        # A batch may change the metadata version, which then applies to its other records.
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
        self._uncommitted_images.append(BuiltImage(image, delta, sum(map(len, values))))

    async def _wait_until_committed(self) -> None:
        """Wait until all records appended so far are committed and published."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._pending_commands.append((self._state.image.offset, future))
        await future

    def take_committed(self, end_offset: int) -> Sequence[BuiltImage] | None:
        if not self.is_active:
            return None
        committed: list[BuiltImage] = []
        while self._uncommitted_images and self._uncommitted_images[0].image.offset < end_offset:
            committed.append(self._uncommitted_images.popleft())
        return committed

    def on_published(self, end_offset: int) -> None:
        brokers = self._tracker.image.brokers
        if brokers is not self._published_brokers:  # images share the brokers while they are unchanged
            self._published_brokers = brokers
            others = [broker for broker in brokers.values() if broker.node_id != self.node_id]
            serving = {broker.node_id for broker in others if not broker.fenced}
            self._detector.learn({broker.node_id: broker.epoch for broker in others}, serving)
        while self._pending_commands and self._pending_commands[0][0] < end_offset:
            _, future = self._pending_commands.popleft()
            if not future.done():
                future.set_result(None)

    # -- periodic tasks ----------------------------------------------------------------------------------------------

    def _start_timer(self, now_ms: float) -> None:
        self._tick_due_ms = now_ms + self._tick_ms
        self._timer = self._loop.call_later(self._tick_ms / 1000, self._tick)

    def _tick(self) -> None:
        now_ms = self.now_ms()
        late_ms = now_ms - self._tick_due_ms
        if late_ms > self._tick_ms:
            self._sessions.forgive(late_ms)
        self._start_timer(now_ms)
        stale_ids = self._sessions.stale(now_ms)
        if stale_ids:
            self.fence(stale_ids, "said nothing for the session timeout")
        if self._settings.auto_rebalance and now_ms >= self._balance_due_ms and self.is_active:
            has_more = self._run_decision(elect_preferred_leaders)
            self._balance_due_ms = now_ms + (0 if has_more else self._settings.imbalance_check_interval_ms)
        if now_ms >= self._unclean_due_ms and self.is_active:
            has_more = self._run_decision(elect_unclean_leaders)
            self._unclean_due_ms = now_ms + (0 if has_more else self._settings.unclean_check_interval_ms)

    def _run_decision(self, decide: Callable[[ControllerState], list[Any]]) -> bool:
        """Carry out a decision of the controller itself; returns whether it had records."""
        try:
            records = decide(self._state)
            self._append(records)
        except KafkaError as error:
            logger.warning("%s failed: %s", decide, error)
            return False
        return bool(records)

    def unfenced_epochs(self) -> dict[int, int]:
        """Broker id -> epoch, of the unfenced brokers."""
        return {broker_id: self._sessions.epoch_of(broker_id) for broker_id in self._sessions.unfenced()}

    def last_contact_ms(self, broker_id: int) -> float:
        return self._sessions.last_contact_ms(broker_id)

    def broker_endpoint(self, broker_id: int) -> Endpoint | None:
        """The endpoint of the inter-broker listener that this controller is configured with, or
        None.

        Other listeners are no substitute: the address of a client listener may lead to this host.
        """
        broker = self.image.brokers.get(broker_id)
        listener = None if broker is None else broker.endpoints.get(self._settings.inter_broker_listener)
        return None if listener is None else Endpoint(listener.host, listener.port)

    def fence(self, broker_ids: Sequence[int], reason: str) -> None:
        """Fence the brokers in one decision."""
        self._sessions.fence(broker_ids)
        unfenced_ids = [
            broker_id
            for broker_id in broker_ids
            if broker_id in self._state.image.brokers and not self._state.image.brokers[broker_id].fenced
        ]
        if unfenced_ids:
            logger.info("fencing brokers %s: %s", unfenced_ids, reason)
            self._run_decision(lambda state: fence_brokers(state, unfenced_ids))

    def broker_connection_lost(self, broker_id: int, broker_epoch: int) -> None:
        """A broker's connection to this controller is closed. Fence the broker
        at once if its process is gone.
        """
        if self.is_active and self.unfenced_epochs().get(broker_id) == broker_epoch:
            self._sessions.fell_silent(broker_id)
            self._detector.suspect(broker_id, broker_epoch)

    def suspect(self, broker_id: int) -> None:
        self._detector.suspect(broker_id, self._sessions.epoch_of(broker_id))


def _in_one_batch(decided: tuple[list[Any], T]) -> tuple[list[Any], T]:
    if len(decided[0]) > RECORDS_PER_BATCH:
        raise KafkaError(ErrorCode.POLICY_VIOLATION, "Unable to perform excessively large batch operation.")
    return decided


def not_controller() -> KafkaError:
    return KafkaError(ErrorCode.NOT_CONTROLLER, "This node is not the active controller.")
