"""The transaction coordinator of a `FakeCluster`: epochs, open transactions, and what each end made visible.

As simple as possible, after Kafka's coordinator: one transaction per transactional id, no time. A transaction ends at
once, so that CONCURRENT_TRANSACTIONS comes from a test's script alone. With `transaction.version` 2 finalized every end
raises the epoch (EndTxn 5); a retry with the epoch before is answered again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidelog.protocol.batches.record_batch import read_header
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.errors import ErrorCode
from tidelog.protocol.messages import add_offsets_to_txn as offsets
from tidelog.protocol.messages import add_partitions_to_txn as partitions
from tidelog.protocol.messages import end_txn, init_producer_id
from tidelog.protocol.messages import txn_offset_commit as commit

if TYPE_CHECKING:
    from tests.unit.client.fake_broker import FakeCluster, FakePartition


class FakeTransaction:
    """One transactional id."""

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.epoch = 0
        self.state = "Empty"
        self.partitions: set[tuple[str, int]] = set()
        self.groups: set[str] = set()
        self.batches: list[tuple[FakePartition, bytes]] = []
        self.offsets: dict[tuple[str, str, int], int] = {}

    def open(self) -> None:
        self.state = "Ongoing"


class FakeTransactions:
    """The coordinator of every transactional id, and of the offsets that transactions commit."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.by_id: dict[str, FakeTransaction] = {}
        self.committed: list[bytes] = []
        """The values of committed records, in the order of the commits."""
        self.aborted: list[bytes] = []
        self.committed_offsets: dict[tuple[str, str, int], int] = {}
        self.ends: list[str] = []
        """What ended each transaction: "commit" or "abort"."""

    @property
    def version(self) -> int:
        return self.cluster.finalized_features.get("transaction.version", 0)

    def handle(self, request: Any) -> Message:
        if isinstance(request, partitions.AddPartitionsToTxnRequest):
            return self._add_partitions(request)
        if isinstance(request, offsets.AddOffsetsToTxnRequest):
            code = self._check(request.transactional_id, request.producer_id, request.producer_epoch)
            if not code:
                self.by_id[request.transactional_id].open()
                self.by_id[request.transactional_id].groups.add(request.group_id)
            return offsets.AddOffsetsToTxnResponse(error_code=code)
        if isinstance(request, end_txn.EndTxnRequest):
            return self._end(request)
        return self._commit_offsets(request)

    def init_producer_id(self, request: init_producer_id.InitProducerIdRequest) -> Message:
        name = str(request.transactional_id)
        known = self.by_id.get(name)
        if known is None:
            self.cluster.producer_ids += 1
            known = self.by_id[name] = FakeTransaction(self.cluster.producer_ids)
        else:
            if request.producer_id >= 0 and (request.producer_id, request.producer_epoch) != (
                known.producer_id,
                known.epoch,
            ):
                return init_producer_id.InitProducerIdResponse(error_code=ErrorCode.PRODUCER_FENCED)
            if known.state == "Ongoing":
                self._finish(known, committed=False)
            known.epoch += 1
            known.state = "Empty"
        return init_producer_id.InitProducerIdResponse(producer_id=known.producer_id, producer_epoch=known.epoch)

    def _check(self, name: str, producer_id: int, epoch: int) -> ErrorCode:
        known = self.by_id.get(name)
        if known is None or known.producer_id != producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        return ErrorCode.NONE if epoch == known.epoch else ErrorCode.PRODUCER_FENCED

    def _add_partitions(self, request: partitions.AddPartitionsToTxnRequest) -> Message:
        name = request.v3_and_below_transactional_id
        code = self._check(name, request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        answer = partitions.AddPartitionsToTxnResponse()
        for topic in request.v3_and_below_topics:
            results = partitions.AddPartitionsToTxnTopicResult(name=topic.name)
            for number in topic.partitions:
                if not code:
                    self.by_id[name].open()
                    self.by_id[name].partitions.add((topic.name, number))
                results.results_by_partition.append(
                    partitions.AddPartitionsToTxnPartitionResult(partition_index=number, partition_error_code=code)
                )
            answer.results_by_topic_v3_and_below.append(results)
        return answer

    def _commit_offsets(self, request: commit.TxnOffsetCommitRequest) -> Message:
        code = self._check(request.transactional_id, request.producer_id, request.producer_epoch)
        known = self.by_id.get(request.transactional_id)
        if known is not None and not code:
            if self.version >= 2:
                known.open()
                known.groups.add(request.group_id)
            elif request.group_id not in known.groups:
                code = ErrorCode.INVALID_TXN_STATE
        answer = commit.TxnOffsetCommitResponse()
        for topic in request.topics:
            result = commit.TxnOffsetCommitResponseTopic(name=topic.name)
            for each in topic.partitions:
                if known is not None and not code:
                    known.offsets[request.group_id, topic.name, each.partition_index] = each.committed_offset
                result.partitions.append(
                    commit.TxnOffsetCommitResponsePartition(partition_index=each.partition_index, error_code=code)
                )
            answer.topics.append(result)
        return answer

    def _end(self, request: end_txn.EndTxnRequest) -> Message:
        known = self.by_id.get(request.transactional_id)
        result = "commit" if request.committed else "abort"
        is_retry = (
            self.version >= 2
            and known is not None
            and request.producer_epoch == known.epoch - 1
            and known.state == f"Complete {result}"
        )
        if known is not None and is_retry:
            return end_txn.EndTxnResponse(producer_id=known.producer_id, producer_epoch=known.epoch)
        code = self._check(request.transactional_id, request.producer_id, request.producer_epoch)
        if known is None or code:
            return end_txn.EndTxnResponse(error_code=code)
        if known.state != "Ongoing":
            is_known_end = known.state == f"Complete {result}" or (self.version >= 2 and not request.committed)
            if not is_known_end:
                return end_txn.EndTxnResponse(error_code=ErrorCode.INVALID_TXN_STATE)
            if self.version < 2:
                return end_txn.EndTxnResponse()
        else:
            self._finish(known, request.committed)
        known.state = f"Complete {result}"
        if self.version >= 2:
            known.epoch += 1
            return end_txn.EndTxnResponse(producer_id=known.producer_id, producer_epoch=known.epoch)
        return end_txn.EndTxnResponse()

    def _finish(self, known: FakeTransaction, committed: bool) -> None:
        self.ends.append("commit" if committed else "abort")
        visible = self.committed if committed else self.aborted
        for partition, batch in known.batches:
            visible.extend(record.value or b"" for record in iter_records(batch))
            if self.version >= 2 and known.producer_id in partition.producers:
                # The marker carries the next epoch.
                del partition.producers[known.producer_id]
        if committed:
            self.committed_offsets.update(known.offsets)
        known.batches, known.offsets = [], {}
        known.partitions.clear()
        known.groups.clear()

    # -- Produce

    def check_produce(self, request: Any, topic: Any, index: int, records: bytes) -> ErrorCode:
        if request.transactional_id is None:
            return ErrorCode.NONE
        header = read_header(records)
        assert header.is_transactional
        code = self._check(request.transactional_id, header.producer_id, header.producer_epoch)
        if code is ErrorCode.PRODUCER_FENCED:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if code:
            return code
        known = self.by_id[request.transactional_id]
        name = topic.name or next(each for each, topic_id in self.cluster.ids.items() if topic_id == topic.topic_id)
        if self.version >= 2:
            known.open()
            known.partitions.add((name, index))
        return ErrorCode.NONE if (name, index) in known.partitions else ErrorCode.INVALID_TXN_STATE

    def note_append(self, name: str, partition: FakePartition, records: bytes) -> None:
        self.by_id[name].batches.append((partition, records))
