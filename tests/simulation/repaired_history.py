"""One seeded history of three replicas of a compacted partition, of which one at a time is damaged and repaired.

Appends, transactions, elections and deletions go to the leader and are copied; each replica is cleaned at its own time.
Damage comes to any file of one replica, also while its process is down. It is repaired by the broker's own repairs
(`repaired_replica`) while everything else goes on, and while its disk loses power at any operation. The model is the
one of `compaction_history`: every batch that was appended, and how its transaction ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from tests.cluster.damage.injuries import Injury, damaged
from tests.simulation.compaction_model import CompactedModel, Kept, KeyedBatch
from tests.simulation.repaired_reads import Readers, require_whole_segments
from tests.simulation.repaired_replica import PATH, TOPIC, Replica, Warnings
from tests.simulation.simulated_disk import NEVER, Directory, PowerLoss
from tests.simulation.storage_invariants import Broken
from tidelog.broker.replicas.log_cleaner import ABSENCE_MS_MAX
from tidelog.protocol.batches.record_batch import CorruptRecord
from tidelog.protocol.batches.records import (
    ControlRecordType,
    encode_batch,
    encode_control_batch,
    encode_end_txn_value,
)
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.ports import PeerUnreachable
from tidelog.storage.files.checkpoints import CLEANER_OFFSET_FILE, LEADER_EPOCH_FILE, TRANSACTION_SUMS_FILE
from tidelog.storage.log.compaction import CleaningFailed, find_cleanable
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.segments.damage import CorruptIndex, DamagedRecords
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig
from tidelog.storage.segments.reader import headers

LIVING_STEPS, REPAIRING_STEPS = 40, 15
STRIKE_OPERATIONS = 15
STRIKE_START = 0.2
HEALED_ROUNDS = 150
PLAIN, TRANSACTIONAL = (1, 2), (100, 101)
FOLDER = f"{PATH}/{TOPIC}-0"
LOG_WAYS: dict[str, int] = {
    "payload_bit": 3, "payload_bits": 1, "crc": 1, "length": 1, "magic": 1, "epoch": 1, "zero_batch": 5, "zero_page": 3,
    "remove": 4, "cut_tail": 2,
}  # fmt: skip
FILES: dict[str, int] = {
    ".log": 20, ".index": 2, ".timeindex": 1, ".txnindex": 3, ".snapshot": 2, LEADER_EPOCH_FILE: 3,
    TRANSACTION_SUMS_FILE: 1, CLEANER_OFFSET_FILE: 2,
}  # fmt: skip
INDEX_AND_SUMS = {".txnindex", TRANSACTION_SUMS_FILE}
FILE_WAYS = ("flip", "zero", "cut", "garbage", "empty", "remove")


class RepairedHistory:
    """`steps`: what was done, for the report of a failure. `uses`: how often something happened."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.steps: list[str] = []
        self.uses: Counter[str] = Counter()
        self.warnings = Warnings()
        self.now_ms = 1_000_000
        self.config = LogConfig(
            segment_bytes=rng.choice((600, 1000, 3000)),
            index_interval_bytes=rng.choice((0, 128, 400)),
            flush_messages=rng.choice((1, 4, INT64_MAX)),
            retention_ms=-1,
            file_delete_delay_ms=rng.choice((0, 1000)),
            message_timestamp_after_max_ms=INT64_MAX,
            producer_id_expiration_ms=INT64_MAX,
            delete_retention_ms=rng.choice((0, 0, 1000, 10**6)),
            min_cleanable_dirty_ratio=0.0,
            cleanup_policy=frozenset(rng.choice(({"compact"}, {"compact"}, {"compact", "delete"}))),
            verifies_transactions=False,
        )
        self.config = replace(self.config, **settings)
        self.keys = rng.choice((2, 5, 12))
        self.flushed_share = rng.choice((0, 0.1, 1))
        self.cleaned_share = [rng.choice((0, 0, 0.2, 1, 1)) for _ in range(3)]
        """Of each replica: so their cleaners have come to other places."""
        self.model = CompactedModel(self.config.delete_retention_ms)
        self.readers = Readers(self.model, rng)
        self.replicas = [Replica(number, rng, self.ask, self.assignment) for number in range(3)]
        self.isr = set(self.replicas)
        self.leader = self.replicas[0]
        self.epoch = self.high_watermark = self.deleted_to = 0
        self.victim: Replica | None = None
        self.producer_epochs = dict.fromkeys((*PLAIN, *TRANSACTIONAL), 0)
        self.sequences = dict.fromkeys((*PLAIN, *TRANSACTIONAL), 0)
        self.injured: set[str] = set()
        """The kinds of files of the victim that were injured since all was whole."""
        self.has_lost_batches = False
        """Whether it has lost the end of a closed segment."""
        self.decided: dict[int, bool] = {}
        """How the coordinator has decided that a producer's transaction ends, until the marker is committed."""
        self.uncleanable: set[Replica] = set()
        """Those with damage to records that are deleted: their cleaner reads them, and gives up."""
        self.open_now: set[int] = set()
        """The transactional producers whose transaction is open."""
        self.synced = dict.fromkeys(range(3), 0)
        """Below it a replica has all, whatever is lost with the power."""
        checkpoints = rng.choice((0, 1, 3))
        self.living: dict[Callable[[], None], int] = {
            self.append: 16, self.append_transactional: 14, self.end_transaction: 10, self.copy: 26, self.roll: 12,
            self.clean_a_little: 30, self.flush: 1, self.checkpoint: checkpoints, self.wait: 3, self.delete_records: 1,
            self.elect_another: 4, self.restart_cleanly: 1, self.kill: 4, self.look: 2, self.begin_anew: 1,
        }  # fmt: skip
        self.repairing: dict[Callable[[], None], int] = {
            self.append: 3, self.append_transactional: 3, self.end_transaction: 3, self.copy: 4, self.roll: 2,
            self.clean_a_little: 4, self.flush: 1, self.checkpoint: 1, self.wait: 1, self.delete_records: 1,
            self.elect_another: 1, self.restart_cleanly: 1, self.kill: 2, self.look: 3, self.injure: 2,
            self.scrub_a_little: 6, self.run_on: 20,
        }  # fmt: skip

    # ------------------------------------------------------------------------------------------------------ the history

    def run(self) -> None:
        """The whole history. Raises Broken when an invariant does not hold."""
        logger = logging.getLogger("tidelog")
        logger.addHandler(self.warnings)
        try:
            for each in self.replicas:
                self.survive(each, lambda each=each: self.start(each, machine_ran_on=False))  # type: ignore[misc]
            self.lead(self.leader)
            for _ in range(self.rng.choice((1, 2, 3))):
                self.do_some(self.living, LIVING_STEPS, self.rng.choice((0.0, 0.04)))
                self.do(self.injure, 0.0)
                self.do_some(self.repairing, REPAIRING_STEPS, self.rng.choice((0.04, 0.15)))
                self.do(self.heal, self.rng.choice((0.0, 0.5)))
            for each in self.replicas:
                each.disk.fail_at = NEVER
            self.finish()
        except Exception as error:
            error.add_note(f"seed {self.seed}, after: {'; '.join(self.steps)}")
            raise
        finally:
            logger.removeHandler(self.warnings)
            for each in self.replicas:
                each.bury()

    def do_some(self, actions: Mapping[Callable[[], None], int], count: int, strike: float) -> None:
        for action in self.rng.choices(list(actions), list(actions.values()), k=count):
            self.do(action, strike)

    def do(self, action: Callable[[], None], strike: float) -> None:
        """`strike`: the chance that a disk is struck meanwhile."""
        if self.rng.random() < strike:
            struck = self.rng.choice([*self.replicas, self.victim or self.leader])
            struck.disk.fail_after(self.rng.randint(1, STRIKE_OPERATIONS))
        self.steps.append(action.__name__)
        with suppress(PowerLoss):
            action()
        for each in self.replicas:
            if each.disk.is_off:
                self.end_process(each, self.rng.choice((True, True, False)))
            each.require_no_refusal()

    def survive(self, replica: Replica, action: Callable[[], None]) -> None:
        with suppress(PowerLoss):
            action()
        if replica.disk.is_off:
            self.end_process(replica, loses_power=True)

    def finish(self) -> None:
        self.heal()
        while self.open_now:
            self.end_transaction()
            self.catch_up()
        self.heal()
        for each in self.replicas:
            each.end_cleaning()
            each.close()
            self.start(each, machine_ran_on=True)
            self.catch_up()
        self.check_all("after a last start")
        for each in self.replicas:
            log = each.log
            if log.last_stable_offset != log.log_end_offset:
                raise Broken(f"TransactionsEnd: replica {each.id} is stable up to {log.last_stable_offset} of {log}")
        self.pass_time(1)
        for each in self.replicas:
            each.log.roll(self.now_ms)
            while each not in self.uncleanable and (each.compaction is not None or self.is_cleanable(each.log)):
                each.clean_a_little(self.now_ms, self.now_ms)
        self.check_all("after the last cleanings")

    def is_cleanable(self, log: PartitionLog) -> bool:
        return bool(find_cleanable(log, self.now_ms).cleanable_bytes)

    # ---------------------------------------------------------------------------------------------------- the processes

    def start(self, replica: Replica, *, machine_ran_on: bool, kept_end: int = 0) -> None:
        """`kept_end`: the log has all below it, because no power was lost."""
        replica.start(self.config, self.now_ms, machine_ran_on=machine_ran_on)
        log = replica.log
        if replica is not self.victim:
            kept_end = min(max(kept_end, self.synced[replica.id]), self.ends_at_most(replica))
            if log.log_end_offset < kept_end:
                raise Broken(f"KeptRecordsArePresent: replica {replica.id}: {log}, {kept_end} was kept")
            if any(each.end_offset > self.deleted_to for _, each in log.damaged_ranges()):
                raise Broken(f"NothingIsDamaged: replica {replica.id} after a start: {log.damaged_ranges()}")
        self.synced[replica.id] = 0
        is_shortened = bool(replica.directory.shortened_logs) and self.may_leave(replica)
        if self.ends_at_most(replica) < self.high_watermark or is_shortened:
            self.leave(replica)
        log.doubt_epochs_above(self.epoch)
        log.set_high_watermark(min(self.high_watermark, self.ends_at_most(replica)))
        self.delete_below(replica)
        self.steps.append(f"replica {replica.id} starts: {log.log_start_offset}..{log.log_end_offset}")
        replica.look_at_damage()
        if replica is self.leader and all(each.starts for each in self.replicas):
            self.lead(replica)
        self.check(replica, "after a start")

    def ends_at_most(self, replica: Replica) -> int:
        """What lies behind is of another history, and is to be cut."""
        end = replica.log.log_end_offset
        return end if replica.lowest_cut is None else min(end, replica.lowest_cut)

    def leave(self, replica: Replica) -> None:
        """The ISR, and the lead."""
        others = self.isr - {replica}
        if not any(each is not self.victim for each in others):
            raise Broken(f"OneIsWhole: only replica {replica.id} is in sync: {replica.log}")
        self.isr = others
        if self.leader is replica:
            chosen = self.rng.choice([each for each in self.replicas if each in others and each is not self.victim])
            chosen.disk.fail_at = NEVER
            chosen.truncate_if_due()
            self.elect(chosen)

    def may_leave(self, replica: Replica) -> bool:
        return any(each is not replica and each is not self.victim for each in self.isr)

    def may_lose_power(self, replica: Replica) -> bool:
        """Without the cleaner's checkpoint, what a loss of power takes between two batches looks like cleaned."""
        return self.may_leave(replica) and not (replica is self.victim and CLEANER_OFFSET_FILE in self.injured)

    def end_process(self, replica: Replica, loses_power: bool) -> None:
        """What was struck, or is killed; and the start after it, which may be struck, too."""
        loses_power = loses_power and self.may_lose_power(replica)
        machine_ran_on = not loses_power and replica.is_up
        kept_end = replica.log.log_end_offset if replica.is_up else 0
        replica.bury()
        while True:
            self.steps.append(f"replica {replica.id} {'LOSES POWER' if loses_power else 'IS KILLED'}")
            self.uses["power" if loses_power else "kills"] += 1
            if loses_power:
                replica.disk.lose_power()
                machine_ran_on, kept_end = False, 0
            else:
                replica.disk.end_process()
            if self.may_leave(replica):
                self.leave(replica)
            if self.rng.random() < STRIKE_START:
                replica.disk.fail_after(self.rng.randint(1, 30))
            with suppress(PowerLoss):
                self.start(replica, machine_ran_on=machine_ran_on, kept_end=kept_end)
                replica.disk.fail_at = NEVER
                return
            replica.bury()
            loses_power = self.rng.random() < 0.5 and self.may_lose_power(replica)

    def kill(self) -> None:
        self.end_process(self.any_replica(), self.rng.random() < 0.5)

    def restart_cleanly(self) -> None:
        replica = self.any_replica()
        end = replica.log.log_end_offset
        try:
            replica.close()
        except PowerLoss:
            self.end_process(replica, loses_power=True)
            return
        replica.bury()
        replica.disk.end_process()
        self.survive(replica, lambda: self.start(replica, machine_ran_on=True, kept_end=end))

    def any_replica(self) -> Replica:
        return self.rng.choice([*self.replicas, *([] if self.victim is None else [self.victim] * 2)])

    # --------------------------------------------------------------------------------------------------- the controller

    def assignment(self) -> Any:
        return SimpleNamespace(
            leader=self.leader.id, isr=sorted(each.id for each in self.isr),
            replicas=[each.id for each in self.replicas],
            processes={each.id: b"%d" % each.starts for each in self.replicas},
        )  # fmt: skip

    def elect_another(self) -> None:
        candidates = [each for each in self.replicas if each in self.isr - {self.leader} and each.lowest_cut is None]
        if candidates:
            self.elect(self.rng.choice(candidates))

    def elect(self, replica: Replica) -> None:
        self.leader = replica
        self.lead(replica)

    def lead(self, replica: Replica) -> None:
        self.epoch += 1
        log, end = replica.log, replica.log.log_end_offset
        self.steps.append(f"replica {replica.id} leads in epoch {self.epoch} from {end}")
        for each in self.replicas:
            each.leads, each.leader_epoch = each is replica, self.epoch
            if each is not replica and (each.log.log_end_offset > end or not each.is_up):
                each.lowest_cut = end if each.lowest_cut is None else min(each.lowest_cut, end)
                self.synced[each.id] = min(self.synced[each.id], end)
        self.model.cut_from(end)
        log.doubt_epochs_above(self.epoch)
        log.assign_epoch(self.epoch)
        self.adopt_producers()

    def adopt_producers(self) -> None:
        """They go on behind the last batch that is left."""
        self.open_now.clear()
        last: dict[int, KeyedBatch] = {}
        for batch in self.model.batches:
            if batch.ends is not None:
                self.open_now.discard(batch.producer_id)
            elif batch.producer_id >= 0:
                last[batch.producer_id] = batch
                if batch.is_transactional:
                    self.open_now.add(batch.producer_id)
        for producer_id in self.sequences:
            found = last.get(producer_id)
            is_known = found is not None and found.producer_epoch == self.producer_epochs[producer_id]
            self.sequences[producer_id] = found.base_sequence + len(found.records) if found and is_known else 0
        self.forget_decisions()

    def forget_decisions(self) -> None:
        """Of the coordinator, where the marker is committed, or the whole transaction was cut."""
        begun = self.open_now | {
            each.producer_id for each in self.model.batches if each.ends is not None
            and each.base_offset >= self.high_watermark
        }  # fmt: skip
        self.decided = {each: is_abort for each, is_abort in self.decided.items() if each in begun}

    # ------------------------------------------------------------------------------------------------------ the records

    def append(self) -> None:
        self.write(self.rng.choice((-1, *PLAIN)), is_transactional=False)

    def append_transactional(self) -> None:
        producer_id = self.rng.choice(TRANSACTIONAL)
        if producer_id not in self.decided:  # otherwise its coordinator has it wait for the marker
            self.write(producer_id, is_transactional=True)

    def write(self, producer_id: int, *, is_transactional: bool) -> None:
        rng = self.rng
        records = [
            Kept(
                b"k%d" % rng.randrange(self.keys),
                None if rng.random() < 0.2 else rng.randbytes(rng.choice((3, 20, 60))),
                self.now_ms,
            )
            for _ in range(rng.choice((1, 1, 2, 5)))
        ]
        is_known = producer_id >= 0
        sequence = self.sequences[producer_id] if is_known else -1
        epoch = self.producer_epochs[producer_id] if is_known else -1
        sent = encode_batch(
            [(each.timestamp, each.key, each.value, ()) for each in records], compression=rng.choice((0, 0, 0, 4)),
            producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, transactional=is_transactional,
        )  # fmt: skip
        batch = KeyedBatch(
            0, 0, b"", bytes(sent), self.epoch, [], producer_id, epoch, sequence, is_transactional,
            records=records, appended_ms=self.now_ms,
        )  # fmt: skip
        if self.append_at_leader(batch, len(records)) and is_known:
            self.sequences[producer_id] = sequence + len(records)
            if is_transactional:
                self.open_now.add(producer_id)

    def end_transaction(self) -> None:
        if not self.open_now:
            return
        producer_id = self.rng.choice(sorted(self.open_now))
        is_abort = self.decided.get(producer_id, self.rng.random() < 0.6)
        last = max(each.base_offset for each in self.model.batches if each.producer_id == producer_id)
        if not is_abort and last >= self.high_watermark:
            return  # its producer commits what is acknowledged
        self.decided[producer_id] = is_abort
        kind = ControlRecordType.ABORT if is_abort else ControlRecordType.COMMIT
        epoch = self.producer_epochs[producer_id]
        sent = encode_control_batch(
            kind, encode_end_txn_value(0), timestamp=self.now_ms, producer_id=producer_id, producer_epoch=epoch
        )
        batch = KeyedBatch(0, 0, b"", bytes(sent), self.epoch, [], producer_id, epoch, -1, True, is_abort)
        if self.append_at_leader(batch, 1):
            self.open_now.discard(producer_id)

    def append_at_leader(self, batch: KeyedBatch, count: int) -> bool:
        """False where the leader refuses it, because damage may hide what it must know."""
        leader, log = self.leader, self.leader.log
        batch.base_offset, batch.leader_epoch = log.log_end_offset, self.epoch
        batch.last_offset = batch.base_offset + count - 1
        data = memoryview(bytearray(batch.sent))
        try:
            info = log.append_as_leader(data, self.epoch, self.now_ms, from_client=batch.ends is None)
        except PowerLoss:
            self.model.batches.append(batch)  # perhaps it is there: the next leader's end decides
            self.end_process(leader, self.rng.random() < 0.7)
            if leader is self.leader:
                self.model.cut_from(leader.log.log_end_offset)
                self.adopt_producers()
            return False
        except KafkaError as error:
            if error.code is ErrorCode.KAFKA_STORAGE_ERROR and leader is self.victim:
                self.uses["refused"] += 1
                return False
            if error.code is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER and self.is_deleted(batch.producer_id):
                self.producer_epochs[batch.producer_id] += 1
                self.sequences[batch.producer_id] = 0
                return False
            raise Broken(f"ProducersAreRemembered: replica {leader.id}, {batch.producer_id}: {error}") from error
        if info.duplicate or info.first_offset != batch.base_offset:
            raise Broken(f"ProducersAreRemembered: replica {leader.id}, {batch.producer_id}: {info}")
        self.model.batches.append(batch)
        self.now_ms += self.rng.randint(0, 20)
        return True

    def is_deleted(self, producer_id: int) -> bool:
        """Whether all batches of the producer are. A start may know its last marker alone, and no sequence then."""
        own = [each.last_offset for each in self.model.batches if each.producer_id == producer_id and each.ends is None]
        return producer_id not in self.open_now and max(own, default=-1) < self.deleted_to

    def require_known_repeats(self, replica: Replica) -> None:
        """The last batch of each producer is known for what it is when it is sent again to a new leader."""
        log = replica.log
        for producer_id, batch in self.model.last_batches(log.log_start_offset).items():
            entry = log.producers.entries.get(producer_id)
            last = batch.base_sequence + len(batch.records) - 1
            if batch.last_offset >= log.log_end_offset:
                continue
            if entry is None or entry.last_sequence != last:
                raise Broken(f"ProducersAreRemembered: replica {replica.id} has {entry} for {last} of {producer_id}")
            is_open = producer_id in self.open_now
            if (entry.transaction_first_offset >= 0) != is_open and log.log_end_offset == self.model.end:
                raise Broken(f"ProducersAreRemembered: replica {replica.id} has {entry}, open: {is_open}")

    def copy(self) -> None:
        for each in self.rng.sample(self.replicas, 3):
            if each is not self.leader and self.rng.random() < 0.8:
                for _ in range(self.rng.choice((1, 3, 100))):
                    if not self.copy_to(each):
                        break
        self.commit()

    def copy_to(self, follower: Replica) -> bool:
        """One fetch. False where there is nothing more."""
        leader, log = self.leader, follower.log
        try:
            follower.truncate_if_due()
            if log.log_end_offset < leader.log.log_start_offset:
                log.truncate_fully_and_start_at(leader.log.log_start_offset)
            if log.log_end_offset >= leader.log.log_end_offset:
                return False
            data, _ = leader.read(log.log_end_offset, self.rng.choice((1, 300, 10_000)), leader.log.log_end_offset)
            follower.take(data, self.now_ms)
        except DamagedRecords as error:
            if self.victim not in (leader, follower):
                raise Broken(f"NothingIsDamaged: {error}") from error
            leader.look_at_damage()
            follower.look_at_damage()
            return False
        except CorruptRecord as error:
            if follower is not self.victim:
                raise Broken(f"CommittedRecordsAreCopied: {error}") from error
            follower.look_at_damage()  # its log ends in a batch, by its checkpoints
            return False
        return True

    def commit(self) -> None:
        end = self.leader.log.log_end_offset
        self.isr |= {
            each for each in self.replicas if each.lowest_cut is None and each.log.log_end_offset == end
        }  # fmt: skip
        self.high_watermark = max(self.high_watermark, min(map(self.ends_at_most, self.isr)))
        self.forget_decisions()
        for each in self.replicas:
            log = each.log
            log.set_high_watermark(max(log.high_watermark, min(self.high_watermark, self.ends_at_most(each))))
            self.delete_below(each)
            if log.flush_due and self.rng.random() < self.flushed_share:
                self.flush_of(each)

    def catch_up(self) -> None:
        for each in self.replicas:
            while each is not self.leader and self.copy_to(each):
                pass
        self.commit()

    def delete_records(self) -> None:
        log = self.leader.log
        if self.config.is_deleted_by_age_or_size:
            low, high = log.log_start_offset, log.high_watermark
            self.deleted_to = log.delete_records(low + int(self.rng.random() * (high - low) / 3))
            self.commit()

    def delete_below(self, replica: Replica) -> None:
        """What was deleted: a start may have brought it back."""
        start = min(self.deleted_to, replica.log.high_watermark)
        if start > replica.log.log_start_offset:
            replica.log.delete_records(start)

    def begin_anew(self) -> None:
        """A follower begins with an empty log, and gets the gaps of its leader."""
        chosen = self.rng.choice(self.replicas)
        if chosen is self.leader or not self.may_leave(chosen) or chosen.compaction is not None:
            return
        self.leave(chosen)
        self.synced[chosen.id] = 0
        chosen.log.truncate_fully_and_start_at(self.leader.log.log_start_offset)
        chosen.lowest_cut = None  # where a kill leaves the log as it was, it is still to be cut

    # ----------------------------------------------------------------------------------------------- what a node does

    def roll(self) -> None:
        chosen = self.replicas if self.rng.random() < 0.5 else [self.any_replica()]
        for each in chosen:
            each.log.roll(self.now_ms)

    def clean_a_little(self) -> None:
        replica = self.any_replica()
        if replica.compaction is None and self.rng.random() > self.cleaned_share[replica.id]:
            return
        is_on_all = len(self.isr) == len(self.replicas)
        try:
            if is_on_all and replica.compaction is None:
                self.sync_what_is_old(replica)
            replica.clean_a_little(self.now_ms, self.now_ms if is_on_all else self.now_ms - ABSENCE_MS_MAX)
        except (CleaningFailed, CorruptIndex) as error:
            if replica is not self.victim and replica not in self.uncleanable:
                raise Broken(f"EveryLogIsCleaned: replica {replica.id}: {error}") from error
            replica.look_at_damage()

    def sync_what_is_old(self, cleaned: Replica) -> None:
        """Where a tombstone or marker goes now. What came with it is then older than the half minute that a loss of
        power takes: with a `delete.retention.ms` below it the records of aborted transactions are back, as in Kafka.
        """
        old = (header for segment in list(cleaned.log.segments) for _, header in headers(segment))
        if any(each.has_delete_horizon and each.base_timestamp <= self.now_ms for each in old):
            for each in self.replicas:
                if each is not cleaned:
                    self.flush_of(each)

    def flush(self) -> None:
        self.flush_of(self.any_replica())

    def flush_of(self, replica: Replica) -> None:
        replica.log.flush()
        if replica.lowest_cut is None and replica is not self.victim:
            self.synced[replica.id] = replica.log.log_end_offset

    def checkpoint(self) -> None:
        self.any_replica().directory.write_checkpoints()

    def wait(self) -> None:
        self.pass_time(self.rng.choice((50, 1000, 3000)))

    def pass_time(self, duration_ms: int) -> None:
        self.now_ms += duration_ms
        for each in self.replicas:
            each.log.clock_ms = self.now_ms
            if not each.disk.is_off:
                with suppress(PowerLoss):
                    each.pass_time(duration_ms)

    def scrub_a_little(self) -> None:
        self.any_replica().scrub_a_little()

    def run_on(self) -> None:
        if self.rng.random() < 0.3:
            self.pass_time(self.rng.choice((5, 60, 500)))
        else:
            self.any_replica().run(self.rng.choice((1, 3, 10, 50)))

    async def ask(self, source: int, offset: int, max_bytes: int, up_to_log_end: bool) -> Any:
        """What another replica answers."""
        for _ in range(self.rng.choice((0, 0, 1, 3))):
            await asyncio.sleep(0)
        other = self.replicas[source]
        if not other.is_up or other.disk.is_off:
            raise PeerUnreachable("it is down")
        log = other.log
        if not log.log_start_offset <= offset <= log.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        max_bytes = min(max_bytes, self.rng.choice((1, 300, 10_000)))
        try:
            data, _ = other.read(offset, max_bytes, log.log_end_offset if up_to_log_end else log.high_watermark)
        except PowerLoss:
            raise PeerUnreachable("it has lost power") from None
        except DamagedRecords:
            other.look_at_damage()
            raise KafkaError(ErrorCode.CORRUPT_MESSAGE) from None
        return SimpleNamespace(records=data, high_watermark=log.high_watermark)

    # ------------------------------------------------------------------------------------------------------- the damage

    def injure(self) -> None:
        if self.victim is None:
            candidates = [
                each for each in self.replicas if {*self.replicas} - {each} <= self.isr and each.lowest_cut is None
            ]
            if not candidates:
                return
            self.victim = self.rng.choice(candidates)
        victim = self.victim
        if self.isr <= {victim} or any(each.lowest_cut is not None for each in self.replicas if each is not victim):
            return
        how = self.rng.choice(("running", "running", "stopped", "killed"))
        if how == "running":
            self.inflict(victim)
            victim.log.segments.distrust_from(0)
            if self.rng.random() < 0.5:
                victim.log.segments.release(keep_active=True)
            return
        if how == "stopped":
            try:
                victim.close()
            except PowerLoss:
                self.end_process(victim, loses_power=True)
                return
        victim.bury()
        victim.disk.end_process()
        if self.may_leave(victim):
            self.leave(victim)
        self.inflict(victim)
        self.survive(victim, lambda: self.start(victim, machine_ran_on=True))

    def inflict(self, victim: Replica) -> None:
        rng, disk = self.rng, victim.disk
        was_off, disk._is_off = disk._is_off, False
        suffix = rng.choices(list(FILES), list(FILES.values()))[0]
        folder = disk._directory(PATH if suffix == CLEANER_OFFSET_FILE else FOLDER)
        disk._is_off = was_off
        names = sorted(name for name in folder.entries if name.endswith(suffix))
        if not names or (suffix == LEADER_EPOCH_FILE and victim.is_up):
            return  # only a start reads the file of epochs
        name, is_log = rng.choice(names), suffix == ".log"
        way = rng.choices(list(LOG_WAYS), list(LOG_WAYS.values()))[0] if is_log else rng.choice(FILE_WAYS)
        if is_log and way in ("remove", "cut_tail") and name == names[-1]:
            way = "payload_bit"
        if suffix in INDEX_AND_SUMS and self.injured & INDEX_AND_SUMS - {suffix}:
            return  # without both nothing tells of aborted transactions
        takes_batches = way in ("remove", "cut_tail") and is_log
        has_lost_checkpoint = CLEANER_OFFSET_FILE in self.injured
        if takes_batches if has_lost_checkpoint else (self.has_lost_batches and suffix == CLEANER_OFFSET_FILE):
            return  # together they look like a log that another broker has cleaned
        self.has_lost_batches = self.has_lost_batches or takes_batches
        injury = Injury("sealed" if is_log and way != "remove" else "other", way, 0, rng.random(), rng.random())
        inode: Any = folder.entries[name]
        try:
            data, what = damaged(injury, bytes(inode.data))
        except ValueError:
            return  # a batch without records has no bits of them
        if suffix == LEADER_EPOCH_FILE and rng.random() < 0.6:
            way, what = "number", "another number"
            data = with_another_number(bytes(inode.data), rng)
        self.steps.append(f"DAMAGE to {name} of replica {victim.id}: {what}")
        self.uses[f"{way} of {suffix}"] += 1
        self.injured.add(suffix)
        put(folder, name, inode, data)

    def heal(self) -> None:
        """The damage is detected and repaired: all replicas are whole and in sync."""
        victim = self.victim
        if victim is not None:
            victim.end_cleaning()
            if self.leader is victim:
                self.leave(victim)
        for number in range(HEALED_ROUNDS):
            if victim is not None:
                victim.end_cleaning()
                victim.scrub_all()
            self.pass_time(1000)
            for each in self.replicas:
                each.require_power()
            self.catch_up()
            is_whole = victim is None or not victim.log.damaged_ranges()
            if is_whole and len(self.isr) == 3 and (victim is None or number):
                break
        else:
            assert victim is not None
            raise Broken(f"TheDamageIsRepaired: replica {victim.id}: {victim.log.damaged_ranges()}, ISR {self.isr}")
        if victim is not None:
            self.uses["repaired"] += victim.repairs.counters.ranges_repaired
            victim.directory.write_checkpoints()
        self.victim, self.has_lost_batches = None, False
        self.injured.clear()
        self.check_all("after the repairs")
        if victim is not None and self.rng.random() < 0.3:
            victim.disk.sync_everything()  # what a killed process has copied is on the device after half a minute
            self.end_process(victim, loses_power=self.rng.random() < 0.5)
        if victim is not None:
            self.uses["healed"] += 1
            victim.scrub_all()
            if victim.log.damaged_ranges():
                raise Broken(f"NothingIsDamaged: replica {victim.id}: {victim.log.damaged_ranges()}")
            if any(each.damage for each in victim.log.segments):
                self.uncleanable.add(victim)

    # ------------------------------------------------------------------------------------------------------- the checks

    def look(self) -> None:
        self.check(self.any_replica(), "is looked at")

    def check_all(self, why: str) -> None:
        for each in self.replicas:
            self.check(each, why)
            require_whole_segments(each.log)
            self.require_known_repeats(each)

    def check(self, replica: Replica, why: str) -> None:
        self.readers.require(
            replica, f"replica {replica.id} {why}", self.high_watermark, self.now_ms,
            is_damaged=replica is self.victim, may_be_back=self.warnings.has_mixed_cleanings,
        )  # fmt: skip


def with_another_number(data: bytes, rng: Random) -> bytes:
    """A checkpoint in which a digit of an entry is another one: no checksum shows it."""
    entries_at = len(b"\n".join(data.split(b"\n")[:2]))
    digits = [at for at in range(entries_at, len(data)) if data[at : at + 1].isdigit()]
    changed = bytearray(data)
    if digits:
        changed[rng.choice(digits)] = rng.choice(b"0123456789")
    return bytes(changed)


def put(folder: Directory, name: str, inode: Any, data: bytes | None) -> None:
    """On the device, too, whatever was synced; what is pending is there before."""
    if data is None:
        for entries in (folder.entries, folder.durable):
            entries.pop(name, None)
        folder.pending = [each for each in folder.pending if name not in each[:2]]
        return
    inode.sync()
    inode.data, inode.durable = bytearray(data), data
