"""RaftNode: a thin shell that carries out the effects of `raft.py` for this node of the metadata quorum.

It sends, appends, wakes and reports. `service.py` answers requests; `metadata_sync.py` and `vote_writer.py` sync the
files. Invariants: a request or response leaves only after the vote and epoch that it depends on are on the device. A
voter reports, and a leader counts, only the synced part of its own log.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.answer_size import AnswerSize
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable
from tidelog.replication.quorum import wire
from tidelog.replication.quorum.acknowledged import FILE_NAME as ACKNOWLEDGED_FILE
from tidelog.replication.quorum.files.metadata_cleaner import MetadataCleaner
from tidelog.replication.quorum.files.metadata_log import MetadataLog, ReplayedBatch
from tidelog.replication.quorum.files.metadata_sync import MetadataSync
from tidelog.replication.quorum.files.records_lost import LACKING_FILE
from tidelog.replication.quorum.files.vote_store import FILE_NAME as VOTE_FILE
from tidelog.replication.quorum.files.vote_store import (
    CorruptQuorumState,
    InconsistentVoters,
    QuorumState,
    VoteStore,
    election_in,
)
from tidelog.replication.quorum.files.vote_writer import VoteWriter
from tidelog.replication.quorum.listener import ListenerCalls, MetadataListener
from tidelog.replication.quorum.metadata_repair import MetadataRepair
from tidelog.replication.quorum.metadata_scrubber import MetadataScrubber
from tidelog.replication.quorum.other_quorum import check_no_other_quorum
from tidelog.replication.quorum.raft import following, leading
from tidelog.replication.quorum.raft.messages import (
    AppendLeaderChange,
    AppendRecords,
    AppendVoters,
    CommittedRecordsMissing,
    FetchAnswer,
    FetchAsk,
    KeepSnapshotPart,
    Persist,
    Recovered,
    ReportHighWatermark,
    ReportLead,
    ReportLeader,
    ReportResign,
    Send,
    SnapshotAnswer,
    SnapshotAsk,
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
from tidelog.replication.quorum.vote_recovery import VoteRecovery
from tidelog.replication.threads import until_done
from tidelog.storage.files.disk import Disk
from tidelog.storage.log.partition_log import CorruptLog, PartitionLog
from tidelog.storage.segments.damage import DamagedRecords

__all__ = ["InconsistentVoters", "MetadataListener", "NotLeader", "QuorumSettings", "RaftNode", "ReplayedBatch"]

logger = logging.getLogger("tidelog.quorum")

# (request message, its version) -> response message; see `service.py`.
Served = Callable[[Any, int], Awaitable[Any]]

# A leader that closes waits at most this long while it notifies the other voters.
FAREWELL_MS = 250
SHORTAGE_LOG_INTERVAL_MS = 10_000.0


class NotLeader(Exception):
    """This node does not lead the metadata quorum, so it may not append."""


class RaftNode:
    """`root`: the log directory that holds `__cluster_metadata-0`, whose log is `log`.

    `keeps_writes`: the files contain all writes of the previous process.
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
        self.is_closed = self._is_driving = self._is_started = False
        self.registered_brokers: Callable[[], Container[int]] = tuple
        """Of the metadata; their fetches are answered before those of others."""
        self._keeps_writes = keeps_writes
        self._plain_log = log
        self._cluster_id = cluster_id
        self._listener = listener
        self._history = VoterHistory(_configured_voters(settings, node_id, can_vote))
        self.log = MetadataLog(disk, root, log, self._history)
        self._votes = VoteStore(disk, self.log.directory)
        self.raft = Raft(
            own=ReplicaKey(node_id, directory_id), own_endpoints=settings.own_endpoints, can_vote=can_vote,
            settings=settings, log=self.log, voters=self._history, rng=rng,
        )  # fmt: skip
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
        self._answer_size = AnswerSize(settings.request_timeout_ms)
        self._failure: Exception | None = None
        self._of_another_cluster: dict[Endpoint, None] = {}
        self._installed_end = 0  # of the last snapshot from a leader
        self._installing: set[SnapshotId] = set()  # threads check their files, which must not begin anew
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._sync = MetadataSync(self.log, log, loop, run_in_executor, self.drive, self.tolerates)
        self._cleaner = MetadataCleaner(self.log, settings.retention, loop, clock_ms, self.tolerates)
        self._scrubber = MetadataScrubber(
            self.log, log, settings, loop, run_in_executor, self.meet_damage, self._meet_damaged_snapshots,
            self.tolerates,
        )  # fmt: skip
        self.doubt_snapshots = self._scrubber.doubt_snapshots
        self._repair = MetadataRepair(self, cluster_id, loop)
        self._vote_recovery = VoteRecovery(self, cluster_id, loop)
        self._vote_writer = VoteWriter(
            self._votes, self._history, loop, run_in_executor, self.tolerates, self.drive
        )  # fmt: skip
        self._listener_calls = ListenerCalls(loop)
        self._effects = self._handlers(listener)

    _shortage_logged_ms = -SHORTAGE_LOG_INTERVAL_MS

    def _handlers(self, listener: MetadataListener) -> dict[type, Callable[[Any], None]]:
        return {
            Persist: lambda effect: self._vote_writer.write(effect.state),
            Send: self._send,
            AppendLeaderChange: self._append_leader_change,
            AppendVoters: self._append_voters,
            AppendRecords: self._append_records,
            Truncate: self._truncate,
            KeepSnapshotPart: self._keep_part,
            ReportLeader: lambda effect: self._listener_calls.add(
                partial(listener.on_leader, effect.leader_id, effect.epoch)
            ),
            ReportHighWatermark: self._report_high_watermark,
            ReportLead: lambda effect: self._listener_calls.add(partial(listener.on_lead, effect.epoch)),
            ReportResign: lambda effect: self._listener_calls.add(partial(listener.on_resign, effect.epoch)),
            WakeFetches: lambda effect: self._service.wake(),
            Recovered: lambda effect: self.log.recovered(),
        }

    # -- start and end -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the vote file, snapshot and log; pass the snapshot to the listener; begin to elect or fetch.

        Raises CorruptSnapshot, CorruptLog, InconsistentVoters.
        """
        loaded = self.log.load(is_voter=self.raft.can_vote, keeps_writes=self._keeps_writes)
        if self.raft.can_vote and self.log.end_offset == 0:
            self.log.bootstrap_values()  # fails at once if they are damaged, because no controller could start
        if self.log.lacks_records and self.is_alone:
            self._recover_alone()
        self.raft.lacks_records, self.raft.acknowledged = self.log.lacks_records, self.log.acknowledged_end
        # An observer gives no vote, and learns the epoch from the quorum: damage to the file must not stop it.
        state = self._read_vote() if self.raft.can_vote else None
        election = election_in(state, self._history, self.raft.can_vote)
        if state is None and self.log.end_offset == 0 and self._history.latest.is_only(self.raft.own):
            await check_no_other_quorum(self, self._cluster_id)
        self._is_started = True
        if loaded is not None:
            identity, snapshot = loaded
            self._listener.on_snapshot(identity, snapshot.values, snapshot.last_timestamp_ms)
        self.raft.start(election, self.now_ms())
        self._flush()
        self._cleaner.begin()
        self._scrubber.begin()
        self._repair.begin()
        self._vote_recovery.begin()
        self.drive()

    def _read_vote(self) -> QuorumState | None:
        """The content of the vote file. Without one that is whole this voter does not vote until it is safe."""
        try:
            state = self._votes.read()
            is_new = self.log.end_offset == 0 and not self.log.lacks_records
            is_lost = state is None and not is_new
        except CorruptQuorumState as error:
            logger.error("%s", error)
            state, is_lost = None, True
        # A voter that is alone votes for itself. One that is no voter by its own log may be one by the others'.
        self.raft.vote_is_unknown = is_lost and not self.is_alone
        return state

    @property
    def is_alone(self) -> bool:
        """Whether no other voter is known that could have a copy of the log."""
        if not self.raft.can_vote or not self._history.latest.is_only(self.raft.own):
            return False
        # Damaged records may name other voters, and other bootstrap servers would know them.
        own = [endpoint for _, endpoint in self.settings.own_endpoints]
        return all(server in own for server in self.settings.bootstrap_servers)

    def _recover_alone(self) -> None:
        """Raises CorruptLog."""
        if not self.log.lacks_unfinished_batch_only:
            kept = self.log.kept_files
            kept_text = f" (kept: {', '.join(kept)})" if kept else ""
            others = "what follows" if self.log.end_offset else "all of it, as an empty cluster"
            raise CorruptLog(
                f"{self.log.directory}: {self.log.damage}, and no other voter has a copy{kept_text}: restore it, or "
                f"remove {LACKING_FILE} and {ACKNOWLEDGED_FILE} there to go on without {others}"
            )
        self.log.recovered("the last batch was not written to its end: nothing had acknowledged it")

    async def close(self) -> None:
        """End the node's part in the quorum; a leader resigns first. The log directory closes the log."""
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
        await self._repair.close()
        await self._vote_recovery.close()
        await self._sync.close()
        await self._vote_writer.close()
        self._close_log()
        self._service.close()
        self._listener_calls.close()

    def _close_log(self) -> None:
        try:
            self.log.close()
        except OSError as error:
            logger.error("%s: %s", self.log.directory, error)

    # -- the node's interface ----------------------------------------------------------------------------------------

    @property
    def leader_id(self) -> int:
        """-1 while no leader is known."""
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
        """The high watermark that this epoch's leader has reported; -1 while unknown."""
        state = self.raft.state
        if isinstance(state, Leader):
            return state.progress.high_watermark
        return state.leader_high_watermark if isinstance(state, Follower) else -1

    @property
    def end_offset(self) -> int:
        return self.log.end_offset

    @property
    def is_leader(self) -> bool:
        """Whether the node leads and its first record is committed, so that `on_lead` has been or will be called."""
        return self.raft.is_active_leader and self._failure is None

    @property
    def has_lost_majority(self) -> bool:
        """Whether this leader has heard of no majority for so long that another may lead. It resigns at once, but after
        a pause of the process others may come first.
        """
        return leading.has_lost_majority(self.raft, self.now_ms())

    def leader_endpoint(self) -> Endpoint | None:
        return self.raft.known_leader_endpoint()

    def voters(self) -> VoterSet:
        return self._history.latest

    @property
    def kraft_version(self) -> int:
        """1 if voters can be added and removed."""
        return self._history.kraft_version

    def voter_ids(self) -> list[int]:
        return self._history.latest.ids

    def append(self, values: Sequence[bytes], now_ms: int) -> int:
        """Append one atomic batch; returns the offset of its last record. Raises NotLeader, OSError, KafkaError.

        A leader that cannot append resigns.
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
        """Committed batches from `from_offset` up to the present high watermark or the first damaged batch.

        After damaged batches are fetched again, the high watermark is reported again. None of those that a
        snapshot from the leader has replaced meanwhile: its notice follows.
        """
        if from_offset < self._installed_end:
            return
        try:
            # Damage may have cut the log below the high watermark.
            yield from self.log.read(from_offset, min(self.raft.high_watermark, self.log.end_offset))
        except DamagedRecords:
            self.loop.call_soon(self.meet_damage)

    def bootstrap_values(self) -> list[bytes]:
        """The records of Kafka's `format` for the first start (bootstrap.checkpoint); empty without the file."""
        return self.log.bootstrap_values()

    def resign(self) -> None:
        """Give up the leadership and notify the other voters (EndQuorumEpoch)."""
        self.raft.resign(self.now_ms())
        self.drive()

    def write_snapshot(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> None:
        """Write a snapshot beside the log, completely or not at all."""
        self.log.write_snapshot(values, identity, last_timestamp_ms, now_ms)

    def snapshot_writer(
        self, values: Iterable[bytes], identity: SnapshotId, last_timestamp_ms: int, now_ms: int
    ) -> Callable[[], None]:
        """`write_snapshot` as work for any thread. Call it on the loop's thread."""
        return self.log.snapshot_writer(values, identity, last_timestamp_ms, now_ms)

    def snapshot_written(self, identity: SnapshotId) -> None:
        """Offer the snapshot to followers, and clean older snapshots and log. Call on the loop's thread."""
        self.log.note_snapshot(identity)
        if self._failure is not None or self.is_closed:
            return
        if self.log.is_damaged and self.is_alone:
            self._replace_damage(identity)
        self._cleaner.clean()

    # -- damage ------------------------------------------------------------------------------------------------------

    def meet_damage(self) -> None:
        """Truncate the log before its first damaged record, and fetch the lost records again. Until then this node does
        not become a candidate.

        A leader resigns, so that a voter with all committed records leads. An only voter truncates nothing: its image
        holds the content of the committed records, so it writes a snapshot that replaces them.
        """
        if self._failure is not None or self.is_closed or not self.log.is_damaged:
            return
        if self.is_alone:
            self._listener_calls.add(self._listener.on_damage)
            return
        try:
            self.log.cut_damage(self.raft.high_watermark)
        except (OSError, CorruptLog) as error:
            self.fail(error)
            return
        self.raft.lose_records(self.log.acknowledged_end, self.now_ms())
        self.drive()

    def _meet_damaged_snapshots(self) -> None:
        """Remove damaged snapshots that the log does not need, and write a new one, because followers cannot load a
        damaged snapshot.
        """
        if self._failure is None and not self.is_closed:
            self.log.remove_damaged_snapshots()
            self._listener_calls.add(self._listener.on_damage)

    @property
    def loss(self) -> str:
        """The records or the vote that this voter has lost, and the operator's options; empty without a loss."""
        if self.raft.vote_is_unknown:
            return (
                f"this voter lost {self.log.directory}/{VOTE_FILE}, which says for whom it voted: it does not vote or "
                "lead until every other voter has answered. If one of them is gone for good, restore the file from a "
                "copy, or remove that voter from the quorum"
            )
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
        """Raises KafkaError after this node has left the quorum."""
        if self._failure is not None:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata log failed: {self._failure}")
        if self.is_closed or not self._is_started:
            raise KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "this node starts or stops")
        return await serve(request, version)

    # -- for the service ---------------------------------------------------------------------------------------------

    def now_ms(self) -> float:
        """The time of the core, which stands while a vote is written."""
        return self.loop.time() * 1000 - self._vote_writer.waited_ms

    async def persisted(self) -> None:
        """Wait until the present vote and epoch are on the device."""
        await self._vote_writer.written()

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Start a task, which `close` cancels."""
        task = self.loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def _tell_snapshot(self, identity: SnapshotId, snapshot: Snapshot) -> None:
        self._listener_calls.add(
            partial(self._listener.on_snapshot, identity, snapshot.values, snapshot.last_timestamp_ms)
        )

    def drive(self) -> None:
        """Carry out the core's effects until there are no more."""
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
        if deadline_ms != NEVER and not self._vote_writer.is_waiting:
            at_s = (deadline_ms + self._vote_writer.waited_ms) / 1000
            self._timer = self.loop.call_at(at_s, self._on_time, deadline_ms)

    def _on_time(self, deadline_ms: float) -> None:
        # Rounding may call this before the deadline. Then the core would only ask for the same deadline again.
        self.raft.poll(max(self.now_ms(), deadline_ms))
        self.drive()

    # -- effects -----------------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        self._begin(self._ask(send), f"{type(send.ask).__name__} to {send.peer.id}")

    async def _ask(self, send: Send) -> None:
        settings, ask = self.settings, send.ask
        bytes_max = settings.fetch_bytes_max if isinstance(ask, FetchAsk) else settings.snapshot_part_bytes
        bytes_max = self._answer_size.limit(bytes_max)
        request = wire.request_of(ask, self._cluster_id, settings.own_endpoints, bytes_max)
        timeout_ms = settings.request_timeout_ms + (ask.max_wait_ms if isinstance(ask, FetchAsk) else 0)
        try:
            await self.persisted()
            began_ms = self.now_ms()
            response = await self.exchange(
                send.peer.endpoint,
                request,
                wire.VERSIONS[type(ask)],
                timeout_ms=timeout_ms,
                lane="raft-" + lane_of(ask),
                on_arriving=lambda: self.raft.on_arriving(send, self.now_ms()),
            )
            answer = wire.answer_of(ask, response)
        except PeerUnreachable as error:
            if isinstance(ask, FetchAsk | SnapshotAsk) and not error.refused:
                self._answer_size.on_lost()
            self.raft.on_failure(send, error.refused, self.now_ms())
        except KafkaError as error:
            logger.warning("%s answers %s with %s", send.peer, type(ask).__name__, error)
            self.raft.on_failure(send, False, self.now_ms())
        else:
            self._note_cluster(send.peer.endpoint, answer.error)
            if isinstance(answer, FetchAnswer | SnapshotAnswer):
                size_bytes = len(answer.records if isinstance(answer, FetchAnswer) else answer.data)
                self._answer_size.on_answer(self.now_ms() - began_ms, size_bytes >= bytes_max // 2)
            try:
                self.raft.on_answer(send, answer, self.now_ms())
            except (AssertionError, CommittedRecordsMissing) as error:
                self.fail(error)
        self.drive()

    def _note_cluster(self, peer: Endpoint, error: int) -> None:
        if error == ErrorCode.INCONSISTENT_CLUSTER_ID:
            self._of_another_cluster[peer] = None
        else:
            self._of_another_cluster.pop(peer, None)

    @property
    def misfit(self) -> str:
        """Which peers answered last that this node is of another cluster: at most the voters and bootstrap servers.
        Empty if none does.
        """
        if not self._of_another_cluster:
            return ""
        peers = ", ".join(map(str, self._of_another_cluster))
        return (
            f"another cluster.id is in meta.properties of {peers} than in that of this node, {self._cluster_id}: "
            "they do not answer each other until one of them is corrected"
        )

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
            if self.tolerates(error):  # a node that cannot append cannot lead
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
        except (KafkaError, OSError) as error:  # damage in transit, a full disk, no descriptor for a new segment
            if isinstance(error, OSError) and not self.tolerates(error):
                return
            logger.error("cannot append the records from the leader: %s", error)
            following.on_append_failed(self.raft, self.now_ms())
        self._flush()

    def _truncate(self, effect: Truncate) -> None:
        try:
            self.log.truncate_to(effect.end_offset)
        except OSError as error:
            if self.tolerates(error):  # the next fetch gets the truncation offset again
                following.on_append_failed(self.raft, self.now_ms())

    def sync(self) -> None:
        """Let a thread sync the log's end."""
        self._flush()

    def _flush(self) -> None:
        if self.raft.can_vote and self._failure is None:
            self._sync.begin()

    # -- snapshots and reports ---------------------------------------------------------------------------------------

    def _keep_part(self, part: KeepSnapshotPart) -> None:
        """Store a part of the leader's snapshot; after the last part, check and install the snapshot."""
        if part.snapshot in self._installing:
            following.on_snapshot_failed(self.raft, part.snapshot, self.now_ms())
            return
        try:
            self.log.keep_part(part.snapshot, part.position, part.data)
        except OSError as error:
            logger.error("cannot write snapshot %s: %s", part.snapshot, error)
            following.on_snapshot_failed(self.raft, part.snapshot, self.now_ms())
            return
        if part.is_last:
            self._installing.add(part.snapshot)
            self._begin(self._install(part.snapshot), "snapshot")

    async def _install(self, identity: SnapshotId) -> None:
        """Sync and check the snapshot, then restart the log at its end."""
        try:
            try:
                snapshot = await until_done(self.run_in_executor(partial(self.log.finish_part, identity)))
            finally:
                self._installing.discard(identity)
        except (OSError, CorruptSnapshot, KafkaError) as error:
            logger.error("cannot use the fetched snapshot %s: %s", identity, error)
            following.on_snapshot_failed(self.raft, identity, self.now_ms())
            self.drive()
            return
        state = self.raft.state
        if isinstance(state, Follower) and state.download is not None and state.download.snapshot == identity:
            try:
                try:
                    self.log.install(identity, snapshot, self.clock_ms())
                except DamagedRecords:  # of the log after the snapshot: truncate it and fetch again
                    self.meet_damage()
                    self.log.install(identity, snapshot, self.clock_ms())
            except (OSError, CorruptLog) as error:
                self.fail(error)
                return
            self._installed_end = identity.end_offset
            following.on_snapshot_installed(self.raft, identity, self.now_ms())
            self._tell_snapshot(identity, snapshot)
        self.drive()

    def _report_high_watermark(self, effect: ReportHighWatermark) -> None:
        self._plain_log.set_high_watermark(effect.offset)
        self._listener_calls.add(partial(self._listener.on_high_watermark, effect.offset))

    def tolerates(self, error: Exception) -> bool:
        """Whether the error lost nothing and a retry may succeed. Otherwise this node leaves the quorum."""
        if self._failure is not None or not self._plain_log.can_retry(error):
            self.fail(error)
            return False
        now_ms = self.loop.time() * 1000  # the core's time stands while a vote cannot be written
        if now_ms >= self._shortage_logged_ms + SHORTAGE_LOG_INTERVAL_MS:
            self._shortage_logged_ms = now_ms
            logger.error("the metadata log cannot be used now: %s", error)
        return True

    def fail(self, error: Exception) -> None:
        """Leave the quorum, because the metadata log or the vote file is unusable. Later requests are refused."""
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
        self._repair.stop()
        self._vote_recovery.stop()
        self._sync.give_up()
        self._vote_writer.give_up()
        self._service.close()
        self._listener_calls.add(partial(self._listener.on_failure, error))


def _configured_voters(settings: QuorumSettings, node_id: int, can_vote: bool) -> VoterSet:
    if can_vote and not settings.bootstrap_servers and set(settings.voters) <= {node_id}:
        # An only voter, unless the log names others.
        return VoterSet([Voter(ReplicaKey(node_id), tuple(settings.own_endpoints[:1]))])
    return static_voters(settings.voters)
