"""RaftNode: this node's part in the metadata quorum. A shell: what is to be done is `raft.py`'s to say.

It sends, appends, wakes and reports; requests are answered in `service.py`, syncs are `metadata_sync.py`'s and
`vote_writer.py`'s. Invariants: nothing is told to anybody before the vote and epoch it rests on are on the device; what
a follower reports and a leader counts of its own log is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable
from tidelog.replication.quorum import wire
from tidelog.replication.quorum.acknowledged import FILE_NAME as ACKNOWLEDGED_FILE
from tidelog.replication.quorum.files.metadata_cleaner import MetadataCleaner
from tidelog.replication.quorum.files.metadata_log import LACKING_FILE, MetadataLog, ReplayedBatch
from tidelog.replication.quorum.files.metadata_sync import MetadataSync
from tidelog.replication.quorum.files.vote_store import InconsistentVoters, VoteStore, election_in
from tidelog.replication.quorum.files.vote_writer import VoteWriter
from tidelog.replication.quorum.listener import MetadataListener, News
from tidelog.replication.quorum.metadata_scrubber import MetadataScrubber
from tidelog.replication.quorum.raft import following
from tidelog.replication.quorum.raft.messages import (
    AppendLeaderChange,
    AppendRecords,
    AppendVoters,
    FetchAsk,
    KeepSnapshotPart,
    Persist,
    Recovered,
    ReportHighWatermark,
    ReportLead,
    ReportLeader,
    ReportResign,
    Send,
    Truncate,
    WakeFetches,
)
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.replica import NEVER, lane_of
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.quorum.raft.snapshot import CorruptSnapshot, Snapshot, SnapshotId
from tidelog.replication.quorum.raft.state import Follower, Leader
from tidelog.replication.quorum.raft.voters import ReplicaKey, Voter, VoterHistory, VoterSet, static_voters
from tidelog.replication.quorum.service import QuorumService
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog
from tidelog.storage.segments.damage import DamagedRecords

__all__ = ["InconsistentVoters", "MetadataListener", "NotLeader", "QuorumSettings", "RaftNode", "ReplayedBatch"]

logger = logging.getLogger("tidelog.quorum")

# Answers a request message of that version with a response message; see `service.py`.
Served = Callable[[Any, int], Awaitable[Any]]

# A leader that closes waits so long for the others to hear of it.
FAREWELL_MS = 250
SHORTAGE_TOLD_EVERY_MS = 10_000.0


class NotLeader(Exception):
    """This node does not lead the metadata quorum, so it may not append."""


class RaftNode:
    """`root`: the log directory that holds `__cluster_metadata-0`, whose log is `log`.

    `keeps_writes`: all that the process before this one wrote there is in its files.
    """

    def __init__(
        self,
        *,
        node_id: int,
        directory_id: bytes,
        cluster_id: str,
        disk: Disk,
        root: str,
        log: PartitionLog,
        settings: QuorumSettings,
        can_vote: bool,
        loop: asyncio.AbstractEventLoop,
        exchange: Exchange,
        run_in_executor: Callable[[Callable[[], Any]], Awaitable[Any]],
        clock_ms: Callable[[], int],
        rng: random.Random,
        listener: MetadataListener,
        keeps_writes: bool = False,
    ) -> None:
        self.settings = settings
        self.loop = loop
        self.exchange = exchange
        self.run_in_executor = run_in_executor
        self.clock_ms = clock_ms
        self.is_closed = False
        self._keeps_writes = keeps_writes
        self._plain_log = log
        self._cluster_id = cluster_id
        self._listener = listener
        self._history = VoterHistory(_configured_voters(settings, node_id, can_vote))
        self.log = MetadataLog(disk, root, log, self._history)
        self._votes = VoteStore(disk, self.log.directory)
        self.raft = Raft(
            own=ReplicaKey(node_id, directory_id),
            own_endpoints=settings.own_endpoints,
            can_vote=can_vote,
            settings=settings,
            log=self.log,
            voters=self._history,
            rng=rng,
        )
        service = self._service = QuorumService(self, cluster_id)
        self.vote: Served = partial(self._served, service.vote)
        self.begin_quorum_epoch: Served = partial(self._served, service.begin_quorum_epoch)
        self.end_quorum_epoch: Served = partial(self._served, service.end_quorum_epoch)
        self.fetch: Served = partial(self._served, service.fetch)
        self.fetch_snapshot: Served = partial(self._served, service.fetch_snapshot)
        self.describe_quorum: Served = partial(self._served, service.describe_quorum)
        self.add_voter: Served = partial(self._served, service.add_voter)
        self.remove_voter: Served = partial(self._served, service.remove_voter)
        self.update_voter: Served = partial(self._served, service.update_voter)
        self._failure: Exception | None = None
        self._is_driving = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._sync = MetadataSync(self.log, log, loop, run_in_executor, self.drive, self.tolerates)
        self._cleaner = MetadataCleaner(self.log, settings.retention, loop, clock_ms, self.tolerates)
        self._scrubber = MetadataScrubber(
            self.log,
            log,
            settings,
            loop,
            run_in_executor,
            self.meet_damage,
            self._meet_damaged_snapshots,
            self.tolerates,
        )
        self._vote_writer = VoteWriter(self._votes, self._history, loop, run_in_executor, self.tolerates)
        self._news = News(loop)
        self._effects = self._handlers(listener)

    _shortage_told_ms = -SHORTAGE_TOLD_EVERY_MS

    def _handlers(self, listener: MetadataListener) -> dict[type, Callable[[Any], None]]:
        return {
            Persist: lambda effect: self._vote_writer.write(effect.state),
            Send: self._send,
            AppendLeaderChange: self._append_leader_change,
            AppendVoters: self._append_voters,
            AppendRecords: self._append_records,
            Truncate: self._truncate,
            KeepSnapshotPart: self._keep_part,
            ReportLeader: lambda told: self._news.tell(partial(listener.on_leader, told.leader_id, told.epoch)),
            ReportHighWatermark: self._report_high_watermark,
            ReportLead: lambda told: self._news.tell(partial(listener.on_lead, told.epoch)),
            ReportResign: lambda told: self._news.tell(partial(listener.on_resign, told.epoch)),
            WakeFetches: lambda told: self._service.wake(),
            Recovered: lambda told: self.log.recovered(),
        }

    # -- start and end -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the vote file, snapshot and log; tell the listener of the snapshot; begin electing or fetching.

        Raises CorruptSnapshot, CorruptQuorumState, CorruptLog, InconsistentVoters.
        """
        found = self.log.load(is_voter=self.raft.can_vote, keeps_writes=self._keeps_writes)
        if self.raft.can_vote and self.log.end_offset == 0:
            self.log.bootstrap_values()  # where they are damaged no controller can begin
        if self.log.lacks_records and self._is_alone:
            self._recover_alone()
        self.raft.lacks_records, self.raft.acknowledged = self.log.lacks_records, self.log.acknowledged_end
        election = election_in(self._votes.read(), self._history, self.raft.can_vote)
        if found is not None:
            identity, snapshot = found
            self._listener.on_snapshot(identity, snapshot.values, snapshot.last_timestamp_ms)
        self.raft.start(election, self.now_ms())
        self._flush()
        self._cleaner.begin()
        self._scrubber.begin()
        self.drive()

    @property
    def _is_alone(self) -> bool:
        """Whether, as far as is known, no other voter has a copy of the log."""
        if not self.raft.can_vote or not self._history.latest.is_only(self.raft.own):
            return False
        # What is damaged may name other voters: those servers know.
        own = [endpoint for _, endpoint in self.settings.own_endpoints]
        return all(server in own for server in self.settings.bootstrap_servers)

    def _recover_alone(self) -> None:
        """Raises CorruptLog."""
        if not self.log.lacks_unfinished_batch_only:
            raise CorruptLog(
                f"{self.log.directory}: {self.log.damage}, and no other voter has a copy: restore it, or remove "
                f"{LACKING_FILE} and {ACKNOWLEDGED_FILE} there to go on without what follows"
            )
        self.log.recovered("the last batch was not written to its end: nothing had acknowledged it")

    async def close(self) -> None:
        """A leader resigns. The log is its directory's to close."""
        if self.is_closed:
            return
        self.raft.is_closing = True
        if isinstance(self.raft.state, Leader):
            self.resign()
            if self._tasks:
                await asyncio.wait(list(self._tasks), timeout=FAREWELL_MS / 1000)
        self.is_closed = True
        self._cleaner.close()
        if self._timer is not None:
            self._timer.cancel()
        self._service.wake()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._scrubber.close()
        await self._sync.close()
        await self._vote_writer.close()
        self._close_log()
        self._service.close()
        self._news.deliver()

    def _close_log(self) -> None:
        try:
            self.log.close()
        except OSError as error:
            logger.error("%s: %s", self.log.directory, error)

    # -- what the node asks ------------------------------------------------------------------------------------------

    @property
    def leader_id(self) -> int:
        """-1: nobody known."""
        return self.raft.leader_id

    @property
    def epoch(self) -> int:
        return self.raft.epoch

    @property
    def high_watermark(self) -> int:
        """Committed offsets are below it; -1 while unknown."""
        return self.raft.high_watermark

    @property
    def leader_high_watermark(self) -> int:
        """What the leader of this epoch has said is committed; -1 while it has said nothing."""
        state = self.raft.state
        if isinstance(state, Leader):
            return state.progress.high_watermark
        return state.leader_high_watermark if isinstance(state, Follower) else -1

    @property
    def end_offset(self) -> int:
        return self.log.end_offset

    @property
    def is_leader(self) -> bool:
        """It leads and has told the listener so, or is about to."""
        return self.raft.is_active_leader and self._failure is None

    def leader_endpoint(self) -> Endpoint | None:
        return self.raft.known_leader_endpoint()

    def voters(self) -> VoterSet:
        return self._history.latest

    @property
    def kraft_version(self) -> int:
        """1 where voters can be added and removed."""
        return self._history.kraft_version

    def voter_ids(self) -> list[int]:
        return self._history.latest.ids

    def append(self, values: Sequence[bytes], now_ms: int) -> int:
        """One batch, all or nothing; the offset of its last record. Raises NotLeader, OSError, KafkaError.

        Who cannot append leads no longer.
        """
        if not self.is_leader or self.is_closed:
            raise NotLeader(f"node {self.raft.leader_id} leads in epoch {self.raft.epoch}")
        try:
            last_offset = self.log.append_values(values, self.raft.epoch, now_ms)
        except (OSError, CorruptLog) as error:
            if self.tolerates(error):
                self.resign()
            raise
        self._appended()
        return last_offset

    def read(self, from_offset: int) -> Iterator[ReplayedBatch]:
        """Committed batches from `from_offset` on, up to the high watermark of now, or to the first damaged one.

        Another report of the high watermark follows once damaged ones have been fetched again.
        """
        try:
            # Damage may have cut the log below the high watermark.
            yield from self.log.read(from_offset, min(self.raft.high_watermark, self.log.end_offset))
        except DamagedRecords:
            self.loop.call_soon(self.meet_damage)

    def bootstrap_values(self) -> list[bytes]:
        """What Kafka's `format` left for the first start (bootstrap.checkpoint); empty without one."""
        return self.log.bootstrap_values()

    def resign(self) -> None:
        """Lead no longer, and say so to the others (EndQuorumEpoch)."""
        self.raft.resign(self.now_ms())
        self.drive()

    def write_snapshot(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> None:
        """Beside the log, complete or not at all. May run on any thread."""
        self.log.write_snapshot(values, identity, last_timestamp_ms, now_ms)

    def snapshot_written(self, identity: SnapshotId) -> None:
        """From now on followers may load it; older ones and the log below may go. On the loop's thread."""
        self.log.note_snapshot(identity)
        if self._failure is not None or self.is_closed:
            return
        if self.log.is_damaged and self._is_alone:
            self._replace_damage(identity)
        self._cleaner.clean()

    # -- damage ------------------------------------------------------------------------------------------------------

    def meet_damage(self) -> None:
        """Records on the disk are not what was written: cut them off and fetch them again, without a vote meanwhile.

        A leader resigns, so that another voter, which has all that is committed, leads and serves it. A voter that is
        alone cuts nothing: it knows what the committed records said, and writes that as a snapshot.
        """
        if self._failure is not None or self.is_closed or not self.log.is_damaged:
            return
        if self._is_alone:
            logger.error("no other voter has a copy: a snapshot of all that is committed is written in its place")
            self._news.tell(self._listener.on_damage)
            return
        try:
            self.log.cut_damage(self.raft.high_watermark)
        except (OSError, CorruptLog) as error:
            self.fail(error)
            return
        self.raft.lose_records(self.log.acknowledged_end, self.now_ms())
        self.drive()

    def _meet_damaged_snapshots(self) -> None:
        """No follower could load them. They go where the log reaches without them, and another one is written."""
        if self._failure is None and not self.is_closed:
            self.log.remove_damaged_snapshots()
            self._news.tell(self._listener.on_damage)

    @property
    def loss(self) -> str:
        """What this voter lacks, and what an operator can do about it; empty where it lacks nothing."""
        if not self.raft.lacks_records or not self.raft.can_vote:
            return ""
        directory, end = self.log.directory, self.raft.acknowledged
        upto = "" if end is None else f" below offset {end.end_offset}"
        return (
            f"this voter lost records{upto} that it had acknowledged ({self.log.damage}): until it has them again it "
            f"does not lead, and votes for {'no other voter' if end is None else 'no voter without them'}. "
            f"Start the voters whose logs are whole; where there are none, restore {directory} from a copy, or, to go "
            f"on without those records, stop the voters and remove {LACKING_FILE} and {ACKNOWLEDGED_FILE} there"
        )

    def _replace_damage(self, identity: SnapshotId) -> None:
        try:
            if self.log.replace_damage(identity):
                self._plain_log.set_high_watermark(self.raft.high_watermark)
        except (OSError, CorruptLog, DamagedRecords) as error:
            self.fail(error)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def _served(self, serve: Callable[[Any, int], Awaitable[Any]], request: Any, version: int) -> Any:
        """Raises KafkaError when this node takes no part any more."""
        if self._failure is not None:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata log failed: {self._failure}")
        if self.is_closed:
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "this node is stopping")
        return await serve(request, version)

    # -- for the service ---------------------------------------------------------------------------------------------

    def now_ms(self) -> float:
        return self.loop.time() * 1000

    async def persisted(self) -> None:
        """Until the vote and epoch of now are on the device."""
        await self._vote_writer.written()

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task that ends with this node."""
        task = self.loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _tell_snapshot(self, identity: SnapshotId, snapshot: Snapshot) -> None:
        self._news.tell(partial(self._listener.on_snapshot, identity, snapshot.values, snapshot.last_timestamp_ms))

    def drive(self) -> None:
        """Carry out what the core wants done, until it wants nothing more."""
        if self._is_driving or self.is_closed:
            return
        self._is_driving = True
        try:
            while True:
                effects = self.raft.take_effects()
                if not effects:
                    self.raft.poll(self.now_ms())
                    effects = self.raft.take_effects()
                    if not effects:
                        break
                for effect in effects:
                    self._effects[type(effect)](effect)
            self._service.check_waiters()
            self._arm()
        except (OSError, CorruptLog, DamagedRecords, KafkaError, AssertionError) as error:
            self.fail(error)
        finally:
            self._is_driving = False

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ms = self.raft.deadline_ms
        if deadline_ms != NEVER:
            self._timer = self.loop.call_at(deadline_ms / 1000, self._on_time, deadline_ms)

    def _on_time(self, deadline_ms: float) -> None:
        # Never earlier than it was asked for, whatever rounding makes of it: else it would be asked for again.
        self.raft.poll(max(self.now_ms(), deadline_ms))
        self.drive()

    # -- effects -----------------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        self._begin(self._ask(send), f"{type(send.ask).__name__} to {send.peer.id}")

    async def _ask(self, send: Send) -> None:
        settings, ask = self.settings, send.ask
        bytes_max = settings.fetch_bytes_max if isinstance(ask, FetchAsk) else settings.snapshot_part_bytes
        request = wire.request_of(ask, self._cluster_id, settings.own_endpoints, bytes_max)
        timeout_ms = settings.request_timeout_ms + (ask.max_wait_ms if isinstance(ask, FetchAsk) else 0)
        try:
            await self.persisted()
            response = await self.exchange(
                send.peer.endpoint,
                request,
                wire.VERSIONS[type(ask)],
                timeout_ms=timeout_ms,
                lane="raft-" + lane_of(ask),
            )
            answer = wire.answer_of(ask, response)
        except PeerUnreachable as error:
            self.raft.on_failure(send, error.refused, self.now_ms())
        except KafkaError as error:
            logger.warning("%s answers %s with %s", send.peer, type(ask).__name__, error)
            self.raft.on_failure(send, False, self.now_ms())
        else:
            try:
                self.raft.on_answer(send, answer, self.now_ms())
            except AssertionError as error:
                self.fail(error)
        self.drive()

    def _append_leader_change(self, effect: AppendLeaderChange) -> None:
        append = partial(self.log.append_leader_change, effect, self.raft.own.id, self.clock_ms())
        self._append_own(append, changes_voters=effect.voters_now is not None)

    def _append_voters(self, effect: AppendVoters) -> None:
        append = partial(self.log.append_voters, effect.voters, effect.epoch, self.clock_ms())
        self._append_own(append, changes_voters=True)

    def _append_own(self, append: Callable[[], int], *, changes_voters: bool) -> None:
        try:
            append()
        except OSError as error:
            if self.tolerates(error):  # but who cannot append cannot lead
                self.raft.resign(self.now_ms())
            return
        if changes_voters:
            self.raft.on_voters_changed(self.now_ms())
        self._appended()

    def _appended(self) -> None:
        self._service.wake()
        self._flush()

    def _append_records(self, effect: AppendRecords) -> None:
        try:
            self.log.append_replicated(effect.records, self.clock_ms())
        except (KafkaError, OSError) as error:  # damaged on the way, a full disk, or no descriptor for a new segment
            if isinstance(error, OSError) and not self.tolerates(error):
                return
            logger.error("what the leader sent cannot be appended: %s", error)
            following.on_append_failed(self.raft, self.now_ms())
        self._flush()

    def _truncate(self, effect: Truncate) -> None:
        try:
            self.log.truncate_to(effect.end_offset)
        except OSError as error:
            if self.tolerates(error):  # the leader is asked again, and says again where to cut
                following.on_append_failed(self.raft, self.now_ms())

    def _flush(self) -> None:
        if self.raft.can_vote and self._failure is None:
            self._sync.begin()

    # -- telling -----------------------------------------------------------------------------------------------------

    def _keep_part(self, part: KeepSnapshotPart) -> None:
        """A piece of the leader's snapshot; the last one is followed by a check of the whole."""
        try:
            self.log.keep_part(part.snapshot, part.position, part.data)
        except OSError as error:
            logger.error("snapshot %s cannot be kept: %s", part.snapshot, error)
            following.on_snapshot_failed(self.raft, part.snapshot, self.now_ms())
            return
        if part.is_last:
            self._begin(self._install(part.snapshot), "snapshot")

    async def _install(self, identity: SnapshotId) -> None:
        """Move the log behind a snapshot, once that is on the device, whole."""
        try:
            snapshot = await self.run_in_executor(partial(self.log.finish_part, identity))
        except (OSError, CorruptSnapshot, KafkaError) as error:
            logger.error("snapshot %s was fetched in vain: %s", identity, error)
            following.on_snapshot_failed(self.raft, identity, self.now_ms())
            self.drive()
            return
        state = self.raft.state
        if isinstance(state, Follower) and state.download is not None and state.download.snapshot == identity:
            try:
                try:
                    self.log.install(identity, snapshot, self.clock_ms())
                except DamagedRecords:  # the log behind the snapshot is: it is cut, and fetched again
                    self.meet_damage()
                    self.log.install(identity, snapshot, self.clock_ms())
            except (OSError, CorruptLog) as error:
                self.fail(error)
                return
            following.on_snapshot_installed(self.raft, identity, self.now_ms())
            self._tell_snapshot(identity, snapshot)
        self.drive()

    def _report_high_watermark(self, effect: ReportHighWatermark) -> None:
        self._plain_log.set_high_watermark(effect.offset)
        self._news.tell(partial(self._listener.on_high_watermark, effect.offset))

    def tolerates(self, error: Exception) -> bool:
        """Whether nothing was lost, and the same may succeed later. Else this node has left the quorum."""
        if self._failure is not None or not self._plain_log.can_retry(error):
            self.fail(error)
            return False
        if self.now_ms() >= self._shortage_told_ms + SHORTAGE_TOLD_EVERY_MS:
            self._shortage_told_ms = self.now_ms()
            logger.error("the metadata log waits: %s", error)
        return True

    def fail(self, error: Exception) -> None:
        """The metadata log or the vote file cannot be written any more: take no part, refuse whatever comes."""
        if self._failure is not None:
            return
        logger.critical("this node leaves the metadata quorum: %s", error, exc_info=isinstance(error, AssertionError))
        self._failure = error
        self.raft.is_closing = True
        self.raft.resign(self.now_ms())
        for effect in self.raft.take_effects():
            if isinstance(effect, ReportResign | ReportLeader | WakeFetches):
                self._effects[type(effect)](effect)
        if self._timer is not None:
            self._timer.cancel()
        self._cleaner.close()
        self._scrubber.stop()
        self._sync.give_up()
        self._vote_writer.give_up()
        self._service.close()
        self._news.tell(partial(self._listener.on_failure, error))


def _configured_voters(settings: QuorumSettings, node_id: int, can_vote: bool) -> VoterSet:
    if can_vote and not settings.bootstrap_servers and set(settings.voters) <= {node_id}:
        # Alone, unless the log says otherwise.
        return VoterSet([Voter(ReplicaKey(node_id), tuple(settings.own_endpoints[:1]))])
    return static_voters(settings.voters)
