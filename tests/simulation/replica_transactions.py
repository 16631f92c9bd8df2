"""Histories of the replicas of a partition with transactions: readers see the same of them on each copy.

What a log holds decides what a reader of committed records may see (`Transactions`): the answer must be the same after
each start, election and truncation, from the producers' state and the indexes of aborted transactions. The coordinator
is this history: it repeats each marker until a leader has committed it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.simulation.replica_history import LAG_MS, ReplicaHistory, value_of
from tests.simulation.storage_invariants import Broken
from tests.unit.replication.replicas import ReplicaNode
from tidelog.protocol.batches.record_batch import BatchHeader, iter_headers
from tidelog.protocol.batches.records import (
    ControlRecordType,
    decode_batch,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
)
from tidelog.protocol.errors import KafkaError
from tidelog.replication.partition import ACKS_ALL, Isolation
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments.reader import ColdRead

PRODUCERS = (700, 701, 702)
VERSION = 2
"""Of the transactions (KIP-890): a marker has the next epoch of its producer."""


class Stored(NamedTuple):
    """A batch of a log. `is_abort`: of a marker; None for data."""

    header: BatchHeader
    values: dict[int, bytes]
    is_abort: bool | None


def read_batches(log: PartitionLog, offset: int, bound: int, max_bytes: int) -> tuple[list[Stored], int]:
    """One read: whole batches from the one that holds `offset`, and the offset behind them."""
    while True:
        try:
            result = log.read(offset, max_bytes, bound)
            break
        except ColdRead as cold:
            cold.warm()
    data = memoryview(b"".join(map(bytes, result.regions)))
    stored = []
    for position, header in iter_headers(data):
        records = list(decode_batch(data, position, header))
        is_abort = None
        if header.is_control:
            # Without a record it is one that the cleaner has emptied, and ends nothing that is left.
            key = (records[0].key or b"") if records else b""
            is_abort = int.from_bytes(key[2:4], "big") == ControlRecordType.ABORT if key else False
        stored.append(Stored(header, {each.offset: value_of(each) for each in records}, is_abort))
    return stored, result.next_offset


def all_batches(log: PartitionLog) -> list[Stored]:
    found: list[Stored] = []
    offset = log.log_start_offset
    while offset < log.log_end_offset:
        stored, offset = read_batches(log, offset, log.log_end_offset, 1 << 20)
        found += stored
    return found


class Transactions:
    """What the batches of a log say: the records that a reader of committed ones sees, and how far it may read."""

    def __init__(self, log: PartitionLog, high_watermark: int, known_from: int) -> None:
        """`known_from`: of earlier markers a log forgets at a start that they are not replicated, as in Kafka.

        Their transactions end in the same way at each leader.
        """
        self.stable = high_watermark
        self.committed: dict[int, bytes] = {}
        self.last: dict[int, Stored] = {}
        """Producer -> its last batch."""
        open_now: dict[int, list[Stored]] = {}
        for stored in all_batches(log):
            header = stored.header
            if header.producer_id >= 0:
                self.last[header.producer_id] = stored
                if header.is_control and not stored.values:
                    del self.last[header.producer_id]  # at a start its epoch is not known, as in Kafka
            if stored.is_abort is None and not header.is_transactional:
                self.committed |= stored.values
            elif stored.is_abort is None:
                open_now.setdefault(header.producer_id, []).append(stored)
            else:
                ended = open_now.pop(header.producer_id, [])
                if ended and header.base_offset >= max(high_watermark, known_from):
                    self.stable = min(self.stable, ended[0].header.base_offset)
                if not stored.is_abort:
                    self.committed |= {offset: value for each in ended for offset, value in each.values.items()}
        self.open = {producer_id: batches[0].header.base_offset for producer_id, batches in open_now.items()}
        self.stable = max(min((self.stable, *self.open.values())), log.log_start_offset)
        start = log.log_start_offset
        self.committed = {offset: value for offset, value in self.committed.items() if start <= offset < self.stable}


def read_committed(log: PartitionLog, bound: int, max_bytes: int) -> dict[int, bytes]:
    """What a client sees that drops aborted records as Kafka's consumer does, fetch by fetch."""
    seen: dict[int, bytes] = {}
    offset = log.log_start_offset
    while offset < bound:
        stored, end = read_batches(log, offset, bound, max_bytes)
        aborted = sorted(log.aborted_transactions(offset, end), key=lambda each: each.first_offset)
        dropped: set[int] = set()
        for header, values, is_abort in stored:
            while aborted and aborted[0].first_offset <= header.last_offset:
                dropped.add(aborted.pop(0).producer_id)
            if is_abort:
                dropped.discard(header.producer_id)
            elif is_abort is None and not (header.is_transactional and header.producer_id in dropped):
                seen |= {each: value for each, value in values.items() if each >= offset}
        if end <= offset:
            following, _ = read_batches(log, offset, log.log_end_offset, max_bytes)
            is_open = any(entry.transaction_first_offset == bound for entry in log.producers.entries.values())
            if is_open or not following or following[0].header.base_offset < bound:
                raise Broken(f"ReadsGoOn: a read at {offset} of a log that is stable up to {bound} gives nothing")
            break  # the cleaner has removed an ended transaction, and the bound is lower again after a start
        offset = end
    return seen


class Producer:
    """`is_abort`: how its transaction ends, None while it is open. `epoch`: of its next batch."""

    def __init__(self, producer_id: int) -> None:
        self.id = producer_id
        self.epoch = self.sequence = 0
        self.is_begun = False
        self.is_abort: bool | None = None
        self.values: set[bytes] = set()
        """Of its transaction."""
        self.marker: tuple[ReplicaNode, int, int] | None = None
        """Where it was appended: the node, its leader epoch, the offset."""


class TransactionsOfReplicas(ReplicaHistory):
    def options(self) -> dict[str, str]:
        self.producers = {each: Producer(each) for each in PRODUCERS}
        self.appended: list[tuple[int, ReplicaNode, int, int, dict[int, bytes]]] = []
        """Not committed yet: history, node, its leader epoch, the end offset, the values."""
        self.transactional: set[bytes] = set()
        """Each value that was ever sent in a transaction."""
        self.began: dict[ReplicaNode, int] = {}
        """Where the log of a started node ended."""
        return {**super().options(), "transaction_partition_verification_enable": "false"}

    def actions_drawn(self) -> dict[Callable[[], None], int]:
        return {**super().actions_drawn(), self.write_in_transaction: 14, self.end_transaction: 10, self.check_all: 3}

    def finish(self) -> None:
        super().finish()
        leader = self.leader
        assert leader is not None
        for producer in self.producers.values():
            self.forget(producer)
            producer.epoch += 2
            self.append_marker(leader, producer, is_abort=True)
        self.run_for_long(2 * LAG_MS)
        self.note_answers()
        for node_id, node in self.hosting.items():
            self.require_promised(node_id, "after the last transactions")
            if node.log.last_stable_offset != node.log.log_end_offset:
                raise Broken(f"TransactionsEnd: node {node_id} at {node.log.last_stable_offset} of {node.marks}")

    # ----------------------------------------------------------------------------------------------------- the clients

    def write_in_transaction(self) -> None:
        leaders, producer = self.leaders(), self.producers[self.rng.choice(PRODUCERS)]
        if not leaders or producer.is_abort is not None:
            return
        node = self.rng.choice(leaders)
        values = [b"%d" % (self.serial + number) for number in range(1, self.rng.choice((1, 1, 3)) + 1)]
        self.serial += len(values)
        now_ms = node.clock_ms()
        data = encode_batch(
            [self.record_of(number, now_ms, value) for number, value in enumerate(values)], producer_id=producer.id,
            producer_epoch=producer.epoch, base_sequence=producer.sequence, transactional=True,
        )  # fmt: skip
        producer.is_begun = True
        producer.values.update(values)
        self.transactional.update(values)
        if self.append_to(node, bytearray(data), TransactionAppend(), values, from_client=True) < 0:
            producer.is_abort = True  # as after any error
            self.forget(producer)
        else:
            producer.sequence += len(values)

    def forget(self, producer: Producer) -> None:
        """Its transaction is to be aborted."""

    def append_to(
        self, node: ReplicaNode, data: bytearray, given: TransactionAppend, values: list[bytes], *, from_client: bool
    ) -> int:
        """The first offset, -1 after a refusal."""
        partition = node.partition
        try:
            info = node.partitions.append(
                partition, memoryview(data), node.clock_ms(), ACKS_ALL, from_client, given
            )  # fmt: skip
        except KafkaError as error:
            self.steps.append(f"{node.id} refuses: {error.code.name}")
            self.uses["refused in transactions"] += 1
            return -1
        history = self.history if partition.leader_epoch >= self.first_epoch else -1
        stored = {info.first_offset + number: value for number, value in enumerate(values)}
        self.appended.append((history, node, partition.leader_epoch, info.last_offset + 1, stored))
        return info.first_offset

    def end_transaction(self) -> None:
        """Decide how one ends; write the markers of those that are decided, where no leader has committed them."""
        begun = [each for each in self.producers.values() if each.is_begun and each.is_abort is None]
        if begun:
            ended = self.rng.choice(begun)
            ended.is_abort = self.rng.random() < 0.6
            if ended.is_abort:
                self.forget(ended)
        leader = self.leader
        for producer in self.producers.values():
            if producer.is_abort is None or leader is None:
                continue
            node, epoch, _ = producer.marker or (None, -1, -1)
            if node is not leader or epoch != leader.partition.leader_epoch:
                self.append_marker(leader, producer, is_abort=producer.is_abort)

    def append_marker(self, leader: ReplicaNode, producer: Producer, *, is_abort: bool) -> None:
        self.serial += 1
        kind = ControlRecordType.ABORT if is_abort else ControlRecordType.COMMIT
        value = encode_end_txn_value(self.serial)
        data = encode_control_batch(
            kind, value, timestamp=leader.clock_ms(), producer_id=producer.id, producer_epoch=producer.epoch + 1
        )
        given = TransactionAppend(transaction_version=VERSION)
        offset = self.append_to(leader, bytearray(data), given, [bytes(value)], from_client=False)
        if offset >= 0:
            producer.marker = leader, leader.partition.leader_epoch, offset

    def note_answers(self) -> None:
        super().note_answers()
        waiting, self.appended = self.appended, []
        for each in waiting:
            history, node, epoch, end, values = each
            if (
                self.hosting.get(node.id) is not node
                or not node.partition.leads
                or node.partition.leader_epoch != epoch
            ):
                continue
            if node.log.high_watermark < end:
                self.appended.append(each)
            elif history == self.history:
                self.promised |= values
                self.uses["acknowledged in transactions"] += len(values)
        for producer in self.producers.values():
            if producer.marker is not None:
                node, epoch, offset = producer.marker
                is_there = self.hosting.get(node.id) is node and node.partition.leader_epoch == epoch
                if is_there and node.partition.leads and node.log.high_watermark > offset:
                    self.uses["aborted" if producer.is_abort else "committed"] += 1
                    producer.epoch, producer.sequence, producer.is_begun = producer.epoch + 1, 0, False
                    producer.values.clear()
                    producer.is_abort = producer.marker = None

    # ------------------------------------------------------------------------------------------------------ the checks

    def check_all(self) -> None:
        for node_id in sorted(self.hosting):
            self.check(node_id, "is looked at")

    def check(self, node_id: int, why: str) -> None:
        super().check(node_id, why)
        node = self.nodes[node_id]
        log = node.log
        if why == "starts":
            self.began[node] = log.log_end_offset
        expected = Transactions(log, log.high_watermark, self.began.get(node, 0))
        bound = node.partition.read_bound(Isolation.READ_COMMITTED)
        if bound > expected.stable:
            raise Broken(f"OnlyStableRecordsAreRead: node {node_id} {why}, up to {bound}, not {expected.stable}")
        seen = read_committed(log, bound, self.rng.choice((1, 200, 100_000)))
        committed = {offset: value for offset, value in expected.committed.items() if offset < bound}
        if seen != committed:
            differ = sorted(seen.items() ^ committed.items())
            raise Broken(f"CommittedRecordsAreRead: node {node_id} {why}: {differ}; {self.describe(node_id)}")
        for producer_id, stored in expected.last.items():
            header, entry = stored.header, log.producers.entries.get(producer_id)
            is_known = entry is not None and entry.epoch == header.producer_epoch
            if is_known and stored.is_abort is None:
                last = header.base_sequence + header.last_offset_delta
                is_known = entry.last_sequence == last and (entry.transaction_first_offset >= 0) == (
                    producer_id in expected.open
                )
            elif is_known:
                is_known = entry.transaction_first_offset < 0
            if not is_known:
                raise Broken(f"ProducersAreKnown: node {node_id} {why}: {entry}, not {stored.header}")
