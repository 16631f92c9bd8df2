"""A start finishes a cleaning's swap that a kill has cut short, and finds the cleaned segment damaged."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, read
from tests.unit.storage.cleaning import begin, contents
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import iter_records
from tidelog.storage.log.partition_log import PartitionLog


@pytest.mark.parametrize("bit", [1, 4])
@pytest.mark.parametrize("at", [*range(12), 16, 18, 24, 40, 60])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_damaged_swap_takes_no_segment_with_it_that_it_does_not_replace(
    logs: Callable[..., Logs], steps: int, at: int, bit: int
) -> None:
    """A start that finishes it removes what it replaces, and takes from it how far that reaches."""
    made = logs(
        segment_bytes=1500, index_interval_bytes=300, cleanup_policy=frozenset({"compact"}),
        min_cleanable_dirty_ratio=0.0,
    )  # fmt: skip
    for n in range(60):
        made.append(batch(1, key=b"k%d" % (n % 7), value=b"%03d" % n * 20, timestamp=NOW + n))
    before = contents(made.log)
    made.log.flush()
    made.directory.write_checkpoints()
    compaction = begin(made.log)
    while compaction._swap is None or compaction._swap._next < steps:
        compaction.run()
        assert compaction.advance()
    made.kill()
    [path] = made.folder.glob("*.log.swap")
    end = made.log.segments[1].base_offset
    data = bytearray(path.read_bytes())
    last = [position for position, _ in iter_headers(data)][-1]
    data[last + at] ^= 1 << bit
    path.write_bytes(data)
    log = made.open(machine_ran_on=True)
    assert contents_from(log, end) == [record for record in before if record[0] >= end]
    assert not made.files("*.swap")
    if steps == 1 and at not in (12, 13, 14, 15):  # nothing was replaced yet
        assert log.damaged_ranges() == []


def contents_from(log: PartitionLog, offset: int) -> list[tuple[int, bytes | None, bytes | None]]:
    found: list[tuple[int, bytes | None, bytes | None]] = []
    while offset < log.log_end_offset:
        result = read(log, offset, 100_000, log.log_end_offset)
        for region in result.regions:
            found += [(record.offset, record.key, record.value) for record in iter_records(region)]
        offset = result.next_offset
    return found
