"""A Kafka cluster in memory, behind real loopback sockets, that misbehaves on request.

It keeps logs, producer state, fetch sessions and offsets as a broker does, as simply as possible; groups are in
`fake_group`. A test scripts what goes wrong: `script(ProduceRequest, action)` lets `action` answer the next request of
that kind in place of the handler. Nothing here is the real broker's code, so that client and broker cannot agree on the
same mistake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from tests.stream_server import StreamServer
from tests.unit.client.fake_consumer_group import FakeConsumerGroups
from tests.unit.client.fake_group import FakeGroups
from tests.unit.client.fake_transactions import FakeTransactions
from tidelog.protocol.batches.record_batch import iter_headers, read_header, stamp
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages import (
    add_offsets_to_txn,
    add_partitions_to_txn,
    api_versions,
    consumer_group_heartbeat,
    create_topics,
    describe_producers,
    end_txn,
    fetch,
    find_coordinator,
    heartbeat,
    init_producer_id,
    join_group,
    leave_group,
    list_offsets,
    metadata,
    offset_commit,
    offset_fetch,
    offset_for_leader_epoch,
    produce,
    sync_group,
    txn_offset_commit,
)
from tidelog.protocol.messages.headers import RequestHeader, ResponseHeader

DROP = object()
"""As an answer: close the connection instead."""
SILENCE = object()
"""As an answer: say nothing, ever."""

Action = Callable[[Any, "FakeNode"], Any]


class FakePartition:
    """One log: whole batches, and what the leader knows of producers."""

    def __init__(self, leader: int) -> None:
        self.leader = leader
        self.leader_epoch = 0
        self.max_batch_bytes = 1_000_000
        self.epochs: list[tuple[int, int]] = [(0, 0)]
        """(leader epoch, the offset at which it began)."""
        self.followers: dict[int, int] = {}
        """By node id how far a replica has got from which consumers may read."""
        self.nearest = -1
        """The replica that the leader names to consumers who say their rack."""
        self.batches: list[bytes] = []
        self.start_offset = 0
        self.end_offset = 0
        self.producers: dict[int, tuple[int, int, deque[tuple[int, int, int]]]] = {}

    def append(self, records: bytes) -> tuple[ErrorCode, int]:
        """(error, base offset) as Kafka's leader answers one batch."""
        if len(records) > self.max_batch_bytes:
            return ErrorCode.MESSAGE_TOO_LARGE, -1
        batch = bytearray(records)
        header = read_header(batch)
        if header.producer_id >= 0:
            epoch, expected, recent = self.producers.get(header.producer_id, (-1, -1, deque(maxlen=5)))
            if header.producer_epoch < epoch:
                return ErrorCode.INVALID_PRODUCER_EPOCH, -1
            if header.producer_epoch > epoch:
                if epoch >= 0 and header.base_sequence != 0:
                    return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
                expected, recent = header.base_sequence, deque(maxlen=5)
            for sequence, count, offset in recent:
                if (sequence, count) == (header.base_sequence, header.record_count):
                    return ErrorCode.NONE, offset
            if header.base_sequence != expected:
                return ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            recent.append((header.base_sequence, header.record_count, self.end_offset))
            self.producers[header.producer_id] = (header.producer_epoch, expected + header.record_count, recent)
        base = self.end_offset
        stamp(batch, 0, base, self.leader_epoch)
        self.batches.append(bytes(batch))
        self.end_offset += header.record_count
        return ErrorCode.NONE, base

    def forget_all_but_the_last(self) -> None:
        """As a Kafka broker that was killed and comes back: its snapshot keeps one batch of each producer."""
        for _, _, recent in self.producers.values():
            while len(recent) > 1:
                recent.popleft()

    def read(self, offset: int, end_offset: int | None = None) -> bytes:
        headers = [(batch, read_header(batch)) for batch in self.batches]
        end = self.end_offset if end_offset is None else end_offset
        return b"".join(batch for batch, header in headers if offset < header.next_offset <= end)

    def truncate(self, end_offset: int) -> None:
        """As when a replica became leader that had only this much. Batches must end there."""
        self.batches = [batch for batch in self.batches if read_header(batch).next_offset <= end_offset]
        self.epochs = [(epoch, start) for epoch, start in self.epochs if start < end_offset]
        self.end_offset = end_offset

    def begin_epoch(self) -> None:
        self.leader_epoch += 1
        self.epochs = [each for each in self.epochs if each[1] < self.end_offset]
        self.epochs.append((self.leader_epoch, self.end_offset))

    def end_of_epoch(self, epoch: int) -> tuple[int, int]:
        """(the largest epoch not above, where it ends), as Kafka's LeaderEpochFileCache."""
        later = [start for each, start in self.epochs if each > epoch]
        not_above = [each for each, _ in self.epochs if each <= epoch]
        if epoch == self.epochs[-1][0]:
            return epoch, self.end_offset
        return (not_above[-1] if not_above else epoch, later[0]) if later else (-1, -1)

    def refusal(self, current_leader_epoch: int) -> ErrorCode:
        if current_leader_epoch < 0 or current_leader_epoch == self.leader_epoch:
            return ErrorCode.NONE
        older = current_leader_epoch < self.leader_epoch
        return ErrorCode.FENCED_LEADER_EPOCH if older else ErrorCode.UNKNOWN_LEADER_EPOCH


class FakeNode:
    """One listening socket."""

    def __init__(self, cluster: FakeCluster, node_id: int) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.port = 0
        self.sessions: dict[int, dict[tuple[str, bytes, int], fetch.FetchPartition]] = {}
        self._server = StreamServer(self._serve)

    async def start(self) -> None:
        await self._server.listen(self.port)
        self.port = self._server.port

    async def stop(self) -> None:
        """As if the process had died."""
        await self._server.close()

    @property
    def connections(self) -> int:
        """How many are open."""
        return self._server.connections

    def drop_connections(self) -> None:
        self._server.drop_connections()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            size = int.from_bytes(await reader.readexactly(4), "big")
            if not await self._answer(await reader.readexactly(size), writer):
                return

    async def _answer(self, frame: bytes, writer: asyncio.StreamWriter) -> bool:
        key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
        request_type, response_type, handler = HANDLERS[key]
        lowest, highest = self.cluster.versions.get(key, (request_type.VERSIONS.start, request_type.VERSIONS.stop - 1))
        header, position = RequestHeader.read(frame, 0, 2 if version >= request_type.FLEXIBLE_FROM else 1)
        if key == 18 and not lowest <= version <= highest:
            refusal = api_versions.ApiVersionsResponse(error_code=35, api_keys=self.cluster.api_keys())
            self._write(writer, header.correlation_id, refusal, 0, 0)
            return True
        assert lowest <= version <= highest, f"{request_type.__name__} version {version} was not offered"
        request, _ = request_type.read(frame, position, version)
        self.cluster.name_topics(request)
        self.cluster.requests.append((self.node_id, version, request))
        scripted = self.cluster.scripts.get(request_type)
        response = scripted.popleft()(request, self) if scripted else handler(self, request)
        if isinstance(response, Awaitable):
            response = await response
        if response is DROP:
            return False
        if response is SILENCE or (key == 0 and getattr(request, "acks", 1) == 0):
            return True
        flexible = version >= response_type.FLEXIBLE_FROM and key != 18
        self._write(writer, header.correlation_id, response, version, 1 if flexible else 0)
        return True

    @staticmethod
    def _write(
        writer: asyncio.StreamWriter, correlation_id: int, response: Message, version: int, header_version: int
    ) -> None:
        frame = bytearray(4)
        ResponseHeader(correlation_id=correlation_id).write(frame, header_version)
        response.write(frame, version)
        frame[:4] = (len(frame) - 4).to_bytes(4, "big")
        writer.write(frame)

    # -- handlers

    def on_api_versions(self, request: Any) -> Message:
        features = [
            api_versions.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in self.cluster.finalized_features.items()
        ]
        return api_versions.ApiVersionsResponse(
            api_keys=self.cluster.api_keys(),
            finalized_features=features,
            finalized_features_epoch=self.cluster.finalized_features_epoch,
        )

    def on_metadata(self, request: metadata.MetadataRequest) -> Message:
        cluster = self.cluster
        names = list(cluster.topics) if request.topics is None else [str(topic.name) for topic in request.topics]
        if request.allow_auto_topic_creation and cluster.auto_create_partitions:
            for name in names:
                if name not in cluster.topics:
                    cluster.create(name, cluster.auto_create_partitions)
        return metadata.MetadataResponse(
            brokers=[
                metadata.MetadataResponseBroker(node_id=node.node_id, host="127.0.0.1", port=node.port)
                for node in cluster.nodes.values()
            ],
            cluster_id=self.cluster.cluster_id,
            controller_id=min(cluster.nodes),
            topics=[self._topic(name) for name in names],
        )

    def _topic(self, name: str) -> metadata.MetadataResponseTopic:
        partitions = self.cluster.topics.get(name)
        if partitions is None:
            return metadata.MetadataResponseTopic(name=name, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return metadata.MetadataResponseTopic(
            name=name,
            topic_id=self.cluster.ids[name],
            partitions=[
                metadata.MetadataResponsePartition(
                    partition_index=number,
                    leader_id=each.leader,
                    leader_epoch=each.leader_epoch,
                    replica_nodes=[each.leader, *each.followers],
                    isr_nodes=[each.leader],
                )
                for number, each in enumerate(partitions)
            ],
        )

    def on_init_producer_id(self, request: Any) -> Message:
        if request.transactional_id is not None:
            return self.cluster.transactions.init_producer_id(request)
        self.cluster.producer_ids += 1
        return init_producer_id.InitProducerIdResponse(producer_id=self.cluster.producer_ids, producer_epoch=0)

    def on_produce(self, request: produce.ProduceRequest) -> Message:
        topics = []
        for topic in request.topic_data:
            answers = []
            for data in topic.partition_data:
                partition, code = self._find(topic.name, topic.topic_id, data.index)
                base = -1
                if partition is not None and code is ErrorCode.NONE:
                    records = bytes(data.records or b"")
                    code = self.cluster.transactions.check_produce(request, topic, data.index, records)
                    end = partition.end_offset
                    if code is ErrorCode.NONE:
                        code, base = partition.append(records)
                    if request.transactional_id is not None and partition.end_offset > end:
                        self.cluster.transactions.note_append(request.transactional_id, partition, records)
                answers.append(produce.PartitionProduceResponse(index=data.index, error_code=code, base_offset=base))
            topics.append(
                produce.TopicProduceResponse(name=topic.name, topic_id=topic.topic_id, partition_responses=answers)
            )
        self.cluster.appended.set()
        return produce.ProduceResponse(responses=topics)

    def on_describe_producers(self, request: describe_producers.DescribeProducersRequest) -> Message:
        topics = []
        for topic in request.topics:
            answers = []
            for index in topic.partition_indexes:
                partition, code = self._find(topic.name, bytes(16), index)
                answer = describe_producers.DescribeProducersResponsePartitionResponse(
                    partition_index=index, error_code=code
                )
                if partition is not None and code is ErrorCode.NONE:
                    answer.active_producers = [
                        describe_producers.DescribeProducersResponseProducerState(
                            producer_id=producer_id, producer_epoch=epoch, last_sequence=following - 1
                        )
                        for producer_id, (epoch, following, _) in partition.producers.items()
                    ]
                answers.append(answer)
            topics.append(
                describe_producers.DescribeProducersResponseTopicResponse(name=topic.name, partitions=answers)
            )
        return describe_producers.DescribeProducersResponse(topics=topics)

    def _find(self, name: str, topic_id: bytes, index: int) -> tuple[FakePartition | None, ErrorCode]:
        if topic_id != bytes(16):
            name = next((each for each, known in self.cluster.ids.items() if known == topic_id), "")
            if not name:
                return None, ErrorCode.UNKNOWN_TOPIC_ID
        partitions = self.cluster.topics.get(name, [])
        if index >= len(partitions):
            return None, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if partitions[index].leader != self.node_id:
            return partitions[index], ErrorCode.NOT_LEADER_OR_FOLLOWER
        return partitions[index], ErrorCode.NONE

    async def on_fetch(self, request: fetch.FetchRequest) -> Message:
        session_id, wanted, refusal = self._session(request)
        if refusal is not None:
            return refusal
        deadline = asyncio.get_running_loop().time() + request.max_wait_ms / 1000
        while True:
            self.cluster.appended.clear()
            found = {key: self._read(key, asked, request.rack_id) for key, asked in wanted.items()}
            telling = {
                key: data
                for key, data in found.items()
                if data.records
                or data.error_code
                or data.preferred_read_replica >= 0
                or data.diverging_epoch.epoch >= 0
            }
            left = deadline - asyncio.get_running_loop().time()
            if telling or left <= 0 or not wanted:
                break
            try:
                async with asyncio.timeout(left):
                    await self.cluster.appended.wait()
            except TimeoutError:
                pass
        shown = found if request.session_epoch <= 0 else telling
        topics: dict[tuple[str, bytes], fetch.FetchableTopicResponse] = {}
        for (name, topic_id, _), data in shown.items():
            topic = fetch.FetchableTopicResponse(topic=name, topic_id=topic_id)
            topics.setdefault((name, topic_id), topic).partitions.append(data)
        return fetch.FetchResponse(session_id=session_id, responses=list(topics.values()))

    def _session(self, request: fetch.FetchRequest) -> tuple[int, dict[Any, Any], Message | None]:
        asked = {
            (topic.topic, topic.topic_id, each.partition): each for topic in request.topics for each in topic.partitions
        }
        if request.session_epoch == -1:
            self.sessions.pop(request.session_id, None)
            return 0, asked, None
        if request.session_epoch == 0:
            self.sessions.pop(request.session_id, None)
            session_id = len(self.cluster.requests)
            self.sessions[session_id] = asked
            return session_id, asked, None
        known: dict[Any, Any] | None = self.sessions.get(request.session_id)
        if known is None:
            return 0, {}, fetch.FetchResponse(error_code=ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        for gone in request.forgotten_topics_data:
            for number in gone.partitions:
                del known[gone.topic, gone.topic_id, number]
        known.update(asked)
        return request.session_id, known, None

    def _read(self, key: tuple[str, bytes, int], asked: fetch.FetchPartition, rack: str = "") -> fetch.PartitionData:
        partition, code = self._find(*key)
        end = None if partition is None else partition.end_offset
        if partition is not None and self.node_id in partition.followers:
            code, end = ErrorCode.NONE, partition.followers[self.node_id]
        if partition is not None:
            code = code or partition.refusal(asked.current_leader_epoch)
        data = fetch.PartitionData(partition_index=key[2], error_code=code, high_watermark=-1)
        if partition is None or end is None or code is not ErrorCode.NONE:
            return data
        data.high_watermark = data.last_stable_offset = end
        data.log_start_offset = partition.start_offset
        if asked.last_fetched_epoch >= 0:
            epoch, epoch_end = partition.end_of_epoch(asked.last_fetched_epoch)
            if epoch < asked.last_fetched_epoch or epoch_end < asked.fetch_offset:
                data.diverging_epoch = fetch.EpochEndOffset(epoch=epoch, end_offset=epoch_end)
                data.error_code = ErrorCode.NONE if epoch >= 0 else ErrorCode.OFFSET_OUT_OF_RANGE
                return data
        if not partition.start_offset <= asked.fetch_offset <= end:
            data.error_code = ErrorCode.OFFSET_OUT_OF_RANGE
        elif rack and partition.nearest >= 0 and self.node_id == partition.leader:
            data.preferred_read_replica = partition.nearest
        else:
            data.records = partition.read(asked.fetch_offset, end)
        return data

    def on_offset_for_leader_epoch(self, request: offset_for_leader_epoch.OffsetForLeaderEpochRequest) -> Message:
        assert request.replica_id == -2, "a consumer says that it is no broker"
        topics = []
        for topic in request.topics:
            ends = []
            for each in topic.partitions:
                partition, code = self._find(topic.topic, bytes(16), each.partition)
                end = offset_for_leader_epoch.EpochEndOffset(partition=each.partition, error_code=code)
                if partition is not None and code is ErrorCode.NONE:
                    end.error_code = partition.refusal(each.current_leader_epoch)
                    if not end.error_code:
                        end.leader_epoch, end.end_offset = partition.end_of_epoch(each.leader_epoch)
                ends.append(end)
            topics.append(offset_for_leader_epoch.OffsetForLeaderTopicResult(topic=topic.topic, partitions=ends))
        return offset_for_leader_epoch.OffsetForLeaderEpochResponse(topics=topics)

    def on_list_offsets(self, request: list_offsets.ListOffsetsRequest) -> Message:
        topics = []
        for topic in request.topics:
            answers = []
            for each in topic.partitions:
                partition, code = self._find(topic.name, bytes(16), each.partition_index)
                answer = list_offsets.ListOffsetsPartitionResponse(
                    partition_index=each.partition_index, error_code=code
                )
                if partition is not None and code is ErrorCode.NONE:
                    if self.cluster.versions.get(2, (1, 11))[1] >= 4:
                        answer.leader_epoch = partition.leader_epoch
                    if each.timestamp == -1:
                        answer.offset = partition.end_offset
                    elif each.timestamp == -2:
                        answer.offset = partition.start_offset
                    else:
                        for batch in partition.batches:
                            for _, header in iter_headers(batch):
                                if header.max_timestamp >= each.timestamp and answer.offset < 0:
                                    answer.offset, answer.timestamp = header.base_offset, header.max_timestamp
                answers.append(answer)
            topics.append(list_offsets.ListOffsetsTopicResponse(name=topic.name, partitions=answers))
        return list_offsets.ListOffsetsResponse(topics=topics)

    def on_find_coordinator(self, request: find_coordinator.FindCoordinatorRequest) -> Message:
        node = self.cluster.nodes[self.cluster.coordinator]
        if request.coordinator_keys:
            keys = [
                find_coordinator.Coordinator(key=key, node_id=node.node_id, host="127.0.0.1", port=node.port)
                for key in request.coordinator_keys
            ]
            return find_coordinator.FindCoordinatorResponse(coordinators=keys)
        return find_coordinator.FindCoordinatorResponse(node_id=node.node_id, host="127.0.0.1", port=node.port)

    def on_group(self, request: Any) -> Any:
        if (
            isinstance(request, offset_commit.OffsetCommitRequest)
            and request.group_id in self.cluster.consumer_groups.groups
        ):
            member_epoch = request.generation_id_or_member_epoch
            code = self.cluster.consumer_groups.offset_error(request.group_id, request.member_id, member_epoch)
            return self.cluster.groups.commit(request, code if member_epoch >= 0 else ErrorCode.NONE)
        if (
            isinstance(request, offset_fetch.OffsetFetchRequest)
            and request.groups
            and request.groups[0].member_epoch >= 0
        ):
            group = request.groups[0]
            code = self.cluster.consumer_groups.offset_error(group.group_id, group.member_id, group.member_epoch)
            if code:
                refused = offset_fetch.OffsetFetchResponseGroup(group_id=group.group_id, error_code=code)
                return offset_fetch.OffsetFetchResponse(groups=[refused])
        return self.cluster.groups.handle(request)

    def on_transaction(self, request: Any) -> Any:
        return self.cluster.transactions.handle(request)

    def on_consumer_group(self, request: consumer_group_heartbeat.ConsumerGroupHeartbeatRequest) -> Message:
        return self.cluster.consumer_groups.heartbeat(request)

    def on_create_topics(self, request: create_topics.CreateTopicsRequest) -> Message:
        results = []
        for topic in request.topics:
            code = ErrorCode.TOPIC_ALREADY_EXISTS if topic.name in self.cluster.topics else ErrorCode.NONE
            if not code:
                self.cluster.create(topic.name, max(topic.num_partitions, 1))
            results.append(create_topics.CreatableTopicResult(name=topic.name, error_code=code))
        return create_topics.CreateTopicsResponse(topics=results)


class FakeCluster:
    """Nodes that share topics; use as `async with`."""

    def __init__(self, *, nodes: int = 1, **topics: int) -> None:
        self.nodes = {node_id: FakeNode(self, node_id) for node_id in range(1, nodes + 1)}
        self.topics: dict[str, list[FakePartition]] = {}
        self.ids: dict[str, bytes] = {}
        self.auto_create_partitions = 1
        self.producer_ids = 100
        self.cluster_id = "fake"
        self.coordinator = 1
        self.groups = FakeGroups()
        self.finalized_features: dict[str, int] = {}
        self.finalized_features_epoch = -1
        self.transactions = FakeTransactions(self)

        self.consumer_groups = FakeConsumerGroups(
            lambda: {name: (self.ids[name], len(partitions)) for name, partitions in self.topics.items()}
        )
        self.versions: dict[int, tuple[int, int]] = {}
        self.scripts: dict[type[Message], deque[Action]] = {}
        self.requests: list[tuple[int, int, Any]] = []
        self.appended = asyncio.Event()
        for name, partitions in topics.items():
            self.create(name, partitions)

    async def __aenter__(self) -> FakeCluster:
        for node in self.nodes.values():
            await node.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes.values():
            await node.stop()

    @property
    def bootstrap(self) -> str:
        return ",".join(f"127.0.0.1:{node.port}" for node in self.nodes.values())

    def create(self, name: str, partitions: int) -> None:
        leaders = list(self.nodes)
        self.topics[name] = [FakePartition(leaders[number % len(leaders)]) for number in range(partitions)]
        self.ids[name] = (len(self.requests) * 1000 + len(self.ids) + 1).to_bytes(16, "big")

    def name_topics(self, request: Message) -> None:
        """Add the names to the topics of a commit or a fetch of offsets; a topic with an unknown id has none."""
        topics: list[Any] = []
        if isinstance(request, offset_commit.OffsetCommitRequest):
            topics = [*request.topics]
        elif isinstance(request, offset_fetch.OffsetFetchRequest):
            topics = [topic for group in request.groups for topic in group.topics or ()]
        names = {self.ids[name]: name for name in self.topics}
        for topic in topics:
            topic.name = topic.name or names.get(topic.topic_id, "")

    def script(self, request: type[Message], *actions: Action) -> None:
        """The next requests of this kind are answered by these, one each."""
        self.scripts.setdefault(request, deque()).extend(actions)

    def sent(self, request: type[Message]) -> list[Any]:
        """All requests of a kind so far."""
        return [each for _, _, each in self.requests if isinstance(each, request)]

    def versions_of(self, request: type[Message]) -> set[int]:
        return {version for _, version, each in self.requests if isinstance(each, request)}

    def move_leader(self, topic: str, partition: int, node_id: int) -> None:
        moved = self.topics[topic][partition]
        moved.leader = node_id
        moved.begin_epoch()

    def api_keys(self) -> list[api_versions.ApiVersion]:
        keys = []
        for key, (request, _, _) in HANDLERS.items():
            lowest, highest = self.versions.get(key, (request.VERSIONS.start, request.VERSIONS.stop - 1))
            if highest >= 0:
                keys.append(api_versions.ApiVersion(api_key=key, min_version=lowest, max_version=highest))
        return keys


HANDLERS: dict[int, tuple[type[Message], type[Message], Callable[[FakeNode, Any], Any]]] = {
    0: (produce.ProduceRequest, produce.ProduceResponse, FakeNode.on_produce),
    1: (fetch.FetchRequest, fetch.FetchResponse, FakeNode.on_fetch),
    2: (list_offsets.ListOffsetsRequest, list_offsets.ListOffsetsResponse, FakeNode.on_list_offsets),
    3: (metadata.MetadataRequest, metadata.MetadataResponse, FakeNode.on_metadata),
    8: (offset_commit.OffsetCommitRequest, offset_commit.OffsetCommitResponse, FakeNode.on_group),
    9: (offset_fetch.OffsetFetchRequest, offset_fetch.OffsetFetchResponse, FakeNode.on_group),
    10: (
        find_coordinator.FindCoordinatorRequest,
        find_coordinator.FindCoordinatorResponse,
        FakeNode.on_find_coordinator,
    ),
    11: (join_group.JoinGroupRequest, join_group.JoinGroupResponse, FakeNode.on_group),
    12: (heartbeat.HeartbeatRequest, heartbeat.HeartbeatResponse, FakeNode.on_group),
    13: (leave_group.LeaveGroupRequest, leave_group.LeaveGroupResponse, FakeNode.on_group),
    14: (sync_group.SyncGroupRequest, sync_group.SyncGroupResponse, FakeNode.on_group),
    18: (api_versions.ApiVersionsRequest, api_versions.ApiVersionsResponse, FakeNode.on_api_versions),
    19: (create_topics.CreateTopicsRequest, create_topics.CreateTopicsResponse, FakeNode.on_create_topics),
    23: (
        offset_for_leader_epoch.OffsetForLeaderEpochRequest,
        offset_for_leader_epoch.OffsetForLeaderEpochResponse,
        FakeNode.on_offset_for_leader_epoch,
    ),
    24: (
        add_partitions_to_txn.AddPartitionsToTxnRequest,
        add_partitions_to_txn.AddPartitionsToTxnResponse,
        FakeNode.on_transaction,
    ),
    25: (
        add_offsets_to_txn.AddOffsetsToTxnRequest,
        add_offsets_to_txn.AddOffsetsToTxnResponse,
        FakeNode.on_transaction,
    ),
    26: (end_txn.EndTxnRequest, end_txn.EndTxnResponse, FakeNode.on_transaction),
    28: (txn_offset_commit.TxnOffsetCommitRequest, txn_offset_commit.TxnOffsetCommitResponse, FakeNode.on_transaction),
    22: (init_producer_id.InitProducerIdRequest, init_producer_id.InitProducerIdResponse, FakeNode.on_init_producer_id),
    68: (
        consumer_group_heartbeat.ConsumerGroupHeartbeatRequest,
        consumer_group_heartbeat.ConsumerGroupHeartbeatResponse,
        FakeNode.on_consumer_group,
    ),
    61: (
        describe_producers.DescribeProducersRequest,
        describe_producers.DescribeProducersResponse,
        FakeNode.on_describe_producers,
    ),
}


def refuse_produce(code: ErrorCode, *, append: bool = False) -> Action:
    """An action: answer every partition of a Produce with an error, having appended its records or not."""

    def action(request: produce.ProduceRequest, node: FakeNode) -> Any:
        response: Any = FakeNode.on_produce(node, request) if append else None
        if response is None:
            response = produce.ProduceResponse(
                responses=[
                    produce.TopicProduceResponse(
                        name=topic.name,
                        topic_id=topic.topic_id,
                        partition_responses=[
                            produce.PartitionProduceResponse(index=data.index) for data in topic.partition_data
                        ],
                    )
                    for topic in request.topic_data
                ]
            )
        for topic in response.responses:
            for each in topic.partition_responses:
                each.error_code, each.base_offset = code, -1
        return response

    return action


def then(action: Callable[[Any, FakeNode], Any], answer: object) -> Action:
    """An action: do the first, but answer with the second (DROP or SILENCE)."""

    def both(request: Any, node: FakeNode) -> object:
        action(request, node)
        return answer

    return both
