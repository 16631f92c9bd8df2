"""The committed metadata of one node: it follows the quorum, replays committed records and
publishes images.

Every node has a tracker. An active controller passes it the images that it has built
(`take_committed`), so that no record is decoded twice. The tracker also writes snapshots.
Invariant: each advance of the high watermark publishes one image, in log order, and only
committed images are published.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from tidelog.replication.controller.metadata.image import METADATA_VERSION, MetadataDelta, MetadataImage
from tidelog.replication.controller.metadata.image_delta import difference, merge
from tidelog.replication.controller.metadata.image_records import image_records
from tidelog.replication.controller.metadata.loader import MetadataLoader
from tidelog.replication.controller.metadata.record_codec import LATEST_METADATA_VERSION, encode_record
from tidelog.replication.controller.metadata.records import MetadataError
from tidelog.replication.controller.raft_port import RaftLog, RunInExecutor
from tidelog.replication.quorum.listener import is_done
from tidelog.replication.quorum.raft.snapshot import SnapshotId

logger = logging.getLogger("tidelog.metadata")

# Records and batches that one turn of the loop replays, some 10 ms. Between two snapshots there may be 400,000.
REPLAYED_AT_ONCE = 2_000

OnImage = Callable[[MetadataImage, MetadataDelta], None]


class BuiltImage(NamedTuple):
    """An image from the active controller, and the size of its records."""

    image: MetadataImage
    delta: MetadataDelta
    size_bytes: int


class ActiveController(Protocol):
    """The tracker's interface to the controller of its node."""

    def on_lead(self, epoch: int, *, in_transaction: bool) -> None: ...
    def on_resign(self, epoch: int) -> None: ...

    def take_committed(self, end_offset: int) -> Sequence[BuiltImage] | None:
        """The images built for offsets below `end_offset`, each once; None
        while the controller is not active.
        """
        ...

    def on_published(self, end_offset: int) -> None:
        """All records below `end_offset` are published."""
        ...


class MetadataTracker:
    """The listener of a `RaftNode`; set `raft` before the node starts, and `controller` if it has
    one.

    `on_image(image, delta)` and `on_leader(leader_id, epoch)` are called on the loop thread.
    `on_failure(error)` is called when the log cannot be replayed; nothing is published afterwards.
    `snapshot_bytes_min`: bytes of records between two snapshots
    (metadata.log.max.record.bytes.between.snapshots). `snapshot_interval_ms`: the time after which
    a snapshot follows fewer bytes (metadata.log.max.snapshot.interval.ms), 0 for never.
    """

    raft: RaftLog
    controller: ActiveController | None

    def __init__(
        self,
        *,
        on_image: OnImage,
        loop: asyncio.AbstractEventLoop,
        run_in_executor: RunInExecutor,
        clock_ms: Callable[[], int],
        snapshot_bytes_min: int = 20 * 1024 * 1024,
        snapshot_interval_ms: int = 0,
        on_leader: Callable[[int, int], None] = lambda leader_id, epoch: None,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.image = MetadataImage()
        self.offset = -1
        self.leader_id = -1
        self.leader_epoch = 0
        self.controller = None
        self.failure: Exception | None = None
        self._on_image = on_image
        self._on_leader = on_leader
        self._on_failure = on_failure
        self._loop = loop
        self._run_in_executor = run_in_executor
        self._clock_ms = clock_ms
        self._loader = MetadataLoader()
        self._committed_end = 0  # as the quorum has told
        self._snapshot_bytes_min = snapshot_bytes_min
        self._snapshot_interval_ms = snapshot_interval_ms
        self._bytes_since_snapshot = 0
        self._last_snapshot_ms = clock_ms()
        self._snapshot_task: asyncio.Task[None] | None = None
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._waiter_numbers = count()

    # -- notices of the quorum ---------------------------------------------------------------------------------------

    def on_snapshot(self, identity: SnapshotId, values: list[bytes], timestamp_ms: int) -> None:
        """Load a snapshot, unless this node has newer metadata, as it may while it
        fetches damaged records again.
        """
        if self.failure is not None or identity.end_offset <= self.offset:
            return
        try:
            self._loader = MetadataLoader()
            self._feed(values, identity.end_offset - 1, identity.epoch, timestamp_ms)
            image, _ = self._loader.finish(self.leader_id)
            self._check_readable(image)
        except Exception as error:
            self._fail(error)
            return
        self._begin_counting()
        self._publish(image, difference(self.image, image))
        self._set_offset(identity.end_offset)

    def on_high_watermark(self, offset: int) -> Iterator[None] | None:
        """Publish all records below `offset`, which are committed, as one change. Returns the steps that are left of
        many: at a start this node is a voter meanwhile, and may lead.
        """
        self._committed_end = max(self._committed_end, offset)
        if self.failure is not None or offset <= self.offset + 1:
            return None
        built_images = None if self.controller is None else self.controller.take_committed(offset)
        if built_images is None:
            steps = self._read_to(offset)
            return None if is_done(steps) else steps
        if built_images:
            self._adopt(built_images)
        self._on_published(offset)
        return None

    def _on_published(self, end_offset: int) -> None:
        self._set_offset(end_offset)
        if self.controller is not None:
            self.controller.on_published(end_offset)
        self._maybe_snapshot()

    def on_damage(self) -> None:
        """Write a snapshot, because the image holds the content of what is damaged, or of the only snapshot left."""
        if self.failure is None and not self._loader.in_transaction:
            # No error: a follower whose log begins behind a fetched snapshot has only one. Damage has its own line.
            logger.info("writing a snapshot of the metadata: another one, or some of the log, is damaged or missing")
            self._begin_snapshot()

    def on_leader(self, leader_id: int, epoch: int) -> None:
        self.leader_id, self.leader_epoch = leader_id, epoch
        self._on_leader(leader_id, epoch)

    def on_lead(self, epoch: int) -> None:
        """Have the controller take over. It must not decide on a part of the metadata: an empty image would make it
        write the first records of a new cluster. A voter that is alone would be elected again at once: it ends, as
        Kafka's controller does after an error of the replay.
        """
        assert self.controller is not None, "a node without a controller leads the quorum"
        if self.failure is not None or self.offset + 1 < self._committed_end:
            if not self.raft.is_alone:
                logger.error("this node gives up the lead of epoch %d: it could not read all committed metadata", epoch)
                self.raft.resign()
            elif self.failure is None:
                self._fail(
                    MetadataError(
                        f"the metadata log is damaged at offset {self.offset + 1}, and no other voter has a copy: "
                        "restore it from a copy"
                    )
                )
            return
        self.controller.on_lead(epoch, in_transaction=self._loader.in_transaction)

    def on_resign(self, epoch: int) -> None:
        if self.controller is not None:
            self.controller.on_resign(epoch)

    # -- images ------------------------------------------------------------------------------------------------------

    def _read_to(self, offset: int) -> Iterator[None]:
        """Replay to `offset`, or to the first damaged record."""
        next_offset, is_read = self.offset + 1, False
        try:
            while not is_read:
                count, is_read = 0, True
                for batch in self.raft.read(next_offset):
                    if batch.last_offset >= offset:
                        break  # the next notice covers this batch
                    self._bytes_since_snapshot += sum(map(len, batch.values))
                    self._feed(batch.values, batch.last_offset, batch.epoch, batch.timestamp_ms)
                    next_offset = batch.last_offset + 1
                    count += 1 + len(batch.values)
                    if count >= REPLAYED_AT_ONCE:
                        is_read = False
                        break
                if not is_read:
                    yield
            built = None if self._loader.is_empty else self._loader.finish(self.leader_id)
            if built is not None:
                self._check_readable(built[0])
        except Exception as error:
            self._fail(error)
            return
        if built is not None:
            self._publish(*built)
        self._on_published(next_offset)

    def _feed(self, values: Iterable[bytes], last_offset: int, epoch: int, timestamp_ms: int) -> None:
        self._loader.feed(values, last_offset, epoch, timestamp_ms)
        for kind, times in self._loader.unknown_kinds.items():
            logger.warning("the metadata log holds %d records of unknown type %d: ignoring them", times, kind)
        self._loader.unknown_kinds.clear()

    def _adopt(self, built_images: Sequence[BuiltImage]) -> None:
        image, delta, size_bytes = built_images[0]
        for next_image in built_images[1:]:
            delta = merge(delta, next_image.delta, next_image.image)
            image = next_image.image
            size_bytes += next_image.size_bytes
        self._bytes_since_snapshot += size_bytes
        self._loader = MetadataLoader(image)
        self._publish(image, delta)

    def _check_readable(self, image: MetadataImage) -> None:
        level = image.feature_level(METADATA_VERSION)
        if level > LATEST_METADATA_VERSION:
            raise MetadataError(
                f"the cluster's metadata.version is {level}, this node reads up to {LATEST_METADATA_VERSION}"
            )

    def _publish(self, image: MetadataImage, delta: MetadataDelta) -> None:
        self.image = image
        self.offset = image.offset
        self._on_image(image, delta)

    def _fail(self, error: Exception) -> None:
        is_explained = isinstance(error, OSError | MetadataError)
        logger.critical("cannot replay the metadata log any more: %s", error, exc_info=not is_explained)
        self.failure = error
        self._on_failure(error)

    def on_failure(self, error: Exception) -> None:
        """This node has left the quorum, so that no more notices follow."""
        if self.failure is None:
            self.failure = error
            self._on_failure(error)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_for(self, offset: int) -> asyncio.Future[None]:
        """A future that is done when the record at `offset` is published. The caller may cancel it."""
        future: asyncio.Future[None] = self._loop.create_future()
        if offset <= self.offset:
            future.set_result(None)
        else:
            heapq.heappush(self._waiters, (offset, next(self._waiter_numbers), future))
        return future

    def _set_offset(self, end_offset: int) -> None:
        self.offset = end_offset - 1
        while self._waiters and self._waiters[0][0] <= self.offset:
            _, _, future = heapq.heappop(self._waiters)
            if not future.done():
                future.set_result(None)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def _maybe_snapshot(self) -> None:
        is_due = self._bytes_since_snapshot >= self._snapshot_bytes_min
        if not is_due and self._snapshot_interval_ms and self._bytes_since_snapshot:
            is_due = self._clock_ms() - self._last_snapshot_ms >= self._snapshot_interval_ms
        # An open transaction is not in the image, so its records must stay in the log.
        is_due = is_due and not self._loader.in_transaction
        if is_due:
            self._begin_snapshot()

    def _begin_snapshot(self) -> None:
        if self._snapshot_task is None and self.image.offset >= 0:
            self._begin_counting()
            self._snapshot_task = self._loop.create_task(self._snapshot(self.image), name="metadata snapshot")

    def _begin_counting(self) -> None:
        """Start the count of bytes and time for the next snapshot."""
        self._bytes_since_snapshot = 0
        self._last_snapshot_ms = self._clock_ms()

    async def _snapshot(self, image: MetadataImage) -> None:
        """Write the image as a snapshot, on another thread, which is safe because images do not change."""
        identity = SnapshotId(image.offset + 1, image.epoch)
        metadata_version = image.feature_level(METADATA_VERSION)
        now_ms = self._clock_ms()
        values = (encode_record(record, metadata_version) for record in image_records(image))
        write = self.raft.snapshot_writer(values, identity, image.timestamp_ms, now_ms)
        try:
            await self._run_in_executor(write)
            self.raft.snapshot_written(identity)
        except OSError as error:
            # The log still has all records, and the next snapshot may succeed.
            logger.error("cannot write a snapshot of the metadata at offset %d: %s", identity.end_offset, error)
        finally:
            self._snapshot_task = None

    async def close(self) -> None:
        """Cancel the waiters, and wait for a snapshot under way."""
        for _, _, future in self._waiters:
            future.cancel()
        self._waiters.clear()
        if self._snapshot_task is not None:
            await self._snapshot_task
