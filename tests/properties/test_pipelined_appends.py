"""Batches that are appended together leave the log as they would one after the other.

Two logs are given the same batches, good and bad. One takes as many as it can together, and the others alone; the
other log takes each alone. Answers, refusals, bytes and what the logs remember must be the same.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.test_usual_appends import append, remembered, sent
from tests.unit.storage.batches import NOW, Logs, batch, idempotent
from tidelog.storage.log.pipelined_append import append_pipelined
from tidelog.storage.segments.append import NO_APPEND_TIME
from tidelog.storage.segments.log_config import LogConfig


def several(rng: random.Random, next_sequence: int) -> list[bytes]:
    """What one client sends without a pause: batches of one producer in sequence, or any."""
    kind = rng.choice(("plain", "sequence", "any"))
    count = rng.randint(1, 8)
    if kind == "any":
        return [sent(rng)[0] for _ in range(count)]
    batches = []
    for _ in range(count):
        records, value = rng.randint(1, 3), bytes(rng.choice((0, 5, 90, 700)))
        if rng.random() < 0.1:
            batches.append(sent(rng)[0])
        if kind == "plain":
            batches.append(bytes(batch(records, value=value, timestamp=NOW + rng.choice((0, 1, 7_000)))))
        else:
            batches.append(bytes(idempotent(next_sequence, records, value=value)))
            if rng.random() < 0.8:  # otherwise the next one repeats its sequence
                next_sequence = (next_sequence + records) % 2**31
    return batches


def append_together(logs: Logs, batches: list[bytes], epoch: int, now_ms: int) -> list[Any]:
    log, answers = logs.log, []
    views = [memoryview(bytearray(data)) for data in batches]
    while views:
        data, appended = append_pipelined(log, views, epoch, now_ms)
        assert len(data) == sum(size for _, size, *_ in appended)
        for (position, size, first, last, *_), view in zip(appended, views):
            assert data[position : position + size] == view
            answers.append((first, last, NO_APPEND_TIME, log.log_start_offset, False, bytes(view)))
        del views[: len(appended)]
        if views:
            answers.append(append(logs, bytes(views.pop(0)), epoch, now_ms, True))
    return answers


@pytest.mark.slow
@given(
    st.integers(0, 2**32),
    st.sampled_from(
        (
            {},
            {"cleanup_policy": frozenset({"compact"})},
            {"message_timestamp_type": "LogAppendTime"},
            {"segment_ms": 3_000},
        )
    ),
)
def test_together_and_one_after_the_other_agree(seed: int, settings: dict[str, Any]) -> None:
    rng = random.Random(seed)
    config = LogConfig(
        segment_bytes=5_000, index_interval_bytes=200, max_message_bytes=1_200,
        message_timestamp_after_max_ms=3_600_000, **settings,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tidelog-pipelined-") as folder:
        joined, single = Logs(Path(folder, "joined"), config), Logs(Path(folder, "single"), config)
        for number in range(15):
            if number == 10:  # something else cuts the file
                for logs in (joined, single):
                    logs.log.segments.active.file.truncate(logs.log.segments.active.size_bytes // 2)
            entry = single.log.producers.entries.get(7)
            next_sequence = rng.choice((0, 2**31 - 3)) if entry is None else entry.last_sequence + 1
            batches, epoch, now_ms = several(rng, next_sequence % 2**31), rng.choice((0, 0, 0, 1)), NOW + number
            answers = append_together(joined, batches, epoch, now_ms)
            assert answers == [append(single, data, epoch, now_ms, True) for data in batches]
            assert remembered(joined.log) == remembered(single.log)
        files = [
            {path.name: path.read_bytes() for path in sorted(logs.folder.glob("*.log"))} for logs in (joined, single)
        ]
        assert files[0] == files[1]


def test_batches_in_sequence_go_together_and_a_repeated_one_does_not(tmp_path: Path) -> None:
    logs = Logs(tmp_path, LogConfig())
    append(logs, bytes(idempotent(0)), 0, NOW, True)
    batches = [memoryview(bytearray(idempotent(number))) for number in (1, 2, 3, 3, 4)]
    _, appended = append_pipelined(logs.log, batches, 0, NOW)
    assert [each[2] for each in appended] == [1, 2, 3]
    assert append_pipelined(logs.log, batches[3:], 0, NOW) == (b"", [])
    assert logs.log.log_end_offset == 4


def test_batches_of_another_producer_or_epoch_go_alone(tmp_path: Path) -> None:
    logs = Logs(tmp_path, LogConfig())
    append(logs, bytes(idempotent(0)), 0, NOW, True)
    for other in ({"producer_id": 8}, {"epoch": 1}):
        batches = [memoryview(bytearray(idempotent(logs.log.log_end_offset + number))) for number in range(2)]
        batches.append(memoryview(bytearray(idempotent(logs.log.log_end_offset + 2, **other))))
        assert len(append_pipelined(logs.log, batches, 0, NOW)[1]) == 2


def test_producers_that_are_not_known_for_damage_go_the_general_way(tmp_path: Path) -> None:
    logs = Logs(tmp_path, LogConfig())
    append(logs, bytes(idempotent(0)), 0, NOW, True)
    logs.log.lacks_producers = True
    batches = [memoryview(bytearray(idempotent(number))) for number in (1, 2)]
    assert append_pipelined(logs.log, batches, 0, NOW) == (b"", [])
    assert len(append_pipelined(logs.log, [memoryview(bytearray(batch())) for _ in range(2)], 0, NOW)[1]) == 2


def test_a_failed_write_leaves_the_batches_as_they_were_sent(tmp_path: Path) -> None:
    logs = Logs(tmp_path, LogConfig())
    append(logs, bytes(batch()), 0, NOW, True)
    segment = logs.log.segments.active

    def full(data: Any, position: int) -> int:
        raise OSError(28, "no space left on device")

    segment.write_at, write_at = full, segment.write_at
    sent_batches = [bytes(batch(value=bytes((number,)))) for number in range(3)]
    batches = [memoryview(bytearray(data)) for data in sent_batches]
    assert append_pipelined(logs.log, batches, 0, NOW) == (b"", [])
    segment.write_at = write_at
    assert logs.log.log_end_offset == 1
    assert [info[:2] for info in (append(logs, bytes(each), 0, NOW, True) for each in batches)] == [
        (1, 1), (2, 2), (3, 3),
    ]  # fmt: skip


def test_records_that_wait_for_the_device_are_not_committed(tmp_path: Path) -> None:
    logs = Logs(tmp_path, LogConfig(flush_messages=3))
    append(logs, bytes(batch()), 0, NOW, True)
    batches = [memoryview(bytearray(batch())) for _ in range(4)]
    assert len(append_pipelined(logs.log, batches, 0, NOW)[1]) == 4
    assert logs.log.committable_offset == 1
    logs.log.flush()
    assert logs.log.committable_offset == 5
