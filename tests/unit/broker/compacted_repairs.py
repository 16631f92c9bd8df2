"""Histories of a compacted partition's copies that are cleaned each at its own time; one is damaged, and repaired.

Every copy gets the same records. A table of the newest committed values says what each of them must lead to, however
far its cleaner is, and which keys are deleted. No network, no cluster: the repairs read the other copies directly.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from tests.simulation.compaction_model import read_committed
from tests.unit.broker.repairing import RepairedReplica
from tests.unit.storage.batches import NOW, Logs, marker, read
from tests.unit.storage.cleaning import clean
from tidelog.broker.replicas.hosting import _set_config
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.storage.files.checkpoints import EXPLAINED_GAPS_FILE
from tidelog.storage.log.compaction import find_cleanable
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.prefix_copy import PrefixCopy
from tidelog.storage.segments.damage import DamagedRecords
from tidelog.storage.segments.log_config import INT64_MAX, LogConfig

CONFIG = LogConfig(
    segment_bytes=100_000, index_interval_bytes=200, message_timestamp_after_max_ms=INT64_MAX,
    cleanup_policy=frozenset({"compact"}), verifies_transactions=False,
)  # fmt: skip
RETENTIONS_MS = (0, 0, 1000, 10**6)
DAMAGES = ("a byte", "zeros", "zeros", "the end of a segment", "a segment")
ATTEMPTS = 12
Table = dict[bytes, bytes]


class CompactedRepairs(RepairedReplica):
    """Copy 1 is damaged. Needs a running loop."""

    def __init__(
        self, path: Path, seed: int, *, is_cleaned_meanwhile: bool = False, ceases_to_be_compacted: bool = False,
        loses_explained_gaps: bool = False,
    ) -> None:  # fmt: skip
        """`is_cleaned_meanwhile`: the source of a whole copy, perhaps before each of its segments.

        `ceases_to_be_compacted`: the topic, before the damage. After the repair it is compacted again.
        `loses_explained_gaps`: this is the damage.
        """
        self.rng = rng = Random(seed)
        self.rng_meanwhile = Random(seed) if is_cleaned_meanwhile else None
        self.ceases_to_be_compacted = ceases_to_be_compacted
        self.loses_explained_gaps = loses_explained_gaps
        self.copied_segments = 0
        self.cleaned_meanwhile = 0
        self.path = path
        self.config = replace(CONFIG, delete_retention_ms=rng.choice(RETENTIONS_MS))
        if is_cleaned_meanwhile:  # otherwise it is copied in one
            self.config = replace(self.config, segment_bytes=250)
        self.now_ms = NOW
        self.copies = {number: Logs(path / f"{number}", self.config) for number in (1, 2, 3)}
        self.keys = [b"%d" % number * rng.choice((1, 1, 7)) for number in range(rng.choice((2, 4, 8)))]
        self.records: list[tuple[bytes, bytes | None]] = []
        self.open: dict[int, set[int]] = {}
        """Producer id -> the places in `records` of its open transaction."""
        self.aborted: set[int] = set()
        self.sequences = dict.fromkeys((7, 8), 0)
        self.written = 0
        self.steps: list[str] = []
        self.is_damaged = False
        super().__init__(self.copies[1].log, lambda: self.order)
        self.order = [2, 3]
        in_sync: Any = lambda partition: {2, 3}  # noqa: E731
        self.repairs.in_sync = in_sync

    async def fetch(
        self, partition: object, source: int, offset: int, *, up_to_log_end: bool, bytes_max: int = 1 << 20
    ) -> bytes:
        await asyncio.sleep(0)
        self.clean_meanwhile(source)
        log = self.copies[source].log
        if not log.log_start_offset <= offset <= log.log_end_offset:
            raise KafkaError(ErrorCode.OFFSET_OUT_OF_RANGE)
        try:
            regions = read(log, offset, min(bytes_max, self.rng.choice((1, 300, 10_000))), log.log_end_offset).regions
        except DamagedRecords:
            raise KafkaError(ErrorCode.KAFKA_STORAGE_ERROR) from None
        return b"".join(bytes(region) for region in regions)

    def clean_meanwhile(self, source: int) -> None:
        copy, rng = self.copies[1].log.compaction, self.rng_meanwhile
        if rng is None or not isinstance(copy, PrefixCopy) or len(copy._copied) == self.copied_segments:
            return
        self.copied_segments = len(copy._copied)
        for _ in range(rng.choice((0, 1, 2, 3))):
            self.now_ms += rng.choice((1, 2_000))
            self.roll([source])
            self.cleaned_meanwhile += bool(find_cleanable(self.copies[source].log, self.now_ms).cleanable_bytes)
            self.clean(source)

    # ------------------------------------------------------------------------------------------------------ the history

    def write(self) -> None:
        rng = self.rng
        rows: list[tuple[bytes, bytes | None]] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            self.written += 1
            value = None if rng.random() < 0.3 else b"%04d" % self.written
            rows.append((rng.choice(self.keys), value))
        options: dict[str, Any] = {"compression": rng.choice((0, 0, 0, 1))}
        if rng.random() < 0.3:
            producer_id = rng.choice((7, 8))
            options |= {
                "producer_id": producer_id, "producer_epoch": 0, "base_sequence": self.sequences[producer_id],
                "transactional": True,
            }  # fmt: skip
            self.sequences[producer_id] += len(rows)
            self.open.setdefault(producer_id, set()).update(range(len(self.records), len(self.records) + len(rows)))
        self.records += rows
        data = encode_batch([(self.now_ms, key, value, ()) for key, value in rows], **options)
        self.append(bytes(data))

    def expected(self) -> Table:
        table: Table = {}
        for place, (key, value) in enumerate(self.records):
            if place in self.aborted:
                continue
            if value is None:
                table.pop(key, None)
            else:
                table[key] = value
        return table

    def end_transaction(self) -> None:
        if self.open:
            producer_id = self.rng.choice(sorted(self.open))
            rows = self.open.pop(producer_id)
            is_abort = self.rng.random() < 0.5
            self.append(bytes(marker(abort=is_abort, producer_id=producer_id, timestamp=self.now_ms)))
            if is_abort:
                self.aborted |= rows

    def append(self, data: bytes) -> None:
        for made in self.copies.values():
            made.append(memoryview(bytearray(data)), now_ms=self.now_ms, from_client=False)

    def roll(self, numbers: list[int]) -> None:
        for number in numbers:
            self.copies[number].log.roll(self.now_ms)

    def clean(self, number: int) -> None:
        log = self.copies[number].log
        log.clock_ms = self.now_ms
        if find_cleanable(log, self.now_ms).cleanable_bytes:
            compaction = clean(log, self.now_ms, memory_bytes=self.rng.choice((200, 400, 1 << 20)), load_factor=1.0)
            self.steps.append(f"{number} is cleaned below {compaction.cleaned_offset}")

    def copy_anew(self, number: int) -> None:
        """The replica was added again: it is a copy of another one, with the gaps that one has."""
        source = self.rng.choice([each for each in self.copies if each != number])
        self.copies[number].close()
        self.steps.append(f"{number} is a new copy of {source}")
        made = Logs(self.path / f"{number}.{len(self.steps)}", self.config)
        log, end_offset = made.log, self.copies[source].log.log_end_offset
        offset = 0
        while offset < end_offset:
            result = read(self.copies[source].log, offset, 500, end_offset)
            for region in result.regions:
                log.append_as_follower(memoryview(bytearray(region)), self.now_ms)
            offset = result.next_offset
            if self.rng.random() < 0.3:
                log.roll(self.now_ms)
        log.set_high_watermark(log.log_end_offset)
        self.copies[number] = made

    def live(self) -> None:
        rng = self.rng
        lag = {number: rng.choice((0, 0, 0.3, 1)) for number in self.copies}
        for _ in range(rng.randint(5, 40)):
            choice = rng.random()
            if choice < 0.5:
                self.write()
            elif choice < 0.6:
                self.end_transaction()
            elif choice < 0.63:
                self.now_ms += rng.choice((1, 600, 2000))
            elif choice < 0.64:
                self.copy_anew(rng.choice(list(self.copies)))
            else:
                self.roll(list(self.copies) if rng.random() < 0.8 else [rng.choice(list(self.copies))])
                for number, share in lag.items():
                    if rng.random() < share:
                        self.clean(number)

    def set_cleanup_policy(self, cleanup_policy: str) -> None:
        self.steps.append(f"the topic is {cleanup_policy}")
        for made in self.copies.values():
            made.config = replace(self.config, cleanup_policy=frozenset({cleanup_policy}))
            _set_config(made.log, made.config, made.directory, set())

    def cease_to_be_compacted(self) -> None:
        """Perhaps with more records, and with starts between."""
        rng = self.rng
        self.set_cleanup_policy("delete")
        for number in self.copies:
            if rng.random() < 0.3:
                self.copies[number].close()
                self.copies[number].open(self.now_ms)
        for _ in range(rng.choice((0, 0, 3, 10))):
            self.write()
            if rng.random() < 0.3:
                self.roll(list(self.copies))
        while self.open:
            self.end_transaction()

    # ------------------------------------------------------------------------------------------------------- the damage

    def damage(self) -> bool:
        """Damage a place of copy 1, and find it. False if there is none to damage."""
        rng, made = self.rng, self.copies[1]
        log, kind = made.log, rng.choice(DAMAGES)
        log.flush()
        if self.loses_explained_gaps:
            made.directory.write_checkpoints()
            made.close()
            (made.folder / EXPLAINED_GAPS_FILE).write_bytes(b"")
            made.open(self.now_ms)
            return self.find_damage(EXPLAINED_GAPS_FILE)
        files = [made.folder / f"{each.base_offset:020d}.log" for each in log.segments if each.size_bytes]
        closed = [made.folder / f"{each.base_offset:020d}.log" for each in list(log.segments)[:-1] if each.size_bytes]
        if not files or (kind in ("the end of a segment", "a segment") and not closed):
            return False
        if kind in ("the end of a segment", "a segment"):
            path = rng.choice(closed)
            made.close()
            size = path.stat().st_size
            if kind == "a segment":
                path.unlink()
            else:
                with path.open("r+b") as file:
                    file.truncate(rng.randrange(size))
            made.open(self.now_ms)
        else:
            path = rng.choice(files)
            data = bytearray(path.read_bytes())
            position, header = rng.choice(list(iter_headers(bytes(data))))
            if kind == "a byte":
                data[position + rng.randrange(17, header.size_bytes)] ^= 1 << rng.randrange(8)
            else:
                start = position + rng.choice((0, rng.randrange(header.size_bytes)))
                end = min(start + rng.choice((30, 100, 300)), len(data))
                data[start:end] = bytes(end - start)
            path.write_bytes(data)
        return self.find_damage(f"{kind} of {path.name}")

    def find_damage(self, what: str) -> bool:
        log = self.copies[1].log
        for segment in log.segments:
            segment.findings = segment.examine()
            log.adopt_findings(segment)
        self.partition.log = log
        self.steps.append(f"damaged: {what}: {[str(each) for _, each in log.damaged_ranges()]}")
        return bool(log.damaged_ranges())

    async def repair(self) -> None:
        log = self.copies[1].log
        for _ in range(ATTEMPTS):
            self.rng.shuffle(self.order)
            await self.repairs._repair(self.partition)
            if not log.damaged_ranges():
                return
        raise AssertionError(f"it stays damaged: {self.refused} {log.damaged_ranges()}")

    # ---------------------------------------------------------------------------------------------------------- the end

    def table_of(self, log: PartitionLog) -> Table:
        table: Table = {}
        for _, record in read_committed(log, 100_000):
            if record.value is None:
                table.pop(record.key, None)
            else:
                table[record.key] = record.value
        return table

    def check(self, when: str) -> None:
        for number, made in self.copies.items():
            log = made.log
            log.set_high_watermark(log.log_end_offset)
            if not self.open:
                assert log.last_stable_offset == log.log_end_offset, (number, when, "a transaction is open")
            found, expected = self.table_of(log), self.expected()
            assert found == expected, (number, when, found, expected)

    async def live_and_repair(self) -> None:
        self.live()
        while self.open:
            self.end_transaction()
        if self.ceases_to_be_compacted:
            self.cease_to_be_compacted()
        self.check("before")
        self.is_damaged = self.damage()
        if not self.is_damaged:
            return
        await self.repair()
        assert not self.refused, self.refused
        self.check("after the repair")
        self.copies[1].close()
        self.copies[1].open(self.now_ms)
        self.check("after a start")
        assert not self.copies[1].log.damaged_ranges(), "a start finds damage"
        if self.ceases_to_be_compacted:
            self.set_cleanup_policy("compact")
        for _ in range(3):
            self.append(bytes(encode_batch([(self.now_ms, b"end", b"%d" % self.written, ())])))
            self.records.append((b"end", b"%d" % self.written))
            self.roll([1, 2, 3])
            self.now_ms += 2_000_000
            for number in self.copies:
                while find_cleanable(self.copies[number].log, self.now_ms).cleanable_bytes:
                    self.clean(number)
            self.check("after all cleanings")

    def close(self) -> None:
        for made in self.copies.values():
            made.close()
