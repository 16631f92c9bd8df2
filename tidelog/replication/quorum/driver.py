"""RaftNode: this node's part in the metadata quorum. A shell: what is to be done is `raft.py`'s to say.

It syncs, sends, wakes and reports; requests are answered in `service.py`. Invariants: nothing is told to anybody before
the vote and epoch it rests on are on the device; what a follower reports and a leader counts of its own log is.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable
from tidelog.replication.quorum import following, wire
from tidelog.replication.quorum.messages import (
    AppendLeaderChange,
    AppendRecords,
    AppendVoters,
    Effect,
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
from tidelog.replication.quorum.snapshot import CorruptSnapshot, SnapshotId
from tidelog.replication.quorum.state import Follower, Leader
from tidelog.replication.quorum.vote_store import QuorumState, VoteStore
from tidelog.replication.quorum.voters import ReplicaKey, Voter, VoterHistory, VoterSet, static_voters
from tidelog.storage.disk import Disk
from tidelog.storage.log import CorruptLog, PartitionLog

__all__ = ["InconsistentVoters", "MetadataListener", "NotLeader", "QuorumSettings", "RaftNode", "ReplayedBatch"]

log = logging.getLogger("tidelog.quorum")

# A leader that closes waits so long for the others to hear of it.
FAREWELL_MS = 250
WAITERS_MAX = 10_000


class NotLeader(Exception):
    """This node does not lead the metadata quorum, so it may not append."""


class InconsistentVoters(Exception):
    """The configured voters are not those that the vote file was written with."""


class MetadataListener(Protocol):
    """Whom the quorum tells, in order. On the loop's thread, never from within a call into RaftNode but `start`."""

    def on_snapshot(self, identity: SnapshotId, values: list[bytes], timestamp_ms: int) -> None:
        """Replaces everything known; at the start, and when one was fetched from the leader."""
        ...

    def on_high_watermark(self, offset: int) -> None:
        """Offsets below `offset` are committed: pull them with `read`."""
        ...

    def on_leader(self, leader_id: int, epoch: int) -> None:
        """Whoever leads now, -1 for nobody."""
        ...

    def on_lead(self, epoch: int) -> None:
        """This node leads, and everything before its epoch is committed and was reported."""
        ...

    def on_resign(self, epoch: int) -> None:
        """It leads no longer: after every `on_lead`, before the `on_leader` of the next."""
        ...


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
        self._service = QuorumService(self, cluster_id)
        self._failure: Exception | None = None
        self._is_driving = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._persisting: asyncio.Task[None] | None = None
        self._wanted: tuple[int, ElectionState] = (0, ElectionState())
        self._persisted = 0
        self._persist_waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._commit_waiters: list[tuple[int, int, asyncio.Future[None]]] = []
        self._news: deque[Callable[[], None]] = deque()
        self._news_handle: asyncio.Handle | None = None
        self._effects: dict[type, Callable[[Any], None]] = {
            Persist: self._persist,
            Send: self._send,
            AppendLeaderChange: self._append_leader_change,
            AppendVoters: self._append_voters,
            AppendRecords: self._append_records,
            Truncate: self._truncate,
            KeepSnapshotPart: self._keep_part,
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
        for running in (self._flushing, self._persisting):
            if running is not None:
                await running
        self._fail_waiters()
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

    def voter_ids(self) -> list[int]:
        return self._history.latest.ids

    def append(self, values: Sequence[bytes], now_ms: int) -> int:
        """One batch, all or nothing; the offset of its last record. Raises NotLeader, OSError, KafkaError."""
        if not self.is_leader or self.is_closed:
            raise NotLeader(f"node {self.raft.leader_id} leads in epoch {self.raft.epoch}")
        try:
            last_offset = self.log.append_values(values, self.raft.epoch, now_ms)
        except (OSError, CorruptLog) as error:
            self._fail(error)
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

    async def vote(self, request: Any, version: int) -> Any:
        return await self._served(self._service.vote, request, version)

    async def begin_quorum_epoch(self, request: Any, version: int) -> Any:
        return await self._served(self._service.begin_quorum_epoch, request, version)

    async def end_quorum_epoch(self, request: Any, version: int) -> Any:
        return await self._served(self._service.end_quorum_epoch, request, version)

    async def fetch(self, request: Any, version: int) -> Any:
        return await self._served(self._service.fetch, request, version)

    async def fetch_snapshot(self, request: Any, version: int) -> Any:
        return await self._served(self._service.fetch_snapshot, request, version)

    async def describe_quorum(self, request: Any, version: int) -> Any:
        return await self._served(self._service.describe_quorum, request, version)

    async def add_voter(self, request: Any, version: int) -> Any:
        return await self._served(self._service.add_voter, request, version)

    async def remove_voter(self, request: Any, version: int) -> Any:
        return await self._served(self._service.remove_voter, request, version)

    async def update_voter(self, request: Any, version: int) -> Any:
        return await self._served(self._service.update_voter, request, version)

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
        number = self._wanted[0]
        if self._persisted < number:
            future: asyncio.Future[None] = self.loop.create_future()
            self._persist_waiters.append((number, future))
            await future

    async def committed(self, offset: int, timeout_ms: int) -> None:
        """Until the record at `offset` of the present epoch is. Raises KafkaError."""
        if self.raft.high_watermark > offset:
            return
        if len(self._commit_waiters) >= WAITERS_MAX:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "too many wait already")
        future: asyncio.Future[None] = self.loop.create_future()
        self._commit_waiters.append((offset, self.raft.epoch, future))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await future
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "it was not committed in time") from None

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
                self._carry_out(effects)
            self._check_waiters()
            self._arm()
        except (OSError, CorruptLog, KafkaError, AssertionError) as error:
            self._fail(error)
        finally:
            self._is_driving = False

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            self._effects[type(effect)](effect)

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

    def _persist(self, effect: Persist) -> None:
        number = self._wanted[0] + 1
        self._wanted = (number, effect.state)
        if self._persisting is None:
            self._persisting = self.loop.create_task(self._persist_all(), name="quorum-state")

    def _file_state(self, state: ElectionState) -> QuorumState:
        is_dynamic = self._history.kraft_version > 0
        voted = state.voted or ReplicaKey(-1)
        return QuorumState(
            leader_id=state.leader_id,
            leader_epoch=state.epoch,
            voted_id=voted.id,
            voted_directory_id=voted.directory_id,
            voter_ids=() if is_dynamic else self._history.static.ids,
            data_version=1 if is_dynamic else 0,
        )

    async def _persist_all(self) -> None:
        try:
            while self._persisted < self._wanted[0]:
                number, state = self._wanted
                await self.run_in_executor(partial(self._votes.write, self._file_state(state), sync=True))
                self._persisted = number
                while self._persist_waiters and self._persist_waiters[0][0] <= number:
                    _, future = self._persist_waiters.popleft()
                    if not future.done():
                        future.set_result(None)
        except OSError as error:
            self._fail(error)
        finally:
            self._persisting = None

    def _send(self, send: Send) -> None:
        task = self.loop.create_task(self._ask(send), name=f"{type(send.ask).__name__} to {send.peer.id}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _ask(self, send: Send) -> None:
        settings, ask = self.settings, send.ask
        bytes_max = settings.fetch_bytes_max if isinstance(ask, FetchAsk) else settings.snapshot_part_bytes
        request = wire.request_of(ask, self._cluster_id, settings.own_endpoints, bytes_max)
        timeout_ms = settings.request_timeout_ms + (ask.max_wait_ms if isinstance(ask, FetchAsk) else 0)
        await self.persisted()
        try:
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
            self.raft.on_answer(send, answer, self.now_ms())
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
        except KafkaError as error:
            if error.code == ErrorCode.KAFKA_STORAGE_ERROR:
                raise
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
            self._fail(error)
        finally:
            self._flushing = None

    def _keep_part(self, effect: KeepSnapshotPart) -> None:
        try:
            self.log.keep_part(effect.snapshot, effect.position, effect.data)
        except OSError as error:
            log.error("snapshot %s cannot be kept: %s", effect.snapshot, error)
            following.on_snapshot_failed(self.raft, effect.snapshot, self.now_ms())
            return
        if effect.is_last:
            task = self.loop.create_task(self._install(effect.snapshot), name="snapshot")
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _install(self, identity: SnapshotId) -> None:
        try:
            snapshot = await self.run_in_executor(partial(self.log.finish_part, identity))
        except (OSError, CorruptSnapshot, KafkaError) as error:
            log.error("snapshot %s was fetched in vain: %s", identity, error)
            following.on_snapshot_failed(self.raft, identity, self.now_ms())
            self.drive()
            return
        state = self.raft.state
        if isinstance(state, Follower) and state.download is not None and state.download.snapshot == identity:
            self.log.install(identity, snapshot, self.clock_ms())
            following.on_snapshot_installed(self.raft, identity, self.now_ms())
            self._tell(partial(self._listener.on_snapshot, identity, snapshot.values, snapshot.last_timestamp_ms))
        self.drive()

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

    def _check_waiters(self) -> None:
        if not self._commit_waiters:
            return
        waiting, self._commit_waiters = self._commit_waiters, []
        for offset, epoch, future in waiting:
            if future.done():
                continue
            if epoch != self.raft.epoch or not isinstance(self.raft.state, Leader):
                future.set_exception(KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the lead was lost meanwhile"))
            elif self.raft.high_watermark > offset:
                future.set_result(None)
            else:
                self._commit_waiters.append((offset, epoch, future))

    def _fail_waiters(self) -> None:
        error = KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "this node takes no part in the quorum any more")
        futures = [one[-1] for one in self._commit_waiters] + [one[-1] for one in self._persist_waiters]
        self._commit_waiters.clear()
        self._persist_waiters.clear()
        for future in futures:
            if not future.done():
                future.set_exception(error)

    def _fail(self, error: Exception) -> None:
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
        self._fail_waiters()
