"""Memory runs out at some step of an append: no two batches have the same offsets, and no acknowledged one is lost."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, idempotent, marker, offsets_of, records_of
from tidelog.protocol.batches.record_batch import stamp
from tidelog.storage.log import usual_append
from tidelog.storage.log.partition_log import CorruptLog
from tidelog.storage.log.pipelined_append import append_pipelined
from tidelog.storage.producers.verification import TransactionAppend
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.segment import Segment

testcapi: Any = pytest.importorskip("_testcapi", reason="this CPython has no test modules")

CONFIG = LogConfig(index_interval_bytes=150)
VALUE = b"v" * 40
Prepare = Callable[[Logs], Callable[[], object]]


def next_sequence(logs: Logs) -> int:
    entry = logs.log.producers.entries.get(7)
    return entry.batches[-1][1] + 1 if entry is not None else 0


def sent(logs: Logs) -> Callable[[], object]:
    data = batch(value=VALUE, timestamp=NOW + logs.log.log_end_offset)  # the latest one in its segment
    return lambda: logs.log.append_as_leader(data, 0, NOW)


def sent_with_sequence(logs: Logs) -> Callable[[], object]:
    data = idempotent(next_sequence(logs), value=VALUE)
    return lambda: logs.log.append_as_leader(data, 0, NOW)


def sent_first(logs: Logs) -> Callable[[], object]:
    data = idempotent(0, producer_id=100 + logs.log.log_end_offset, value=VALUE)
    return lambda: logs.log.append_as_leader(data, 0, NOW)


def fetched(logs: Logs) -> Callable[[], object]:
    data = idempotent(next_sequence(logs), value=VALUE)
    stamp(data, 0, logs.log.log_end_offset, 0)
    return lambda: logs.log.append_as_follower(data, NOW)


def pipelined(logs: Logs) -> Callable[[], object]:
    sequence = next_sequence(logs)
    batches = [idempotent(sequence + place, value=VALUE) for place in range(2)]
    return lambda: append_pipelined(logs.log, batches, 0, NOW)


def aborted(logs: Logs) -> Callable[[], object]:
    """The marker of a transaction that has one record."""
    producer_id = 100 + logs.log.log_end_offset
    data = idempotent(0, producer_id=producer_id, transactional=True)
    logs.log.append_as_leader(data, 0, NOW, from_client=False)
    end = marker(abort=True, producer_id=producer_id)
    return lambda: logs.log.append_as_leader(end, 0, NOW, from_client=False, transaction=TransactionAppend())


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Logs]:
    logs = Logs(tmp_path, CONFIG)
    yield logs
    testcapi.remove_mem_hooks()
    logs.close()


def kill_and_open(logs: Logs) -> None:
    ended = logs.log
    logs.kill_and_open()
    ended.segments.release()


def state(logs: Logs) -> tuple[object, ...]:
    log, segment = logs.log, logs.log.segments.active
    entries = log.producers.entries.items()
    producers = {key: (entry.epoch, list(entry.batches), entry.transaction_first_offset) for key, entry in entries}
    aborts = log.aborted_transactions(0, log.log_end_offset)
    rows = segment.offset_index.rows(), segment.time_index.rows(), list(segment.offset_index.rows_in_memory())
    sizes = segment.size_bytes, Path(segment.path).stat().st_size, segment.next_offset
    return log.log_end_offset, producers, dict(log.producers.ongoing), aborts, rows, sizes, segment.max_timestamp


def append_without(append: Callable[[], object], step: int, lacking: int) -> None:
    """`lacking` allocations fail, from number `step` on."""
    testcapi.set_nomemory(step, step + lacking)
    try:
        append()
    except MemoryError:
        pass
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
    finally:
        testcapi.remove_mem_hooks()


@pytest.mark.parametrize("prepare", [sent, sent_with_sequence, sent_first, fetched, pipelined, aborted])
@pytest.mark.parametrize("lacking", [1, 12])
def test_an_append_is_whole_or_leaves_nothing_or_its_log_is_not_used_any_more(
    logs: Logs, prepare: Prepare, lacking: int
) -> None:
    unusable = 0
    for step in range(50):
        prepare(logs)()
        append = prepare(logs)
        before, records = state(logs), records_of(logs.log)
        append_without(append, step, lacking)
        if logs.log.failure is not None:
            unusable += 1
            with pytest.raises(CorruptLog):
                sent(logs)()
            kill_and_open(logs)
        elif logs.log.log_end_offset == before[0]:
            assert state(logs) == before
        prepare(logs)()
        present = records_of(logs.log)
        assert present[: len(records)] == records
        offsets = [record.offset for record in present]
        assert offsets == sorted(set(offsets))
        assert not logs.log.damaged_ranges()
    present = records_of(logs.log)
    kill_and_open(logs)
    assert records_of(logs.log) == present
    assert not unusable or lacking > 1


@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_log_that_is_not_used_any_more_begins_no_segment(
    logs: Logs, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """The new segment would begin before the end of the batch that could not be taken back."""
    sent(logs)()
    segment = logs.log.segments.active
    written = segment.append_one

    def append_one(self: Segment, *values: Any) -> None:
        written(*values)
        raise MemoryError

    def take_back(*values: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "append_one", append_one)
        patch.setattr(usual_append, "take_back", take_back)
        with pytest.raises(MemoryError):
            sent(logs)()
    for timestamp in (NOW, 2 * NOW):  # the second one is of another segment
        data = batch(timestamp=timestamp)
        with pytest.raises(CorruptLog):
            logs.log.append_as_leader(data, 0, timestamp)
    assert logs.log.segments.active is segment
    if end == "close":
        logs.close_and_open()
    else:
        kill_and_open(logs)
    assert not logs.log.damaged_ranges()
    assert offsets_of(records_of(logs.log)) == [0, 1]
