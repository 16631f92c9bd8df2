"""Handles the quorum's requests: it converts Kafka's messages and parks the requests that must wait.

The core in `raft/` decides. A response leaves only after the state that it depends on is on the device.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Container
from typing import Any, Protocol

from tidelog.protocol.api import ApiKey
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages import add_raft_voter, remove_raft_voter, update_raft_voter
from tidelog.protocol.messages import describe_quorum as describe
from tidelog.protocol.messages.api_versions import ApiVersionsRequest
from tidelog.protocol.messages.begin_quorum_epoch import BeginQuorumEpochRequest, BeginQuorumEpochResponse
from tidelog.protocol.messages.end_quorum_epoch import EndQuorumEpochRequest, EndQuorumEpochResponse
from tidelog.protocol.messages.fetch import FetchRequest, FetchResponse
from tidelog.protocol.messages.fetch_snapshot import FetchSnapshotRequest, FetchSnapshotResponse
from tidelog.protocol.messages.vote import VoteRequest, VoteResponse
from tidelog.protocol.uuids import ZERO_UUID
from tidelog.replication.ports import Endpoint, Exchange, PeerUnreachable
from tidelog.replication.quorum import wire
from tidelog.replication.quorum.files.metadata_log import MetadataLog
from tidelog.replication.quorum.raft import leading, lost_vote, reconfiguration
from tidelog.replication.quorum.raft.commit import ReplicaProgress
from tidelog.replication.quorum.raft.messages import FetchAnswer, FetchAsk, SnapshotAnswer
from tidelog.replication.quorum.raft.raft import Raft
from tidelog.replication.quorum.raft.settings import QuorumSettings
from tidelog.replication.quorum.raft.state import Leader
from tidelog.replication.quorum.raft.voters import KRAFT_VERSION_MAX, KRAFT_VERSION_MIN, ReplicaKey, Voter
from tidelog.replication.threads import until_done
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.reader import ColdRead

API_VERSIONS_VERSION = 3
# The bound of parked fetches; beyond it the oldest one is answered. It is far below the dispatcher's COLD_TASKS_MAX,
# so that unknown replicas cannot take the places of brokers' heartbeats.
PARKED_MAX = 1_000
# Fetches of replicas that are neither voters nor registered brokers, in one turn of the loop: each takes some 0.5 ms.
STRANGERS_AT_ONCE = 10
WAIT_MS_MAX = 300_000  # a replica may name any time, and a waiting fetch holds memory


class QuorumNode(Protocol):
    """The interface of `driver.RaftNode` for the service."""

    raft: Raft
    log: MetadataLog
    settings: QuorumSettings
    loop: asyncio.AbstractEventLoop
    exchange: Exchange
    run_in_executor: Callable[[Callable[[], Any]], Awaitable[Any]]
    clock_ms: Callable[[], int]
    doubt_snapshots: Callable[[], None]
    is_closed: bool
    registered_brokers: Callable[[], Container[int]]

    def now_ms(self) -> float: ...
    def drive(self) -> None: ...
    async def persisted(self) -> None: ...
    def meet_damage(self) -> None: ...
    def tolerates(self, error: Exception) -> bool: ...


class QuorumService:
    def __init__(self, node: QuorumNode, cluster_id: str) -> None:
        self._node = node
        self._cluster_id = cluster_id
        self._parked: dict[asyncio.Future[bool], int] = {}  # with the replica's id
        self._strangers: deque[asyncio.Future[bool]] = deque()  # of the parked ones: to be answered, in this order
        self._is_changing = False
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []

    def _knows(self, cluster_id: str | None) -> bool:
        return cluster_id is None or cluster_id in ("", self._cluster_id)

    # -- elections ---------------------------------------------------------------------------------------------------

    async def vote(self, request: VoteRequest, version: int) -> VoteResponse:
        node = self._node
        if not self._knows(request.cluster_id):
            return VoteResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        try:
            ask = wire.vote_ask(request)
        except KafkaError as error:
            return VoteResponse(error_code=error.code)
        answer = node.raft.on_vote(ask, node.now_ms())
        node.drive()
        await node.persisted()
        return wire.vote_response(answer, version)

    async def begin_quorum_epoch(self, request: BeginQuorumEpochRequest, version: int) -> BeginQuorumEpochResponse:
        node = self._node
        if not self._knows(request.cluster_id):
            return BeginQuorumEpochResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        try:
            ask = wire.begin_ask(request)
        except KafkaError as error:
            return BeginQuorumEpochResponse(error_code=error.code)
        answer = node.raft.on_begin(ask, node.now_ms())
        node.drive()
        await node.persisted()
        return wire.begin_response(answer, version)

    async def end_quorum_epoch(self, request: EndQuorumEpochRequest, version: int) -> EndQuorumEpochResponse:
        node = self._node
        if not self._knows(request.cluster_id):
            return EndQuorumEpochResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        try:
            ask = wire.end_ask(request)
        except KafkaError as error:
            return EndQuorumEpochResponse(error_code=error.code)
        answer = node.raft.on_end(ask, node.now_ms())
        node.drive()
        await node.persisted()
        return wire.end_response(answer, version)

    # -- the log -----------------------------------------------------------------------------------------------------

    async def fetch(self, request: FetchRequest, version: int) -> FetchResponse:
        node = self._node
        if version >= 12 and not self._knows(request.cluster_id):
            return FetchResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        try:
            ask = wire.fetch_ask(request, version)
        except KafkaError as error:
            return FetchResponse(error_code=error.code)
        request.forgotten_topics_data = []  # a thousand may wait, with megabytes each
        if ask.replica.id == wire.REPAIR_REPLICA_ID:
            return await self._fetch_for_repair(ask, request, version)
        answer = node.raft.on_fetch(ask, node.now_ms())
        node.drive()
        if ask.max_wait_ms > 0 and not leading.is_worth_answering(node.raft, ask, answer):
            answer = await self._park(ask, answer)
        if not answer.error and answer.diverging is None and answer.snapshot is None:
            bytes_max = min(request.max_bytes, request.topics[0].partitions[0].partition_max_bytes)
            answer = await self._with_records(ask, answer, min(bytes_max, node.settings.fetch_bytes_max))
        await node.persisted()
        leading.on_sending(node.raft, ask.replica, len(answer.records), node.now_ms())
        return wire.fetch_response(answer, node.log.start_offset, version)

    async def _fetch_for_repair(self, ask: FetchAsk, request: FetchRequest, version: int) -> FetchResponse:
        """Another voter repairs damaged records (`metadata_repair.py`): send this log's, leader or not, committed or
        not. Or it repairs its vote (`vote_recovery.py`), and wants no records.
        """
        node = self._node
        answer = lost_vote.answer(node.raft)
        bytes_max = min(request.max_bytes, node.settings.fetch_bytes_max)
        while bytes_max > 0 and node.log.start_offset <= ask.end_offset < node.log.end_offset:
            records = await self._read(ask.end_offset, bytes_max, node.log.end_offset)
            if records is not None:
                answer = answer._replace(records=records)
                break
        return wire.fetch_response(answer, node.log.start_offset, version)

    async def _park(self, ask: FetchAsk, answer: FetchAnswer) -> FetchAnswer:
        """Wait until the answer has news, the wait time ends, or too many fetches wait.

        Two processes may fetch as the same replica: one of them has a copy of the other's disk. If each of them ended
        the wait of the other, both would fetch without a pause.
        """
        loop = self._node.loop
        deadline = loop.time() + min(ask.max_wait_ms, WAIT_MS_MAX) / 1000
        while not self._node.is_closed:
            if len(self._parked) >= PARKED_MAX:
                self._give_up_oldest()
            future: asyncio.Future[bool] = loop.create_future()
            self._parked[future] = ask.replica.id
            timer = loop.call_at(deadline, _answer_now, future)
            try:
                has_news = await future
            finally:
                timer.cancel()
                self._parked.pop(future, None)
            answer = leading.answer_fetch(self._node.raft, ask)
            if not has_news or leading.is_worth_answering(self._node.raft, ask, answer):
                break
        return answer

    def _give_up_oldest(self) -> None:
        oldest = next(iter(self._parked))
        del self._parked[oldest]
        if not oldest.done():
            oldest.set_result(False)

    def wake(self) -> None:
        """There is news: the fetches of voters and registered brokers have it at once, all others a few in a turn.

        Whatever can connect may fetch, and a thousand answers take a second.
        """
        members = {voter.key.id for voter in self._node.raft.voters.latest}
        brokers = self._node.registered_brokers()
        was_empty = not self._strangers
        self._strangers.clear()
        for future, replica_id in self._parked.items():
            if future.done():
                continue
            if replica_id in members or replica_id in brokers or self._node.is_closed:
                future.set_result(True)
            else:
                self._strangers.append(future)
        if was_empty and self._strangers:
            self._wake_strangers()

    def _wake_strangers(self) -> None:
        for _ in range(min(len(self._strangers), STRANGERS_AT_ONCE)):
            future = self._strangers.popleft()
            if not future.done():
                future.set_result(True)
        if self._strangers:
            self._node.loop.call_soon(self._wake_strangers)

    async def _with_records(self, ask: FetchAsk, answer: FetchAnswer, bytes_max: int) -> FetchAnswer:
        node = self._node
        while ask.end_offset < (end_offset := leading.fetchable_end(node.raft)):
            records = await self._read(ask.end_offset, bytes_max, end_offset)
            if records is not None:
                return answer._replace(records=records)
            answer = leading.answer_fetch(node.raft, ask)
            if answer.error or answer.diverging is not None or answer.snapshot is not None:
                break
        return answer

    async def _read(self, offset: int, bytes_max: int, end_offset: int) -> bytes | None:
        """The log's records from `offset` to `end_offset`; None if they had to be read from the device. Then the log
        may have changed meanwhile, and the caller reads again.

        Raises KafkaError(KAFKA_STORAGE_ERROR).
        """
        node = self._node
        try:
            return node.log.records_from(offset, bytes_max, end_offset)
        except ColdRead as cold:
            cold.pin()
            try:
                await until_done(node.run_in_executor(cold.warm))
            finally:
                cold.unpin()
            return None
        except (OSError, CorruptLog, DamagedRecords) as error:
            if isinstance(error, DamagedRecords):
                node.meet_damage()
            else:
                node.tolerates(error)
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"the metadata log cannot be read: {error}") from None

    async def fetch_snapshot(self, request: FetchSnapshotRequest, version: int) -> FetchSnapshotResponse:
        node = self._node
        if not self._knows(request.cluster_id):
            return FetchSnapshotResponse(error_code=ErrorCode.INCONSISTENT_CLUSTER_ID)
        try:
            ask = wire.snapshot_ask(request)
        except KafkaError as error:
            return FetchSnapshotResponse(error_code=error.code)
        raft = node.raft
        error_code = leading.on_fetch_snapshot(raft, ask, node.now_ms())
        answer = SnapshotAnswer(error_code, raft.epoch, raft.leader_id, raft.known_leader_endpoint())
        if error_code == ErrorCode.NONE:
            if ask.position <= 0:
                node.doubt_snapshots()
            bytes_max = max(0, min(request.max_bytes, node.settings.snapshot_part_bytes))
            try:
                part = node.log.snapshot_part(ask.snapshot, max(0, ask.position), bytes_max)
            except OSError as error:
                node.tolerates(error)
                raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR, f"the snapshot cannot be read: {error}") from None
            if part is None:
                answer = answer._replace(error=ErrorCode.SNAPSHOT_NOT_FOUND)
            elif not 0 <= ask.position < part[0]:
                answer = answer._replace(error=ErrorCode.POSITION_OUT_OF_RANGE)
            else:
                answer = answer._replace(size_bytes=part[0], position=ask.position, data=part[1])
        node.drive()
        await node.persisted()
        leading.on_sending(raft, ask.replica, len(answer.data), node.now_ms())
        return wire.snapshot_response(answer, ask.snapshot, version)

    # -- description of the quorum -----------------------------------------------------------------------------------

    async def describe_quorum(
        self, request: describe.DescribeQuorumRequest, version: int
    ) -> describe.DescribeQuorumResponse:
        raft = self._node.raft
        data = describe.DescribeQuorumResponsePartitionData(
            partition_index=0,
            error_code=ErrorCode.NOT_LEADER_OR_FOLLOWER,
            leader_id=raft.leader_id,
            leader_epoch=raft.epoch,
            high_watermark=-1,
        )
        names = [(topic.topic_name, [one.partition_index for one in topic.partitions]) for topic in request.topics]
        if names != [(wire.TOPIC, [0])]:
            return _no_such_quorum(names)
        if isinstance(raft.state, Leader):
            data.error_code = ErrorCode.NONE
            data.high_watermark = raft.state.progress.high_watermark
            data.current_voters = [self._described(replica, version) for replica in raft.state.progress.voters]
            data.observers = [self._described(replica, version) for replica in raft.state.progress.observers]
        topic = describe.DescribeQuorumResponseTopicData(topic_name=wire.TOPIC, partitions=[data])
        response = describe.DescribeQuorumResponse(topics=[topic])
        if version >= 2 and data.error_code == ErrorCode.NONE:
            response.nodes = [
                describe.Node(
                    node_id=voter.key.id,
                    listeners=[
                        describe.Listener(name=name, host=at.host, port=at.port) for name, at in voter.endpoints
                    ],
                )
                for voter in raft.voters.latest
            ]
        return response

    def _described(self, replica: ReplicaProgress, version: int) -> describe.ReplicaState:
        """The replica's state, with its monotonic times converted to wall-clock times."""
        node = self._node
        now_ms, wall_ms = node.now_ms(), node.clock_ms()

        def told(at_ms: float) -> int:
            return -1 if at_ms < 0 else int(wall_ms - (now_ms - at_ms))

        if replica.key.id == node.raft.own.id:
            times, end_offset = (wall_ms, wall_ms), node.log.end_offset
        else:
            times, end_offset = (told(replica.last_fetch_ms), told(replica.last_caught_up_ms)), replica.end_offset
        return describe.ReplicaState(
            replica_id=replica.key.id,
            replica_directory_id=replica.key.directory_id if version >= 2 else ZERO_UUID,
            log_end_offset=end_offset,
            last_fetch_timestamp=times[0],
            last_caught_up_timestamp=times[1],
        )

    # -- changes of the voters ---------------------------------------------------------------------------------------

    async def add_voter(
        self, request: add_raft_voter.AddRaftVoterRequest, version: int
    ) -> add_raft_voter.AddRaftVoterResponse:
        response = add_raft_voter.AddRaftVoterResponse(error_message=None)
        try:
            await self._change(request, self._add(request), request.timeout_ms, request.ack_when_committed)
        except KafkaError as error:
            response.error_code, response.error_message = error.code, error.message
        return response

    async def remove_voter(
        self, request: remove_raft_voter.RemoveRaftVoterRequest, version: int
    ) -> remove_raft_voter.RemoveRaftVoterResponse:
        response = remove_raft_voter.RemoveRaftVoterResponse(error_message=None)
        try:
            await self._change(request, self._remove(request), self._node.settings.request_timeout_ms, True)
        except KafkaError as error:
            response.error_code, response.error_message = error.code, error.message
        return response

    async def update_voter(
        self, request: update_raft_voter.UpdateRaftVoterRequest, version: int
    ) -> update_raft_voter.UpdateRaftVoterResponse:
        raft = self._node.raft
        error_code = ErrorCode.NONE
        try:
            await self._change(request, self._update(request), 0, False)
        except KafkaError as error:
            error_code = error.code
        await self._node.persisted()
        at = raft.known_leader_endpoint() or Endpoint("", 0)
        leader = update_raft_voter.CurrentLeader(
            leader_id=raft.leader_id, leader_epoch=raft.epoch, host=at.host, port=at.port
        )
        return update_raft_voter.UpdateRaftVoterResponse(error_code=error_code, current_leader=leader)

    async def _change(self, request: Any, change: Any, timeout_ms: int, wait: bool) -> None:
        """Change the voters, one change at a time. `change` decides; `wait`: return after the record is committed."""
        node = self._node
        if not self._knows(request.cluster_id) or self._is_changing:
            change.close()
            if self._is_changing:
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "another change of voters is under way")
            raise KafkaError(ErrorCode.INCONSISTENT_CLUSTER_ID)
        self._is_changing = True
        try:
            await change
            node.drive()
            if not isinstance(node.raft.state, Leader):
                # The record may not be in the log, and then the latest voters are those before, which are committed.
                raise KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "this node has given up the lead")
            if wait:
                await self._committed(node.raft.voters.latest_offset, timeout_ms or node.settings.request_timeout_ms)
        finally:
            self._is_changing = False

    async def _committed(self, offset: int, timeout_ms: int) -> None:
        """Wait until the record at `offset` of the present epoch is committed. Raises KafkaError."""
        raft = self._node.raft
        if raft.high_watermark > offset:
            return
        future: asyncio.Future[None] = self._node.loop.create_future()
        self._waiting.append((offset, raft.epoch, future))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await future
        except TimeoutError:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "it was not committed in time") from None

    def check_waiters(self) -> None:
        """Complete the waits for commits that have happened, and fail those that no longer can."""
        if not self._waiting:
            return
        raft = self._node.raft
        waiting, self._waiting = self._waiting, []
        for offset, epoch, future in waiting:
            if future.done():
                continue
            if epoch != raft.epoch:
                future.set_exception(KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the lead was lost meanwhile"))
            elif raft.high_watermark > offset:
                future.set_result(None)
            else:
                self._waiting.append((offset, epoch, future))

    def close(self) -> None:
        """End all waits with an error, because this node has left the quorum."""
        self.wake()
        waiting, self._waiting = self._waiting, []
        for _, _, future in waiting:
            if not future.done():
                future.set_exception(KafkaError(ErrorCode.BROKER_NOT_AVAILABLE, "this node has left the quorum"))

    async def _add(self, request: add_raft_voter.AddRaftVoterRequest) -> None:
        node = self._node
        key = ReplicaKey(request.voter_id, request.voter_directory_id)
        endpoints = tuple((one.name, Endpoint(one.host, one.port)) for one in request.listeners)
        reconfiguration.require_addition(node.raft, key)
        if not endpoints:
            raise KafkaError(ErrorCode.INVALID_REQUEST, "a voter without an address")
        version_min, version_max = await self._kraft_versions_of_controller(endpoints[0][1])
        reconfiguration.add_voter(node.raft, Voter(key, endpoints, version_min, version_max), node.now_ms())

    async def _kraft_versions_of_controller(self, endpoint: Endpoint) -> tuple[int, int]:
        """The kraft.version range of the node at `endpoint`, or this node's own range if it states none.

        Raises KafkaError: REQUEST_TIMED_OUT where no node answers, INVALID_REQUEST where one answers that serves no
        Vote. A client's listener, or a node that is only a broker, would count as a voter and never vote.
        """
        node = self._node
        request = ApiVersionsRequest(client_software_name="tidelog", client_software_version="0")
        try:
            response = await node.exchange(
                endpoint, request, API_VERSIONS_VERSION, timeout_ms=node.settings.request_timeout_ms
            )
        except PeerUnreachable as error:
            raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, f"the new voter does not answer: {error}") from None
        if not any(each.api_key == ApiKey.VOTE for each in response.api_keys):
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"{endpoint} is no listener of a controller: it takes no votes")
        for feature in response.supported_features:
            if feature.name == "kraft.version":
                return feature.min_version, feature.max_version
        return KRAFT_VERSION_MIN, KRAFT_VERSION_MAX

    async def _remove(self, request: remove_raft_voter.RemoveRaftVoterRequest) -> None:
        reconfiguration.remove_voter(self._node.raft, ReplicaKey(request.voter_id, request.voter_directory_id))

    async def _update(self, request: update_raft_voter.UpdateRaftVoterRequest) -> None:
        error = leading.refusal(self._node.raft, request.current_leader_epoch)
        if error != ErrorCode.NONE:
            raise KafkaError(error)
        endpoints = tuple((one.name, Endpoint(one.host, one.port)) for one in request.listeners)
        feature = request.k_raft_version_feature
        key = ReplicaKey(request.voter_id, request.voter_directory_id)
        voter = Voter(key, endpoints, feature.min_supported_version, feature.max_supported_version)
        reconfiguration.update_voter(self._node.raft, voter)


def _no_such_quorum(names: list[tuple[str, list[int]]]) -> describe.DescribeQuorumResponse:
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    return describe.DescribeQuorumResponse(
        topics=[
            describe.DescribeQuorumResponseTopicData(
                topic_name=name,
                partitions=[
                    describe.DescribeQuorumResponsePartitionData(partition_index=index, error_code=unknown)
                    for index in indexes
                ],
            )
            for name, indexes in names
        ]
    )


def _answer_now(future: asyncio.Future[bool]) -> None:
    if not future.done():
        future.set_result(False)
