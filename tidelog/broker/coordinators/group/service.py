"""The group coordinator's interface to the request handlers: it routes a request to its group's
partition.

This module checks requests before they reach a group (ids, timeouts), and answers while a
partition loads. It holds no state of groups. Invariant: all requests of a group go to the partition
that Java's hash of the group id selects, so that Kafka reads the same groups from the same log.
Source: Kafka's `GroupCoordinatorService`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain
from typing import Any

from tidelog.broker.coordinators.group.admin import list_groups
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.coordinator import GroupCoordinator
from tidelog.broker.coordinators.group.group import Group
from tidelog.broker.coordinators.group.large_commits import PreparedCommit, commit_pieces
from tidelog.broker.coordinators.group.memory import GroupMemoryBudget
from tidelog.broker.coordinators.group.offsets import (
    FetchedTopics,
    RequestedTopics,
    commit_records,
    txn_commit_records,
)
from tidelog.broker.coordinators.group.records import OFFSET_RECORD_BYTES_MIN, OffsetCommit
from tidelog.broker.coordinators.outcome import Caller, RandomBits, TransactionEnd, WriteTransaction
from tidelog.broker.coordinators.ports import Ports, error_for_members
from tidelog.broker.coordinators.runtime import CoordinatorRuntime
from tidelog.broker.network.request import Deferred, RequestContext
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_groups import DeletableGroupResult
from tidelog.protocol.messages.describe_groups import DescribedGroup
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.list_groups import ListedGroup
from tidelog.protocol.messages.offset_commit import OffsetCommitRequest, OffsetCommitResponse
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from tidelog.protocol.messages.txn_offset_commit import TxnOffsetCommitRequest, TxnOffsetCommitResponse
from tidelog.storage.producers.verification import TransactionAppend, Verification

PROTOCOL_NAME_VERSION_MIN = 5  # SyncGroup has protocol type and name
LEAVE_MANY_VERSION_MIN = 3  # LeaveGroup names several members
NULL_PROTOCOL_VERSION_MIN = 7  # JoinGroup
# A smaller commit is cheap. The append compares its batch with max.message.bytes.
UNCHECKED_COMMIT_BYTES_MAX = 64 * 1024
# The records of a compressed commit may be so many times larger than a batch.
COMPRESSION_RATIO_MAX = 4
LAGS_MAX = 10_000
COMMITS_READ_PER_LAG = 10
# In transactions; each takes up to a kilobyte until its record is appended.
PREPARED_OFFSETS_MAX = 200_000
# The hashes of the ids that come again and again; longer ids are not worth their memory.
CACHED_HASHES_MAX = 4096
CACHED_CHARACTERS_MAX = 100
# No record can hold a longer id, and the hash of a long one would hold up the node.
HASHED_CHARACTERS_MAX = 32_767


class GroupCoordinatorService:
    """`partition_count`: the number of partitions that `__consumer_offsets` has, or will have after
    its creation. `has_session`: whether the controller surely counts this node among the active ones.

    A method returns the response, or a `Deferred` of a response or KafkaError. It raises KafkaError
    to refuse the whole request.
    """

    def __init__(
        self,
        config: GroupCoordinatorConfig,
        ports: Ports,
        rng: RandomBits,
        partition_count: Callable[[], int],
        has_session: Callable[[], bool],
    ) -> None:
        self.config = config
        self._has_session = has_session
        self._partition_count = partition_count
        self._memory = GroupMemoryBudget(config.max_groups_memory_bytes)
        self._offsets_memory = GroupMemoryBudget(config.max_offsets_memory_bytes)
        self._ports = ports
        self._prepared_offsets = 0
        self._runtime: CoordinatorRuntime[GroupCoordinator] = CoordinatorRuntime(
            "group coordinator",
            ports,
            lambda partition: GroupCoordinator(config, rng, self._memory, self._offsets_memory),
            write_timeout_ms=config.offsets_commit_timeout_ms,
            compression=config.offsets_topic_compression_codec,
        )

    # -- the node's side ---------------------------------------------------------------------------------------------

    def partition_for(self, group_id: str) -> int:
        """The partition of `__consumer_offsets` that holds the group."""
        return partition_of_id(group_id, self._partition_count())

    def on_partition_elected(self, index: int, leader_epoch: int) -> None:
        self._runtime.on_elected(index, leader_epoch)

    def on_partition_resigned(self, index: int) -> None:
        self._runtime.on_resigned(index)

    def on_topics_deleted(self, topics: Collection[tuple[str, bytes]]) -> None:
        """Delete the offsets of the topics, each given as (name, topic id), soon."""
        self._runtime.submit_to_all(
            lambda coordinator, end_offset, now: coordinator.forget_topics(topics, end_offset, now)
        )

    def is_loading(self) -> bool:
        return self._runtime.is_loading()

    def close(self) -> None:
        self._runtime.close()

    # -- membership --------------------------------------------------------------------------------------------------

    def join(self, context: RequestContext, request: JoinGroupRequest) -> JoinGroupResponse | Deferred:
        _check_group_id(request.group_id)
        timeout_ms = request.session_timeout_ms
        if not self.config.group_min_session_timeout_ms <= timeout_ms <= self.config.group_max_session_timeout_ms:
            raise KafkaError(ErrorCode.INVALID_SESSION_TIMEOUT)
        if context.api_version == 0:
            request.rebalance_timeout_ms = timeout_ms
        answer: JoinGroupResponse | Deferred = self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.join(request, caller_of(context, token), now),
            _null_protocol if context.api_version >= NULL_PROTOCOL_VERSION_MIN else None,
        )
        return answer

    def sync(self, context: RequestContext, request: SyncGroupRequest) -> SyncGroupResponse | Deferred:
        if context.api_version >= PROTOCOL_NAME_VERSION_MIN and None in (request.protocol_type, request.protocol_name):
            raise KafkaError(ErrorCode.INCONSISTENT_GROUP_PROTOCOL)
        _check_group_id(request.group_id)
        answer: SyncGroupResponse | Deferred = self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.sync(request, caller_of(context, token), now),
        )
        return answer

    def heartbeat(self, context: RequestContext, request: HeartbeatRequest) -> HeartbeatResponse | Deferred:
        _check_group_id(request.group_id)
        try:
            answer: HeartbeatResponse | Deferred = self._submit(
                request.group_id,
                lambda coordinator, token, now: coordinator.heartbeat(request, caller_of(context, token), now),
                bypasses_limits=True,
            )
            return answer
        except KafkaError as error:
            if error.code is not ErrorCode.COORDINATOR_LOAD_IN_PROGRESS:
                raise
            return HeartbeatResponse()  # sessions do not expire before the load is complete

    def leave(self, context: RequestContext, request: LeaveGroupRequest) -> LeaveGroupResponse | Deferred:
        _check_group_id(request.group_id)
        members = request.members
        finish: Callable[[Any], Any] | None = None
        if context.api_version < LEAVE_MANY_VERSION_MIN:
            members = [MemberIdentity(member_id=request.member_id)]
            finish = _leave_of_one
        answer: LeaveGroupResponse | Deferred = self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.leave(
                request.group_id, members, caller_of(context, token), now
            ),
            finish,
        )
        return answer

    # -- offsets -----------------------------------------------------------------------------------------------------

    def commit_offsets(
        self, context: RequestContext, request: OffsetCommitRequest, prepared: PreparedCommit | None = None
    ) -> Any:
        """`request` names only existing topics, with their ids where known."""
        self._check_size(request)
        return self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.commit_offsets(
                request, caller_of(context, token), now, prepared
            ),
        )

    @contextmanager
    def preparing(self, offset_count: int) -> Iterator[None]:
        """While a large commit in a transaction is under way here, whose request is counted nowhere else. Raises
        KafkaError if there are too many.
        """
        if self._prepared_offsets and self._prepared_offsets + offset_count > PREPARED_OFFSETS_MAX:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "too many large commits are under way")
        self._prepared_offsets += offset_count
        try:
            yield
        finally:
            self._prepared_offsets -= offset_count

    async def prepare_commit(
        self,
        context: RequestContext,
        request: OffsetCommitRequest | TxnOffsetCommitRequest,
        topic_ids: Mapping[str, bytes],
        pause: Callable[[], Awaitable[None]],
    ) -> PreparedCommit:
        """Make the records of a large commit, with pauses between its pieces. Raises KafkaError where the commit would
        be refused already.

        `topic_ids`: of the topics of a commit in a transaction.
        """
        is_transactional = isinstance(request, TxnOffsetCommitRequest)
        if is_transactional:
            _check_group_id(request.group_id)
        partition = self.partition_for(request.group_id)
        error = self._runtime.read(
            partition, lambda coordinator: coordinator.commit_refusal(request, context.api_version)
        )
        if error is not ErrorCode.NONE:
            raise KafkaError(error)
        response = TxnOffsetCommitResponse() if is_transactional else OffsetCommitResponse()
        compression = self.config.offsets_topic_compression_codec
        wall_ms, metadata_bytes_max = self._ports.wall_ms(), self.config.offset_metadata_max_bytes
        try:
            self._check_size(request)
            prepared = PreparedCommit(
                response, compression, self._ports.batch_bytes_max(partition), is_transactional=is_transactional
            )
            for piece in commit_pieces(request):
                await pause()
                made: tuple[list[OffsetCommit], Any] = (
                    txn_commit_records(piece, topic_ids, wall_ms, metadata_bytes_max)
                    if is_transactional
                    else commit_records(piece, wall_ms, metadata_bytes_max)
                )
                prepared.add(*made, wall_ms)
        except KafkaError as refusal:
            raise KafkaError(error_for_members(refusal.code)) from None
        except ValueError:
            # The record's format cannot hold a name from the request.
            raise KafkaError(ErrorCode.INVALID_REQUEST) from None
        if compression and prepared.records:
            await pause()
            prepared.batch.build()  # it keeps what it has compressed
        await pause()
        return prepared

    def begin_verification(
        self, group_id: str, producer_id: int, producer_epoch: int, adds: bool
    ) -> Verification | None:
        """Before `commit_offsets_of_transaction`: what it needs, None where the coordinator of the
        transaction need not be asked.
        """
        _check_group_id(group_id)
        return self._runtime.begin_verification(self.partition_for(group_id), producer_id, producer_epoch, adds)

    def commit_offsets_of_transaction(
        self,
        context: RequestContext,
        request: TxnOffsetCommitRequest,
        topic_ids: Mapping[str, bytes],
        verification: Verification | None,
        prepared: PreparedCommit | None = None,
    ) -> Any:
        """`request` names only topics that existed with these ids."""
        _check_group_id(request.group_id)
        self._check_size(request)
        transaction = WriteTransaction(request.producer_id, request.producer_epoch, TransactionAppend(verification))
        return self._submit(
            request.group_id,
            lambda coordinator, token, now: coordinator.commit_offsets_of_transaction(
                request, topic_ids, transaction, caller_of(context, token), now, prepared
            ),
        )

    def end_transaction(self, index: int, transaction: WriteTransaction, end: TransactionEnd) -> Any:
        """Commit or drop the transaction's offsets on one partition of `__consumer_offsets`.

        Returns True, or a Deferred, once the marker is committed.
        """
        return self._runtime.end_transaction(index, transaction, end)

    def fetch_offsets(
        self, group_id: str, topics: RequestedTopics | None, require_stable: bool
    ) -> FetchedTopics | Deferred:
        """The committed offsets of `topics`, or of all topics for None.

        `require_stable`: answer only after the pending writes are committed. A node that the controller may have
        replaced then also commits a record first: a later coordinator may know of newer offsets, and a transaction
        that begins at an older one processes its input twice.
        """
        answer: FetchedTopics | Deferred = self._runtime.submit(
            self.partition_for(group_id),
            lambda coordinator, token, now: coordinator.fetch_offsets(
                group_id,
                topics,
                require_stable,
                Caller(token, -1),
                now,
                must_prove_leadership=require_stable and not self._has_session(),
            ),
            after_pending_writes=require_stable,
            bypasses_limits=not require_stable,
        )
        return answer

    # -- operators ---------------------------------------------------------------------------------------------------

    def describe_groups(self, group_ids: Iterable[str], api_version: int) -> list[DescribedGroup]:
        groups = []
        for group_id in group_ids:
            try:
                groups.append(
                    self._runtime.read(self.partition_for(group_id), partial(_describe, group_id, api_version))
                )
            except KafkaError as error:
                groups.append(DescribedGroup(group_id=group_id, error_code=error.code))
        return groups

    def list_groups(self, states: Collection[str], types: Collection[str]) -> Iterator[list[ListedGroup]]:
        """All groups that this node coordinates now, in pieces of PIECE_ELEMENTS_MAX. Raises
        COORDINATOR_LOAD_IN_PROGRESS while a partition loads.
        """
        if self._runtime.is_loading():
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        groups = list(self._groups())
        return (
            list_groups(groups[start : start + PIECE_ELEMENTS_MAX], states, types)
            for start in range(0, len(groups), PIECE_ELEMENTS_MAX)
        )

    def _groups(self) -> Iterator[Group]:
        for partition in self._runtime.active_partitions():
            yield from self._runtime.read(partition, lambda coordinator: coordinator.groups).values()

    @property
    def group_count(self) -> int:
        """The number of groups that this node coordinates."""
        partitions = self._runtime.active_partitions()
        return sum(
            len(self._runtime.read(partition, lambda coordinator: coordinator.groups)) for partition in partitions
        )

    def group_counts(self) -> dict[str, int]:
        """The number of groups in each state. Raises COORDINATOR_LOAD_IN_PROGRESS while a partition loads."""
        if self._runtime.is_loading():
            raise KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        return Counter(group.state.value for group in self._groups())

    def lags(self, limit: int = LAGS_MAX) -> tuple[list[tuple[str, str, int, int]], bool]:
        """A list of (group, topic, partition, lag in records), and whether the list is complete.

        It covers the groups that this node coordinates and the partitions of which it has a
        replica. It runs in one turn of the loop, and therefore stops after `limit` lags, or after
        reading `limit` * COMMITS_READ_PER_LAG committed offsets.
        """
        shards = self._runtime.active_partitions()
        commits = chain.from_iterable(self._runtime.read(shard, _positions) for shard in shards)
        lags: list[tuple[str, str, int, int]] = []
        for commit_count, (group_id, topic, partition, offset) in enumerate(commits):
            if commit_count == limit * COMMITS_READ_PER_LAG:
                return lags, False
            end = self._ports.high_watermark(topic, partition)
            if end is None:
                continue
            if len(lags) == limit:
                return lags, False
            lags.append((group_id, topic, partition, max(end - offset, 0)))
        return lags, True

    def delete_group(self, context: RequestContext, group_id: str) -> DeletableGroupResult | Deferred:
        answer: DeletableGroupResult | Deferred = self._runtime.submit(
            self.partition_for(group_id),
            lambda coordinator, token, now: coordinator.delete_group(group_id, caller_of(context, token), now),
            after_pending_writes=True,
        )
        return answer

    def delete_offsets(
        self, context: RequestContext, group_id: str, topics: list[tuple[str, list[int]]]
    ) -> dict[tuple[str, int], ErrorCode] | Deferred:
        _check_group_id(group_id)
        answer: dict[tuple[str, int], ErrorCode] | Deferred = self._runtime.submit(
            self.partition_for(group_id),
            lambda coordinator, token, now: coordinator.delete_offsets(
                group_id, topics, caller_of(context, token), now
            ),
            after_pending_writes=True,
        )
        return answer

    def _check_size(self, request: OffsetCommitRequest | TxnOffsetCommitRequest) -> None:
        """Refuse a commit that is larger than its batch may be, as the append would after the work of making it."""
        names_bytes = OFFSET_RECORD_BYTES_MIN + len(request.group_id)
        size_bytes = sum(len(topic.partitions) * (names_bytes + len(topic.name)) for topic in request.topics)
        if size_bytes <= UNCHECKED_COMMIT_BYTES_MAX:
            return
        if self.config.offsets_topic_compression_codec:
            size_bytes //= COMPRESSION_RATIO_MAX
        if size_bytes > self._ports.batch_bytes_max(self.partition_for(request.group_id)):
            raise KafkaError(error_for_members(ErrorCode.MESSAGE_TOO_LARGE), "more offsets than a batch can hold")

    def _submit(
        self,
        group_id: str,
        operation: Any,
        finish: Callable[[Any], Any] | None = None,
        *,
        bypasses_limits: bool = False,
    ) -> Any:
        return self._runtime.submit(self.partition_for(group_id), operation, finish, bypasses_limits=bypasses_limits)


def _describe(group_id: str, api_version: int, coordinator: GroupCoordinator) -> DescribedGroup:
    return coordinator.describe_group(group_id, api_version)


def _positions(coordinator: GroupCoordinator) -> Iterator[tuple[str, str, int, int]]:
    return coordinator.offsets.positions()


def caller_of(context: RequestContext, token: int) -> Caller:
    # Java prints an address with a leading slash. Kafka's records and tools contain it.
    return Caller(token, context.api_version, context.client_id or "", f"/{context.client_host}")


def _check_group_id(group_id: str) -> None:
    if not group_id:
        raise KafkaError(ErrorCode.INVALID_GROUP_ID)


def _null_protocol(response: JoinGroupResponse) -> JoinGroupResponse:
    """From version 7 on a missing protocol is null, as in Kafka (JoinGroupResponse)."""
    response.protocol_name = response.protocol_name or None
    return response


def _leave_of_one(response: LeaveGroupResponse) -> LeaveGroupResponse:
    """Before version 3 the response carries the error of its one member."""
    return LeaveGroupResponse(error_code=response.members[0].error_code)


def partition_of_id(text: str, partition_count: int) -> int:
    """The partition of the coordinator's topic that holds this group id or transactional id."""
    if len(text) <= CACHED_CHARACTERS_MAX:
        return _cached_partition(text, partition_count)
    return abs_of_int32(java_hash(text[:HASHED_CHARACTERS_MAX])) % partition_count


@lru_cache(maxsize=CACHED_HASHES_MAX)
def _cached_partition(text: str, partition_count: int) -> int:
    return abs_of_int32(java_hash(text)) % partition_count


def java_hash(text: str) -> int:
    """Java's `String.hashCode`: a signed 32-bit number over UTF-16 units.

    In few operations on large numbers: hostile requests hold hundreds of long ids. The number is a row of lanes, one
    for each UTF-16 unit at first. A step adds neighbours, so that half as many lanes of double width are left, with the
    hashes of twice as many units.
    """
    units = text.encode("utf-16-be", "surrogatepass")
    value = int.from_bytes(units, "big")
    lane_count, lane_bits, factor = 1 << (len(units) // 2 - 1).bit_length(), 16, 31
    while lane_count > 1:
        lane_count //= 2
        mask = _every_second_lane(lane_bits, lane_count)
        value = (value >> lane_bits & mask) * factor + (value & mask)
        lane_bits, factor = 2 * lane_bits, factor * factor & 0xFFFFFFFF
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


@lru_cache(maxsize=256)
def _every_second_lane(lane_bits: int, count: int) -> int:
    """A mask for the low 32 bits of every second lane."""
    ones = b"\xff" * (min(lane_bits, 32) // 8)
    return int.from_bytes(ones.rjust(lane_bits // 4, b"\0") * count, "big")


def abs_of_int32(value: int) -> int:
    """Kafka's `Utils.abs`: the smallest number, which has no positive counterpart, becomes 0."""
    return 0 if value == -(1 << 31) else abs(value)
