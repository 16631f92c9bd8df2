"""The client of one group's coordinator: lookup, requests, and offset commits and fetches.

Here: FindCoordinator, OffsetCommit, OffsetFetch and the meaning of their errors. Not here: joining
(`membership`). Invariant: after NOT_COORDINATOR, or without a response, the next request looks the
coordinator up again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple, TypeVar

from tidelog.client.assignment.protocol import by_topic
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.cluster import COORDINATOR, Cluster
from tidelog.client.network.connection import Connection
from tidelog.client.network.metadata import NO_TOPIC_ID
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
)

Response = TypeVar("Response", bound=Message)

_LAST_VERSION_WITH_NAMES = 9
"""From version 10 on both offset APIs use topic ids only: of an offset that belongs to a deleted topic, and of topics
that the metadata does not cover, the id is unknown.
"""
_LAST_VERSION_WITH_IDS = 10
_MOVED_ERRORS = frozenset((ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE))
_ERRORS_OF_A_TOPIC = frozenset(
    (
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.OFFSET_METADATA_TOO_LARGE,
    )
)
_UNANSWERED_ERRORS = frozenset((ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT))


class GroupIdentity(NamedTuple):
    """The member that commits.

    The default is for a consumer outside of the group, with assigned partitions.
    """

    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


class Coordinator:
    """The coordinator of one group."""

    def __init__(self, cluster: Cluster, group_id: str) -> None:
        self._cluster = cluster
        self.group_id = group_id
        self._node_id: int | None = None
        self._find_lock: asyncio.Lock = asyncio.Lock()
        self.fetching_identity: Callable[[], GroupIdentity] = GroupIdentity
        """The member that fetches offsets, in the consumer protocol (KIP-848)."""
        self.latest_identity: Callable[[GroupIdentity, Iterable[TopicPartition]], GroupIdentity] | None = None
        """The identity for an attempt to commit these partitions, in the consumer protocol: the member's
        epoch may have moved since the call.
        """
        self.on_member_error: Callable[[ErrorCode], None] | None = None

    @property
    def is_known(self) -> bool:
        return self._node_id is not None

    def forget(self) -> None:
        """Look the coordinator up again before the next request."""
        self._node_id = None

    def handle_error(self, code: ErrorCode) -> None:
        """Forget the coordinator after an error that says it moved or did not answer."""
        if code in _MOVED_ERRORS or code in _UNANSWERED_ERRORS:
            self.forget()

    async def find(self) -> int:
        """The coordinator's node id. Raises KafkaError."""
        async with self._find_lock:
            if self._node_id is None:
                self._node_id = await self._cluster.find_coordinator(self.group_id)
            return self._node_id

    async def connect(self) -> None:
        """Connect to the coordinator if it is known. The next request meets a failure again."""
        if self._node_id is not None:
            with suppress(KafkaError):
                await self._cluster.connection(self._node_id, COORDINATOR)

    async def call(
        self,
        request: Message,
        response: type[Response],
        timeout_ms: float | None = None,
        max_version: int = 32767,
        purpose: str = COORDINATOR,
    ) -> Response:
        """Send one request and wait. Raises KafkaError.

        Without a response the coordinator is forgotten.
        """
        node_id = await self.find()
        try:
            return await self._cluster.call(
                node_id, request, response, purpose=purpose, timeout_ms=timeout_ms, max_version=max_version
            )
        except KafkaError as error:
            self.handle_error(error.code)
            raise

    # -- offsets

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], identity: GroupIdentity, timeout_ms: float
    ) -> None:
        """Commit, with retries of retriable errors.

        Raises KafkaError: ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID,
        REBALANCE_IN_PROGRESS when `identity` is no longer a member or the group rebalances;
        REQUEST_TIMED_OUT.
        """
        if offsets:
            await self.retry(timeout_ms, lambda: self.commit_once(offsets, identity))

    async def commit_once(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        identity: GroupIdentity,
        topic_ids: Mapping[str, bytes] | None = None,
    ) -> None:
        """Send one OffsetCommit. Raises the KafkaError of a refused partition: if there is one, an error of the group.

        `topic_ids`: the ids of the topics to which the offsets belong. If all are known, a new topic with the name of
        a deleted one does not get its offsets.
        """
        if self.latest_identity is not None:
            identity = self.latest_identity(identity, offsets)
        topics: dict[str, OffsetCommitRequestTopic] = {}
        for (topic, number), offset in offsets.items():
            topic_id = (topic_ids or {}).get(topic, NO_TOPIC_ID)
            entry = topics.setdefault(topic, OffsetCommitRequestTopic(name=topic, topic_id=topic_id))
            entry.partitions.append(
                OffsetCommitRequestPartition(
                    partition_index=number,
                    committed_offset=offset.offset,
                    committed_leader_epoch=offset.leader_epoch,
                    committed_metadata=offset.metadata,
                )
            )
        request = OffsetCommitRequest(
            group_id=self.group_id,
            generation_id_or_member_epoch=identity.generation,
            member_id=identity.member_id,
            group_instance_id=identity.instance_id,
            topics=list(topics.values()),
        )
        names = {entry.topic_id: name for name, entry in topics.items()}
        answer = await self.call(request, OffsetCommitResponse, max_version=_max_version(names))
        unanswered = set(offsets)
        errors: list[KafkaError] = []
        for topic_result in answer.topics:
            name = topic_result.name or names.get(topic_result.topic_id, "")
            for result in topic_result.partitions:
                partition = TopicPartition(name, result.partition_index)
                code = self._explained(ErrorCode.of(result.error_code), name, topic_result.topic_id)
                if code is not ErrorCode.NONE:
                    errors.append(KafkaError(code, f"commit of {partition}"))
                unanswered.discard(partition)
        if errors:
            # A broker refuses a deleted topic by itself, and the coordinator the others: those may need another one.
            error = min(errors, key=lambda each: (each.code in _ERRORS_OF_A_TOPIC, not _is_worth_retry(each)))
            self.handle_error(error.code)
            raise error
        if unanswered:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"no answer for the commit of {min(unanswered)}")

    def _explained(self, code: ErrorCode, topic: str, topic_id: bytes) -> ErrorCode:
        """Tell a topic id that the coordinator does not know yet from the id of a deleted topic."""
        if code is not ErrorCode.UNKNOWN_TOPIC_ID:
            return code
        self._cluster.request_refresh()
        metadata = self._cluster.metadata
        is_current = metadata.topic_id(topic) == topic_id and not metadata.is_deleted(topic)
        return code if is_current else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION

    async def committed(
        self,
        partitions: Iterable[TopicPartition] | None,
        timeout_ms: float,
        *,
        require_stable: bool = True,
        topic_id_of: Callable[[str], bytes] = lambda topic: NO_TOPIC_ID,
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """The committed offsets of these partitions, or of all (None).

        Omits partitions without one. If `topic_id_of` knows all topics, it also omits the offsets of deleted topics of
        the same names.
        """
        requested = None if partitions is None else list(dict.fromkeys(partitions))
        topics = None if requested is None else by_topic(requested)
        offsets: dict[TopicPartition, OffsetAndMetadata] = {}

        async def attempt() -> None:
            node_id = await self.find()
            connection = await self._connection(node_id)
            names = {topic_id_of(topic): topic for topic in topics or ()}
            max_version = _max_version(names)
            version = connection.version_of(OffsetFetchRequest, max_version)
            request = self._offset_fetch_request(topics, version, require_stable, topic_id_of)
            answer = await self.call(request, OffsetFetchResponse, max_version=max_version)
            if version >= 8:
                group = answer.groups[0] if answer.groups else OffsetFetchResponseGroup()
                self._check_fetching_member(ErrorCode.of(group.error_code))
                self._raise_on_error(ErrorCode.of(group.error_code), f"offsets of group {self.group_id!r}")
                rows = [
                    (new.name or names.get(new.topic_id, ""), row) for new in group.topics for row in new.partitions
                ]
            else:
                self._raise_on_error(ErrorCode.of(answer.error_code), f"offsets of group {self.group_id!r}")
                rows = [(old.name, _to_version_8(row)) for old in answer.topics for row in old.partitions]
            offsets.clear()
            unanswered = set(requested or ())
            for topic, row in rows:
                partition = TopicPartition(topic, row.partition_index)
                # The next attempt has the ids of newer metadata.
                code = self._explained(ErrorCode.of(row.error_code), topic, self._cluster.topic_id(topic))
                self._raise_on_error(code, f"offset of {partition}")
                unanswered.discard(partition)
                if row.committed_offset >= 0:
                    metadata = row.metadata or ""
                    offsets[partition] = OffsetAndMetadata(row.committed_offset, metadata, row.committed_leader_epoch)
            if unanswered:
                # A missing row does not mean "nothing is committed", which would reset the
                # position.
                raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"no answer for the offset of {min(unanswered)}")

        await self.retry(timeout_ms, attempt)
        return offsets

    def _offset_fetch_request(
        self,
        topics: Mapping[str, list[int]] | None,
        version: int,
        require_stable: bool,
        topic_id_of: Callable[[str], bytes],
    ) -> OffsetFetchRequest:
        stable = require_stable and version >= 7
        items = None if topics is None else topics.items()
        if version >= 8:
            new_topics = None
            if items is not None:
                new_topics = [
                    OffsetFetchRequestTopics(name=name, topic_id=topic_id_of(name), partition_indexes=numbers)
                    for name, numbers in items
                ]
            group = OffsetFetchRequestGroup(group_id=self.group_id, topics=new_topics)
            identity = self.fetching_identity()
            if version >= 9 and identity.generation > 0:
                group.member_id, group.member_epoch = identity.member_id, identity.generation
            return OffsetFetchRequest(groups=[group], require_stable=stable)
        old_topics = None
        if items is not None:
            old_topics = [OffsetFetchRequestTopic(name=name, partition_indexes=numbers) for name, numbers in items]
        return OffsetFetchRequest(group_id=self.group_id, topics=old_topics, require_stable=stable)

    def _check_fetching_member(self, code: ErrorCode) -> None:
        """A member that the coordinator does not know learns it from its next heartbeat."""
        if code is ErrorCode.UNKNOWN_MEMBER_ID and self.on_member_error is not None:
            self.on_member_error(code)
            raise KafkaError(ErrorCode.STALE_MEMBER_EPOCH, f"offsets of group {self.group_id!r}")

    async def _connection(self, node_id: int) -> Connection:
        try:
            return await self._cluster.connection(node_id, COORDINATOR)
        except KafkaError as error:
            self.handle_error(error.code)
            raise

    def _raise_on_error(self, code: ErrorCode, message: str) -> None:
        if code is not ErrorCode.NONE:
            self.handle_error(code)
            raise KafkaError(code, message)

    async def retry(
        self, timeout_ms: float, attempt: Callable[[], Awaitable[None]], deadline: float | None = None
    ) -> None:
        """Run `attempt` until it succeeds, fails for good, or the timeout is over: at `deadline`, where it began before
        this call.

        Raises KafkaError.
        """
        loop = asyncio.get_running_loop()
        if deadline is None:
            deadline = loop.time() + timeout_ms / 1000
        failures = 0
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    await attempt()
                return
            except TimeoutError:
                self.forget()
                problem = f"the coordinator of group {self.group_id!r} did not answer within {timeout_ms:.0f} ms"
                raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, problem) from None
            except KafkaError as error:
                failures += 1
                wait_s = self._cluster.retry_backoff.wait_ms(failures) / 1000
                is_final = not _is_worth_retry(error)
                if is_final or loop.time() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)


def _max_version(topic_ids: Collection[bytes]) -> int:
    """The newest version of an offset API for topics with these ids. Topics are named all by id, or all by name."""
    return _LAST_VERSION_WITH_IDS if topic_ids and NO_TOPIC_ID not in topic_ids else _LAST_VERSION_WITH_NAMES


def _is_worth_retry(error: KafkaError) -> bool:
    """Whether a retry can help.

    A member with a stale epoch gets the new one from its group (KIP-848).
    """
    if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return False
    return error.retriable or error.code is ErrorCode.STALE_MEMBER_EPOCH


def _to_version_8(row: OffsetFetchResponsePartition) -> OffsetFetchResponsePartitions:
    """Convert a row of versions 1 to 7 to version 8."""
    return OffsetFetchResponsePartitions(
        partition_index=row.partition_index,
        committed_offset=row.committed_offset,
        committed_leader_epoch=row.committed_leader_epoch,
        metadata=row.metadata,
        error_code=row.error_code,
    )
