"""The controller: commands in, records into the metadata log, images out to the node. A thin asynchronous shell.

Decisions are `state.py`'s and made at once on the newest image, committed or not; then the records are appended, and
one sync serves all who wait (a command that finds one running joins the next). An image is published, and its command
answered, only when the log is synced up to it: in log order, image before answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata_records import AbortTransactionRecord
from tidelog.replication.controller.image import METADATA_VERSION, EndpointImage, MetadataDelta, MetadataImage
from tidelog.replication.controller.image_records import image_records
from tidelog.replication.controller.loader import MetadataLoader
from tidelog.replication.controller.record_codec import LATEST_METADATA_VERSION, decode_record, encode_record
from tidelog.replication.controller.records import ImageBuilder, MetadataError
from tidelog.replication.controller.registration import (
    NEW_CLUSTER_FEATURES,
    SUPPORTED_FEATURES,
    BrokerRegistration,
    bootstrap_records,
    register_broker,
    register_controller,
    unfence_broker,
)
from tidelog.replication.controller.returning import elect_returning_broker
from tidelog.replication.controller.state import ControllerState, CreatedTopic, NewTopic, ProducerIdBlock
from tidelog.replication.quorum.single import QuorumOfOne
from tidelog.replication.quorum.snapshot import SnapshotId

log = logging.getLogger("tidelog.controller")

T = TypeVar("T")
OnImage = Callable[[MetadataImage, MetadataDelta], None]
RunInExecutor = Callable[[Callable[[], None]], Awaitable[None]]

RECORDS_PER_BATCH = 10_000


class _Appended(NamedTuple):
    """An image that waits for its records to be synced."""

    image: MetadataImage
    delta: MetadataDelta


class Controller:
    """`load`, then `activate`, then commands; `image` is the newest committed one.

    `run_in_executor(callable)` runs a sync on another thread and awaits it; `on_image` gets each committed image and
    what changed in it, on the loop thread, before the command that caused it is answered. A snapshot is written after
    every `snapshot_bytes_min` bytes of records (metadata.log.max.record.bytes.between.snapshots).
    """

    def __init__(
        self,
        quorum: QuorumOfOne,
        state: ControllerState,
        *,
        run_in_executor: RunInExecutor,
        clock_ms: Callable[[], int],
        on_image: OnImage,
        snapshot_bytes_min: int = 20 * 1024 * 1024,
    ) -> None:
        self.image = state.image
        self._quorum = quorum
        self._state = state
        self._run_in_executor = run_in_executor
        self._clock_ms = clock_ms
        self._on_image = on_image
        self._pending: deque[_Appended] = deque()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._syncing: asyncio.Task[None] | None = None
        self._snapshot_bytes_min = snapshot_bytes_min
        self._bytes_since_snapshot = 0
        self._snapshotting: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._was_in_transaction = False
        self._node_id = -1

    # -- start and end -----------------------------------------------------------------------------------------------

    def load(self) -> MetadataImage:
        """Replay what the log directory holds. Nothing is published before `activate`.

        Raises `MetadataError`, `CorruptSnapshot`, `NotAlone`, `CorruptLog`.
        """
        loader = MetadataLoader()
        for batch in self._quorum.replay():
            loader.feed(batch.values, batch.last_offset, batch.epoch, batch.timestamp_ms)
            self._bytes_since_snapshot += 0 if batch.is_snapshot else sum(map(len, batch.values))
        for kind, count in loader.unknown_kinds.items():
            log.warning("metadata log holds %d records of unknown kind %d: kept, not acted upon", count, kind)
        self._was_in_transaction = loader.in_transaction
        image, delta = loader.finish()
        if image.feature_level(METADATA_VERSION) > LATEST_METADATA_VERSION:
            raise MetadataError(
                f"the cluster's metadata.version is {image.feature_level(METADATA_VERSION)}, "
                f"this node reads up to {LATEST_METADATA_VERSION}"
            )
        self._state.adopt(image, delta)
        return image

    async def activate(
        self,
        registration: BrokerRegistration,
        *,
        controller_endpoints: Iterable[EndpointImage] = (),
        new_leader_epochs: bool = False,
    ) -> None:
        """Take the lead in a new epoch and bring this node's broker in, unfenced; publish the first image.

        `new_leader_epochs`: see `elect_returning_broker`; true unless the last shutdown was clean.
        """
        now_ms = self._clock_ms()
        self._node_id = registration.node_id
        self._quorum.lead(now_ms)
        records: list[Any] = (
            [AbortTransactionRecord(reason="a new leader found it open")] if self._was_in_transaction else []
        )
        if METADATA_VERSION not in self._state.image.features:
            formatted = [decode_record(value) for value in self._quorum.bootstrap_values()]
            records += formatted or bootstrap_records(NEW_CLUSTER_FEATURES)
        records.append(
            register_controller(
                registration.node_id, registration.incarnation_id, controller_endpoints, SUPPORTED_FEATURES
            )
        )
        broker_epoch = self._quorum.end_offset + len(records)
        records.append(register_broker(registration, broker_epoch))
        records.append(unfence_broker(registration.node_id, broker_epoch))
        records += elect_returning_broker(self._state.image, registration.node_id, new_epochs=new_leader_epochs)
        for start in range(0, len(records), RECORDS_PER_BATCH):
            self._append(records[start : start + RECORDS_PER_BATCH])
        # What readers see first is the whole of it, as one change from nothing.
        self._pending.clear()
        self._pending.append(_Appended(self._state.image, everything(self._state.image)))
        await self._committed()

    async def close(self) -> None:
        """Wait for what was appended. The log itself is its directory's to close."""
        for task in (self._syncing, self._snapshotting):
            if task is not None:
                await task

    # -- commands ----------------------------------------------------------------------------------------------------

    async def create_topics(
        self, topics: Sequence[NewTopic], *, validate_only: bool = False, timeout_ms: int = 0
    ) -> dict[str, CreatedTopic | KafkaError]:
        """Each topic's outcome. Raises KafkaError(POLICY_VIOLATION, REQUEST_TIMED_OUT) for the whole request."""
        if validate_only:
            _, results = self._state.create_topics(topics)
            return results
        return await self._command(lambda: self._state.create_topics(topics), timeout_ms)

    async def delete_topics(self, topic_ids: Sequence[bytes], *, timeout_ms: int = 0) -> dict[bytes, KafkaError | None]:
        """Each topic's outcome: None where it is gone. Raises KafkaError(REQUEST_TIMED_OUT)."""
        return await self._command(lambda: self._state.delete_topics(topic_ids), timeout_ms)

    async def allocate_producer_ids(self, broker_id: int) -> ProducerIdBlock:
        """Raises KafkaError(BROKER_ID_NOT_REGISTERED)."""
        return await self._command(lambda: self._state.allocate_producer_ids(broker_id), 0)

    async def _command(self, decide: Callable[[], tuple[list[Any], T]], timeout_ms: int) -> T:
        if self._failure is not None:
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the metadata log failed: {self._failure}")
        records, answer = decide()
        if records:
            self._append(records)
        # An answer without records may still rest on an image that is not committed yet: it waits too.
        try:
            async with asyncio.timeout(timeout_ms / 1000 if timeout_ms > 0 else None):
                await self._committed()
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT) from None
        return answer

    # -- appending and committing ------------------------------------------------------------------------------------

    def _append(self, records: Sequence[Any]) -> None:
        now_ms = self._clock_ms()
        # A batch may raise the level itself, and then its other records are of the new one already.
        builder = ImageBuilder(self._state.image)
        builder.replay_all(record for record in records if not isinstance(record, AbortTransactionRecord))
        metadata_version = builder.feature_level(METADATA_VERSION) or LATEST_METADATA_VERSION
        values = [encode_record(record, metadata_version) for record in records]
        try:
            last_offset = self._quorum.append(values, now_ms)
        except OSError as error:
            self._fail(error)
            raise KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the metadata log failed: {error}") from error
        self._bytes_since_snapshot += sum(map(len, values))
        image, delta = builder.build(last_offset, self._quorum.epoch, now_ms, self._node_id)
        self._state.adopt(image, delta)
        self._pending.append(_Appended(image, delta))

    async def _committed(self) -> None:
        """Until everything appended so far is committed."""
        if not self._pending:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((self._pending[-1].image.offset, future))
        if self._syncing is None:
            self._syncing = loop.create_task(self._sync_all(), name="metadata log sync")
        await future

    async def _sync_all(self) -> None:
        try:
            while self._pending:
                end = self._pending[-1].image.offset
                task = self._quorum.log.begin_flush()
                await self._run_in_executor(task.run)
                self._quorum.log.finish_flush(task)
                self._quorum.log.set_high_watermark(end + 1)
                self._publish(end)
        except Exception as error:
            self._fail(error)
        finally:
            self._syncing = None

    def _publish(self, committed_offset: int) -> None:
        while self._pending and self._pending[0].image.offset <= committed_offset:
            appended = self._pending.popleft()
            self.image = appended.image
            self._on_image(appended.image, appended.delta)
        while self._waiting and self._waiting[0][0] <= committed_offset:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)

        if self._bytes_since_snapshot >= self._snapshot_bytes_min and self._snapshotting is None:
            self._bytes_since_snapshot = 0
            self._snapshotting = asyncio.get_running_loop().create_task(self._snapshot(self.image), name="snapshot")

    async def _snapshot(self, image: MetadataImage) -> None:
        """The image as a file beside the log, made on another thread: images do not change."""
        identity = SnapshotId(image.offset + 1, image.epoch)
        metadata_version = image.feature_level(METADATA_VERSION)
        now_ms = self._clock_ms()

        def write() -> None:
            values = (encode_record(record, metadata_version) for record in image_records(image))
            self._quorum.write_snapshot(values, identity, image.timestamp_ms, now_ms)

        try:
            await self._run_in_executor(write)
            self._quorum.forget_before(identity, now_ms)
        except OSError as error:
            # The log has it all; the next one may succeed.
            log.error("snapshot of the metadata at offset %d failed: %s", identity.end_offset, error)
        finally:
            self._snapshotting = None

    def _fail(self, error: Exception) -> None:
        """The metadata log cannot be written any more: refuse whatever comes, keep serving what is known."""
        log.critical("metadata log failed, the cluster's metadata can no longer change: %s", error)
        self._failure = error
        self._pending.clear()
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_exception(KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, f"the metadata log failed: {error}"))


def everything(image: MetadataImage) -> MetadataDelta:
    """The difference between nothing and an image."""
    return MetadataDelta(
        created_topics=dict(image.topics_by_id),
        changed_partitions={topic_id: set(topic.partitions) for topic_id, topic in image.topics_by_id.items()},
        changed_configs=set(image.configs),
        changed_brokers=set(image.brokers),
        changed_features=True,
    )
