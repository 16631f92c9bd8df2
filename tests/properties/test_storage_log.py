"""Random work on a log against a list of batches: whatever is done, reads and look-ups agree with the list."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.storage.batches import NOW, Logs, batch, idempotent
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.storage.segments.log_config import LogConfig

SIZES = st.sampled_from((1, 90, 400, 2000, 100_000))


class LogMachine(RuleBasedStateMachine):
    """`batches`: (base offset, last offset, bytes, timestamps) of what the log must hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tidelog-log-"))
        self.batches: list[tuple[int, int, bytes, list[int]]] = []
        self.start = 0
        self.sequence = 0
        self.epoch = 0

    @initialize(
        segment_bytes=st.sampled_from((1200, 2500, 10_000)),
        interval=st.sampled_from((0, 100, 1000)),
        index_bytes=st.sampled_from((64, 4096)),
        flush_messages=st.sampled_from((1, 5, 2**63 - 1)),
    )
    def begin(self, segment_bytes: int, interval: int, index_bytes: int, flush_messages: int) -> None:
        config = LogConfig(
            segment_bytes=segment_bytes,
            index_interval_bytes=interval,
            segment_index_bytes=index_bytes,
            flush_messages=flush_messages,
            message_timestamp_after_max_ms=2**62,
            file_delete_delay_ms=0,
        )
        self.logs = Logs(self.folder, config)

    @property
    def log(self):
        return self.logs.log

    @property
    def end(self) -> int:
        return self.batches[-1][1] + 1 if self.batches else self.start

    def _appended(self, data: memoryview, timestamps: list[int]) -> None:
        [info] = self.logs.append(data, epoch=self.epoch)
        assert (info.first_offset, info.last_offset) == (self.end, self.end + len(timestamps) - 1)
        self.batches.append((info.first_offset, info.last_offset, bytes(data), timestamps))

    @rule(count=st.integers(1, 5), size=st.integers(0, 200), shift=st.integers(-50, 50))
    def append(self, count: int, size: int, shift: int) -> None:
        timestamp = NOW + self.end * 10 + shift
        self._appended(batch(count, value=bytes(size), timestamp=timestamp), [timestamp + i for i in range(count)])

    @rule(count=st.integers(1, 5))
    def append_idempotent(self, count: int) -> None:
        timestamp = NOW + self.end * 10
        data = idempotent(self.sequence, count, timestamp=timestamp, epoch=self.epoch)
        self._appended(data, [timestamp + i for i in range(count)])
        self.sequence += count
        repeated = idempotent(self.sequence - count, count, timestamp=timestamp, epoch=self.epoch)
        [info] = self.logs.append(repeated, epoch=self.epoch)
        assert info.duplicate

    @rule()
    def flush(self) -> None:
        self.log.flush()
        assert self.log.committable_offset == self.end

    @rule(checkpoint=st.booleans())
    def kill(self, checkpoint: bool) -> None:
        self.logs.directory.write_checkpoints()
        self.logs.kill_and_open()

    @rule()
    def restart(self) -> None:
        self.logs.close_and_open()

    @precondition(lambda self: self.batches)
    @rule(back=st.integers(1, 8))
    def truncate(self, back: int) -> None:
        base = self.batches[-min(back, len(self.batches))][0]
        if base < self.start:
            return
        self.log.truncate_to(base)
        self.batches = [entry for entry in self.batches if entry[1] < base]
        self.epoch += 1
        self.sequence = 0

    @precondition(lambda self: self.batches)
    @rule(share=st.floats(0, 1))
    def delete_records(self, share: float) -> None:
        self.start = max(self.start, self.start + int((self.end - self.start) * share))
        assert self.log.delete_records(self.start) == self.start
        self.logs.directory.maintain(NOW)

    @rule(size=SIZES)
    def read_on(self, size: int) -> None:
        offset = self.start
        parts: list[bytes] = []
        while offset < self.end:
            result = self.log.read(offset, size, self.end)
            assert result.next_offset > offset
            assert result.size_bytes <= size or len(list(iter_headers(result.regions[0]))) == 1
            parts.extend(bytes(region) for region in result.regions)
            offset = result.next_offset
        assert b"".join(parts) == b"".join(data for _, last, data, _ in self.batches if last >= self.start)

    @precondition(lambda self: self.end > self.start)
    @rule(share=st.floats(0, 1, exclude_max=True), upper=st.floats(0, 1), size=SIZES)
    def read_somewhere(self, share: float, upper: float, size: int) -> None:
        offset = self.start + int((self.end - self.start) * share)
        bound = offset + int((self.end - offset) * upper)
        result = self.log.read(offset, size, bound)
        held = [entry for entry in self.batches if entry[1] >= offset and entry[1] < bound]
        found = b"".join(bytes(region) for region in result.regions)
        assert b"".join(data for _, _, data, _ in held).startswith(found)
        assert bool(found) == bool(held)

    @rule(ahead=st.integers(-100, 1000))
    def look_up(self, ahead: int) -> None:
        timestamp = NOW + ahead * 3
        records = ((t, base + i) for base, _, _, times in self.batches for i, t in enumerate(times))
        wanted = next(((t, offset) for t, offset in records if t >= timestamp and offset >= self.start), None)
        found = self.log.offset_for_timestamp(timestamp)
        assert (found and found[:2]) == wanted

    @invariant()
    def offsets_agree(self) -> None:
        if hasattr(self, "logs"):
            assert (self.log.log_start_offset, self.log.log_end_offset) == (self.start, self.end)
            assert self.log.size_bytes >= sum(len(data) for _, last, data, _ in self.batches if last >= self.start)

    def teardown(self) -> None:
        if hasattr(self, "logs"):
            self.logs.close()
        shutil.rmtree(self.folder)


TestLog = LogMachine.TestCase
TestLog.settings = settings(stateful_step_count=25)
