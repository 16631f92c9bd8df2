"""RaftNode: this node's part in the metadata quorum. A shell: what is to be done is `raft.py`'s to say.

It syncs, sends, wakes and reports; requests are answered in `service.py`. Invariants: nothing is told to anybody before
the vote and epoch it rests on are on the device; what a follower reports and a leader counts of its own log is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable
from tidelog.replication.quorum import following, wire
from tidelog.replication.quorum.listener import MetadataListener
from tidelog.replication.quorum.messages import (
    AppendLeaderChange,
    AppendRecords,
    AppendVoters,
    ElectionState,
    FetchAsk,
    KeepSnapshotPart,
    Persist,
    ReportHighWatermark,
    ReportLead,
    ReportLeader,
    ReportResign,
    Send,
    Truncate,
    WakeFetches,
)
from tidelog.replication.quorum.metadata_log import MetadataLog, ReplayedBatch
from tidelog.replication.quorum.raft import NEVER, Raft, lane_of
from tidelog.replication.quorum.service import QuorumService
from tidelog.replication.quorum.settings import QuorumSettings
from tidelog.replication.quorum.snapshot import Snapshot, SnapshotId
from tidelog.replication.quorum.snapshot_loading import keep_part
from tidelog.replication.quorum.state import Leader
from tidelog.replication.quorum.vote_store import VoteStore
from tidelog.replication.quorum.vote_writer import VoteWriter
from tidelog.replication.quorum.voters import ReplicaKey, Voter, VoterHistory, VoterSet, static_voters
from tidelog.storage.disk import Disk
from tidelog.storage.log import CorruptLog, PartitionLog

__all__ = ["InconsistentVoters", "MetadataListener", "NotLeader", "QuorumSettings", "RaftNode", "ReplayedBatch"]

log = logging.getLogger("tidelog.quorum")

# Answers a request message of that version with a response message; see `service.py`.
Served = Callable[[Any, int], Awaitable[Any]]

# A leader that closes waits so long for the others to hear of it.
FAREWELL_MS = 250


class NotLeader(Exception):
    """This node does not lead the metadata quorum, so it may not append."""


class InconsistentVoters(Exception):
    """The configured voters are not those that the vote file was written with."""


class RaftNode:
    """`root`: the log directory that holds `__cluster_metadata-0`, whose log is `log`."""

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
    ) -> None:
        own = ReplicaKey(node_id, directory_id)
        voters = static_voters(settings.voters)
        if can_vote and not settings.bootstrap_servers and set(settings.voters) <= {node_id}:
            # Alone, unless the log says otherwise.
            voters = VoterSet([Voter(ReplicaKey(node_id), tuple(settings.own_endpoints[:1]))])
        self.settings = settings
        self.loop = loop
        self.exchange = exchange
        self.run_in_executor = run_in_executor
        self.clock_ms = clock_ms
        self.is_closed = False
        self._plain_log = log
        self._cluster_id = cluster_id
        self._listener = listener
        self._history = VoterHistory(voters)
        self.log = MetadataLog(disk, root, log, self._history)
        self._votes = VoteStore(disk, self.log.directory)
        self.raft = Raft(
            own=own,
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
        self._flushing: asyncio.Task[None] | None = None
        self._vote_writer = VoteWriter(self._votes, self._history, loop, run_in_executor, self.fail)
        self._news: deque[Callable[[], None]] = deque()
        self._news_handle: asyncio.Handle | None = None
        self._effects = self._handlers(listener)

    def _handlers(self, listener: MetadataListener) -> dict[type, Callable[[Any], None]]:
        return {
            Persist: lambda effect: self._vote_writer.write(effect.state),
            Send: self._send,
            AppendLeaderChange: self._append_leader_change,
            AppendVoters: self._append_voters,
            AppendRecords: self._append_records,
            Truncate: self._truncate,
            KeepSnapshotPart: lambda part: keep_part(self, part),
            ReportLeader: lambda told: self._tell(partial(listener.on_leader, told.leader_id, told.epoch)),
            ReportHighWatermark: self._report_high_watermark,
            ReportLead: lambda told: self._tell(partial(listener.on_lead, told.epoch)),
            ReportResign: lambda told: self._tell(partial(listener.on_resign, told.epoch)),
            WakeFetches: lambda told: self._service.wake(),
        }

    # -- start and end -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Read the vote file, snapshot and log; tell the listener of the snapshot; begin electing or fetching.

        Raises CorruptSnapshot, CorruptQuorumState, CorruptLog, InconsistentVoters.
        """
        found = self.log.load()
        election = self._read_election()
        if found is not None:
            identity, snapshot = found
            self._listener.on_snapshot(identity, snapshot.values, snapshot.last_timestamp_ms)
        self.raft.start(election, self.now_ms())
        self._flush()
        self.drive()

    def _read_election(self) -> ElectionState:
        state = self._votes.read()
        if state is None:
            return ElectionState()
        if state.voter_ids and self._history.kraft_version == 0 and self.raft.can_vote:
            expected = self._history.static.ids
            if sorted(state.voter_ids) != expected:
                raise InconsistentVoters(
                    f"the voters are configured as {expected}, the vote file is of {sorted(state.voter_ids)}"
                )
        voted = ReplicaKey(state.voted_id, state.voted_directory_id) if state.voted_id >= 0 else None
        return ElectionState(state.leader_epoch, state.leader_id, voted)

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
        if self._timer is not None:
            self._timer.cancel()
        self._service.wake()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._flushing is not None:
            await self._flushing
        await self._vote_writer.close()
        self._service.close()
        self._deliver()

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
        """One batch, all or nothing; the offset of its last record. Raises NotLeader, OSError, KafkaError."""
        if not self.is_leader or self.is_closed:
            raise NotLeader(f"node {self.raft.leader_id} leads in epoch {self.raft.epoch}")
        try:
            last_offset = self.log.append_values(values, self.raft.epoch, now_ms)
        except (OSError, CorruptLog) as error:
            self.fail(error)
            raise
        self._appended()
        return last_offset

    def read(self, from_offset: int) -> Iterator[ReplayedBatch]:
        """Committed batches from `from_offset` on, up to the high watermark of now."""
        return self.log.read(from_offset, self.raft.high_watermark)

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

    def forget_before(self, identity: SnapshotId, now_ms: int) -> None:
        """Remove what a snapshot on disk makes superfluous; on the loop's thread."""
        self.log.forget_before(identity, now_ms)

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

    def begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """A task that ends with this node."""
        task = self.loop.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    def tell_snapshot(self, identity: SnapshotId, snapshot: Snapshot) -> None:
        self._tell(partial(self._listener.on_snapshot, identity, snapshot.values, snapshot.last_timestamp_ms))

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
        except (OSError, CorruptLog, KafkaError, AssertionError) as error:
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
        self.begin(self._ask(send), f"{type(send.ask).__name__} to {send.peer.id}")

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
            log.warning("%s answers %s with %s", send.peer, type(ask).__name__, error)
            self.raft.on_failure(send, False, self.now_ms())
        else:
            try:
                self.raft.on_answer(send, answer, self.now_ms())
            except AssertionError as error:
                self.fail(error)
        self.drive()

    def _append_leader_change(self, effect: AppendLeaderChange) -> None:
        self.log.append_leader_change(effect, self.raft.own.id, self.clock_ms())
        if effect.voters_now is not None:
            self.raft.on_voters_changed(self.now_ms())
        self._appended()

    def _append_voters(self, effect: AppendVoters) -> None:
        self.log.append_voters(effect.voters, effect.epoch, self.clock_ms())
        self.raft.on_voters_changed(self.now_ms())
        self._appended()

    def _appended(self) -> None:
        self._service.wake()
        self._flush()

    def _append_records(self, effect: AppendRecords) -> None:
        try:
            self.log.append_replicated(effect.records, self.clock_ms())
        except KafkaError as error:  # damaged on the way, or a full disk
            log.error("what the leader sent cannot be appended: %s", error)
            following.on_append_failed(self.raft, self.now_ms())
        if self.raft.can_vote:
            self._flush()

    def _truncate(self, effect: Truncate) -> None:
        self.log.truncate_to(effect.end_offset)

    def _flush(self) -> None:
        if self._flushing is None and self.log.synced_offset < self.log.end_offset and self.raft.can_vote:
            self._flushing = self.loop.create_task(self._flush_all(), name="metadata log sync")

    async def _flush_all(self) -> None:
        try:
            while self.log.synced_offset < self.log.end_offset and self._failure is None:
                task = self._plain_log.begin_flush()
                await self.run_in_executor(task.run)
                self._plain_log.finish_flush(task)
                self.drive()
        except (OSError, CorruptLog) as error:
            self.fail(error)
        finally:
            self._flushing = None

    # -- telling -----------------------------------------------------------------------------------------------------

    def _report_high_watermark(self, effect: ReportHighWatermark) -> None:
        self._plain_log.set_high_watermark(effect.offset)
        self._tell(partial(self._listener.on_high_watermark, effect.offset))

    def _tell(self, news: Callable[[], None]) -> None:
        self._news.append(news)
        if self._news_handle is None:
            self._news_handle = self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._news_handle = None
        while self._news:
            self._news.popleft()()

    def fail(self, error: Exception) -> None:
        """The metadata log or the vote file cannot be written any more: take no part, refuse whatever comes."""
        if self._failure is not None:
            return
        log.critical("this node leaves the metadata quorum: %s", error, exc_info=isinstance(error, AssertionError))
        self._failure = error
        self.raft.is_closing = True
        self.raft.resign(self.now_ms())
        for effect in self.raft.take_effects():
            if isinstance(effect, ReportResign | ReportLeader | WakeFetches):
                self._effects[type(effect)](effect)
        if self._timer is not None:
            self._timer.cancel()
        self._vote_writer.give_up()
        self._service.close()
        self._tell(partial(self._listener.on_failure, error))
