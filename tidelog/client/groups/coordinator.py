"""A group's coordinator: found, asked, found again when it moved; offsets committed and fetched through it.

Here: FindCoordinator, OffsetCommit, OffsetFetch and what their errors mean. Not here: joining (`membership`).
Invariant: an answer that says "not me", or no answer at all, makes the next request look for the coordinator anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from tidelog.client.assignment.protocol import by_topic
from tidelog.client.model import OffsetAndMetadata, TopicPartition
from tidelog.client.network.cluster import COORDINATOR, Cluster
from tidelog.client.network.connection import Connection
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

_NEWEST_BY_NAME = 9
"""Version 10 of both offset APIs speaks of topics by id only, which an offset of a deleted topic no longer has."""
_MOVED = frozenset((ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE))
_UNHEARD = frozenset((ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT))


class GroupIdentity(NamedTuple):
    """Who commits. The default is nobody: a consumer that assigned itself its partitions."""

    generation: int = -1
    member_id: str = ""
    instance_id: str | None = None


class Coordinator:
    """The coordinator of one group."""

    def __init__(self, cluster: Cluster, group_id: str) -> None:
        self._cluster = cluster
        self.group_id = group_id
        self._node_id: int | None = None
        self._finding: asyncio.Lock = asyncio.Lock()

    @property
    def known(self) -> bool:
        return self._node_id is not None

    def forget(self) -> None:
        """Look for it anew before the next request."""
        self._node_id = None

    def heard(self, code: ErrorCode) -> None:
        """Take note of an error in an answer."""
        if code in _MOVED or code in _UNHEARD:
            self.forget()

    async def find(self) -> int:
        """Its node id. Raises KafkaError."""
        async with self._finding:
            if self._node_id is None:
                self._node_id = await self._cluster.find_coordinator(self.group_id)
            return self._node_id

    async def call(
        self,
        request: Message,
        response: type[Response],
        timeout_ms: float | None = None,
        newest: int = 32767,
        purpose: str = COORDINATOR,
    ) -> Response:
        """Ask it once. Raises KafkaError; when nothing was heard the coordinator is forgotten."""
        node_id = await self.find()
        try:
            return await self._cluster.call(
                node_id, request, response, purpose=purpose, timeout_ms=timeout_ms, newest=newest
            )
        except KafkaError as error:
            self.heard(error.code)
            raise

    # -- offsets

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata], who: GroupIdentity, timeout_ms: float
    ) -> None:
        """Commit, trying again while that can help.

        Raises KafkaError: ILLEGAL_GENERATION, UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID, REBALANCE_IN_PROGRESS when `who`
        is no longer a member or the group is dealing anew; REQUEST_TIMED_OUT.
        """
        if offsets:
            await self.retry(timeout_ms, lambda: self.commit_once(offsets, who))

    async def commit_once(self, offsets: Mapping[TopicPartition, OffsetAndMetadata], who: GroupIdentity) -> None:
        """One OffsetCommit. Raises the KafkaError of the first partition that was refused."""
        topics: dict[str, OffsetCommitRequestTopic] = {}
        for (topic, number), offset in offsets.items():
            entry = topics.setdefault(topic, OffsetCommitRequestTopic(name=topic))
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
            generation_id_or_member_epoch=who.generation,
            member_id=who.member_id,
            group_instance_id=who.instance_id,
            topics=list(topics.values()),
        )
        answer = await self.call(request, OffsetCommitResponse, newest=_NEWEST_BY_NAME)
        left_out = set(offsets)
        for answered in answer.topics:
            for each in answered.partitions:
                partition = TopicPartition(answered.name, each.partition_index)
                self._raise(ErrorCode.of(each.error_code), f"commit of {partition}")
                left_out.discard(partition)
        if left_out:
            raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"no answer for the commit of {min(left_out)}")

    async def committed(
        self, partitions: Iterable[TopicPartition] | None, timeout_ms: float, *, require_stable: bool = True
    ) -> dict[TopicPartition, OffsetAndMetadata]:
        """The committed offsets of these partitions, or of all (None); partitions without one are left out."""
        asked = None if partitions is None else list(dict.fromkeys(partitions))
        wanted = None if asked is None else by_topic(asked)
        found: dict[TopicPartition, OffsetAndMetadata] = {}

        async def attempt() -> None:
            node_id = await self.find()
            connection = await self._connection(node_id)
            version = connection.version_of(OffsetFetchRequest, _NEWEST_BY_NAME)
            request = self._offset_fetch(wanted, version, require_stable)
            answer = await self.call(request, OffsetFetchResponse, newest=_NEWEST_BY_NAME)
            if version >= 8:
                group = answer.groups[0] if answer.groups else OffsetFetchResponseGroup()
                self._raise(ErrorCode.of(group.error_code), f"offsets of group {self.group_id!r}")
                rows = [(each.name, row) for each in group.topics for row in each.partitions]
            else:
                self._raise(ErrorCode.of(answer.error_code), f"offsets of group {self.group_id!r}")
                rows = [(old.name, _as_new(row)) for old in answer.topics for row in old.partitions]
            found.clear()
            left_out = set(asked or ())
            for topic, row in rows:
                partition = TopicPartition(topic, row.partition_index)
                self._raise(ErrorCode.of(row.error_code), f"offset of {partition}")
                left_out.discard(partition)
                if row.committed_offset >= 0:
                    metadata = row.metadata or ""
                    found[partition] = OffsetAndMetadata(row.committed_offset, metadata, row.committed_leader_epoch)
            if left_out:
                # Not the same as "nothing is committed": that would reset the position.
                raise KafkaError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"no answer for the offset of {min(left_out)}")

        await self.retry(timeout_ms, attempt)
        return found

    def _offset_fetch(
        self, wanted: Mapping[str, list[int]] | None, version: int, require_stable: bool
    ) -> OffsetFetchRequest:
        stable = require_stable and version >= 7
        if version >= 8:
            topics = None
            if wanted is not None:
                topics = [OffsetFetchRequestTopics(name=name, partition_indexes=each) for name, each in wanted.items()]
            return OffsetFetchRequest(
                groups=[OffsetFetchRequestGroup(group_id=self.group_id, topics=topics)], require_stable=stable
            )
        old_topics = None
        if wanted is not None:
            old_topics = [OffsetFetchRequestTopic(name=name, partition_indexes=each) for name, each in wanted.items()]
        return OffsetFetchRequest(group_id=self.group_id, topics=old_topics, require_stable=stable)

    async def _connection(self, node_id: int) -> Connection:
        try:
            return await self._cluster.connection(node_id, COORDINATOR)
        except KafkaError as error:
            self.heard(error.code)
            raise

    def _raise(self, code: ErrorCode, what: str) -> None:
        if code is not ErrorCode.NONE:
            self.heard(code)
            raise KafkaError(code, what)

    async def retry(self, timeout_ms: float, attempt: Callable[[], Awaitable[None]]) -> None:
        """Attempt until it succeeds, fails for good, or time is up. Raises KafkaError."""
        loop = asyncio.get_running_loop()
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
                final = not _may_pass(error)
                if final or loop.time() + wait_s >= deadline:
                    raise
                await asyncio.sleep(wait_s)


def _may_pass(error: KafkaError) -> bool:
    """Whether trying again can help. A member whose epoch is stale learns the new one from its group (KIP-848)."""
    if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        return False
    return error.retriable or error.code is ErrorCode.STALE_MEMBER_EPOCH


def _as_new(row: OffsetFetchResponsePartition) -> OffsetFetchResponsePartitions:
    """A row of versions 1 to 7 as one of version 8."""
    return OffsetFetchResponsePartitions(
        partition_index=row.partition_index,
        committed_offset=row.committed_offset,
        committed_leader_epoch=row.committed_leader_epoch,
        metadata=row.metadata,
        error_code=row.error_code,
    )
