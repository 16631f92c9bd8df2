"""Records that hold whole batches, where the header of the batch around them is destroyed: payload is never served."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.storage.batches import NOW, Logs, batch, offsets_of, read, records_of
from tests.unit.storage.test_damage import copy_of, repair, served
from tidelog.protocol.batches.record_batch import HEADER, HEADER_SIZE, iter_headers
from tidelog.protocol.batches.records import encode_batch, iter_records
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.log.repair import CopyRefused
from tidelog.storage.log.saved_rows import save_index_rows
from tidelog.storage.log.scrub import Scrub

MakeLogs = Callable[..., Logs]
BEFORE, COUNT = 5, 6
FIRST, END = 2 * BEFORE, 2 * BEFORE + COUNT
"""Of the batch whose records hold batches."""

PAYLOAD: dict[str, list[tuple[int, int]]] = {
    "one": [(FIRST + 2, 1)],
    "of the same first offset": [(FIRST, 1)],
    "two that follow each other": [(FIRST + 1, 2), (FIRST + 3, 1)],
    "up to its last offset": [(FIRST + 2, COUNT - 2)],
    "behind its last offset": [(END + 1, 3)],
}


def forged(payload: str) -> bytes:
    return b"".join(bytes(batch(n, value=b"FORGED", base_offset=at, leader_epoch=0)) for at, n in PAYLOAD[payload])


def destroy(made: Logs, position: int, size_bytes: int = HEADER_SIZE) -> None:
    path = made.folder / made.files("*.log")[0]
    data = bytearray(path.read_bytes())
    data[position : position + size_bytes] = bytes(size_bytes)
    path.write_bytes(data)


def position_in(whole: bytes, number: int) -> int:
    return [position for position, _ in iter_headers(whole)][number]


def make(logs: MakeLogs, outer: memoryview, *, is_last: bool = False) -> tuple[Logs, dict[int, bytes], bytes]:
    made = logs()
    made.append(*[batch(2) for _ in range(BEFORE)])
    made.append(outer)
    if not is_last:
        made.append(*[batch(2) for _ in range(3)])
    made.directory.write_checkpoints()
    path = made.folder / made.files("*.log")[0]
    return made, copy_of(made), path.read_bytes()


def look(made: Logs, ending: str) -> PartitionLog:
    if ending == "while it is open":
        for _ in range(2):
            made.log.segments.age_trust()
    elif ending == "after a clean stop":
        made.close_and_open()
    else:
        made.kill()
        made.open(machine_ran_on=True)
    for segment in list(made.log.segments):
        scrub = Scrub(made.log, segment)
        scrub.run(10**9)
        scrub.finish()
    return made.log


def repair_all(log: PartitionLog, copy: dict[int, bytes]) -> None:
    """As `broker/replicas/repairs.py` does it: what is refused is asked for again, in the range damaged then."""
    for _ in range(5):
        if not log.damaged_ranges():
            return
        try:
            repair(log, copy)
        except CopyRefused:
            continue
    assert not log.damaged_ranges()


@pytest.mark.parametrize(
    ("is_last", "ending"),
    [
        (False, "while it is open"),
        (False, "after a clean stop"),
        (False, "after a kill"),
        (True, "while it is open"),
        (True, "after a clean stop"),
    ],
)
@pytest.mark.parametrize("payload", PAYLOAD)
def test_payload_is_not_taken_for_batches_where_the_header_around_it_is_destroyed(
    logs: MakeLogs, payload: str, is_last: bool, ending: str
) -> None:
    made, copy, whole = make(logs, batch(COUNT, value=forged(payload)), is_last=is_last)
    end = made.log.log_end_offset
    destroy(made, position_in(whole, BEFORE))
    log = look(made, ending)
    assert log.log_end_offset == end
    assert list(served(log)) == [each for each in range(end) if not FIRST <= each < END]
    repair_all(log, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole
    assert offsets_of(records_of(log)) == list(range(end))
    assert not any(record.value == b"FORGED" for record in records_of(log))


@pytest.mark.parametrize("payload", PAYLOAD)
def test_payload_is_not_taken_for_batches_where_the_first_records_are_destroyed_too(
    logs: MakeLogs, payload: str
) -> None:
    """Nothing says then where the batch ends; those behind it go on to the end of the segment, payload does not."""
    made, copy, whole = make(logs, batch(COUNT, value=forged(payload)))
    destroy(made, position_in(whole, BEFORE), HEADER_SIZE + 20)
    log = look(made, "while it is open")
    assert list(served(log)) == [each for each in range(END + 6) if not FIRST <= each < END]
    repair_all(log, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole


def flush_with_its_end() -> memoryview:
    """The value of the last record's last header is the end of the batch: what it holds leads to the next batch."""
    inner = bytes(batch(COUNT - 2, value=b"FORGED", base_offset=FIRST + 2, leader_epoch=0))
    records = [(NOW, None, b"value", ())] * (COUNT - 1)
    return memoryview(encode_batch([*records, (NOW, None, b"value", (("h", inner),))]))


def test_payload_that_ends_with_its_batch_is_none_of_the_log(logs: MakeLogs) -> None:
    made, copy, whole = make(logs, flush_with_its_end())
    destroy(made, position_in(whole, BEFORE))
    log = look(made, "while it is open")
    assert list(served(log)) == [each for each in range(END + 6) if not FIRST <= each < END]
    repair_all(log, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole


def test_a_copy_that_reaches_beyond_the_range_takes_the_place_of_what_was_taken_for_batches(logs: MakeLogs) -> None:
    """Header and first record are destroyed, and what the last record holds leads to the next batch."""
    made, copy, whole = make(logs, flush_with_its_end())
    destroy(made, position_in(whole, BEFORE), HEADER_SIZE + 8)
    log = look(made, "while it is open")
    [(_, before)] = log.damaged_ranges()
    assert (before.first_offset, before.end_offset) == (FIRST, FIRST + 2), "nothing here tells it from a batch"
    with pytest.raises(CopyRefused, match="reaches beyond"):
        repair(log, copy)
    [(_, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (FIRST, END)
    assert list(served(log)) == [each for each in range(END + 6) if not FIRST <= each < END]
    repair(log, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole
    assert offsets_of(records_of(log)) == list(range(END + 6))


def test_a_copy_that_begins_before_the_range_widens_it_to_the_front(logs: MakeLogs) -> None:
    made, copy, whole = make(logs, batch(COUNT))
    path = made.folder / made.files("*.log")[0]
    position = position_in(whole, BEFORE)
    size = position_in(whole, BEFORE + 1) - position
    small = bytes(batch(2, base_offset=FIRST, leader_epoch=0))  # whole, and not what the other replicas have
    data = bytearray(whole)
    data[position : position + size] = small + bytes(size - len(small))
    path.write_bytes(data)
    log = look(made, "while it is open")
    [(segment, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (FIRST + 2, END)
    with pytest.raises(CopyRefused, match="reaches beyond"):
        log.repair_of(segment, damaged).accept(memoryview(copy[FIRST]))
    [(_, damaged)] = log.damaged_ranges()
    assert (damaged.position, damaged.first_offset, damaged.end_offset) == (position, FIRST, END)
    repair(log, copy)
    assert path.read_bytes() == whole


def test_whole_batches_between_two_destroyed_headers_are_served(logs: MakeLogs) -> None:
    """The records of the first say where it ends, though what follows leads to no end of the segment."""
    made, copy, whole = make(logs, batch(COUNT))
    destroy(made, position_in(whole, BEFORE - 2))
    destroy(made, position_in(whole, BEFORE))
    log = look(made, "after a clean stop")
    hidden = {FIRST - 4, FIRST - 3, *range(FIRST, END)}
    assert list(served(log)) == [each for each in range(END + 6) if each not in hidden]
    repair_all(log, copy)
    assert (made.folder / made.files("*.log")[0]).read_bytes() == whole


def test_what_has_come_of_a_range_is_used_where_no_replica_has_the_rest(logs: MakeLogs) -> None:
    made, copy, whole = make(logs, batch(COUNT))
    destroy(made, 0, position_in(whole, BEFORE + 1))
    log = look(made, "while it is open")
    [(segment, damaged)] = log.damaged_ranges()
    assert (damaged.first_offset, damaged.end_offset) == (0, END)
    work = log.repair_of(segment, damaged)
    assert work.finish_part() is None, "nothing has come"
    work.accept(memoryview(copy[0] + copy[2]))
    check = work.finish_part()
    assert check is not None
    check.run()
    assert log.finish_repair(check)
    [(_, left)] = log.damaged_ranges()
    assert (left.first_offset, left.end_offset) == (4, END)
    assert list(served(log))[:4] == [0, 1, 2, 3]


def test_payload_is_not_served_from_a_compacted_topic(logs: MakeLogs) -> None:
    made = logs(cleanup_policy=frozenset({"compact"}))
    made.append(*[batch(2, key=b"k%d" % n) for n in range(BEFORE)])
    made.append(batch(COUNT, key=b"k", value=forged("one")))
    made.append(batch(2, key=b"last"))
    path = made.folder / made.files("*.log")[0]
    destroy(made, position_in(path.read_bytes(), BEFORE))
    log = look(made, "while it is open")
    values = [
        record.value
        for offset in served(log)
        for region in read(log, offset, 1, log.log_end_offset).regions
        for record in iter_records(region)
    ]
    assert b"FORGED" not in values


def test_payload_at_the_end_of_the_last_batch_is_not_the_end_of_the_segment(logs: MakeLogs) -> None:
    """The last byte of a batch is a zero. With zeros for the end, what is whole before this batch was not served."""
    made = logs()
    made.append(*[batch(2) for _ in range(BEFORE + 5)])
    made.append(batch(2, value=bytes(batch(1, value=b"FORGED", base_offset=FIRST + 11, leader_epoch=0))))
    made.directory.write_checkpoints()
    for number in (BEFORE, BEFORE + 5):
        destroy(made, number * len(batch(2)), HEADER_SIZE + 20)
    log = look(made, "while it is open")
    assert list(served(log)) == [*range(FIRST), *range(FIRST + 2, FIRST + 10)]


@pytest.mark.parametrize("ending", ["while it is open", "after a clean stop"])
def test_headers_that_claim_large_batches_hide_no_batch_that_the_index_names(logs: MakeLogs, ending: str) -> None:
    """The CRCs of what a record's headers claim to be exhausted the search: the rest of the segment was refused."""
    made = logs()
    made.append(*[batch(2) for _ in range(BEFORE)])
    claim = HEADER.pack(FIRST + 20, 1_000_000, 0, 2, 0, 0, 0, NOW, NOW, -1, -1, -1, 1)
    made.append(memoryview(encode_batch([(NOW, None, bytes(100), [("h", claim)] * 500)])))
    end = made.log.log_end_offset
    made.append(*[batch(1, value=bytes(20_000)) for _ in range(100)])
    whole = (made.folder / made.files("*.log")[0]).read_bytes()
    destroy(made, position_in(whole, BEFORE), 4096)
    log = look(made, ending)
    assert list(served(log)) == [*range(FIRST), *range(end, end + 100)]


@pytest.mark.parametrize("payload", PAYLOAD)
def test_payload_is_not_served_after_a_kill_where_zeros_follow_the_last_batch(logs: MakeLogs, payload: str) -> None:
    """Nothing but the index rows shows where the log's batches go on, and a kill took these from memory."""
    made = logs(preallocate=True, segment_bytes=200_000)
    made.append(*[batch(2) for _ in range(BEFORE)])
    made.append(batch(COUNT, value=forged(payload)))
    made.append(*[batch(2, value=bytes(3000)) for _ in range(3)])
    for _ in save_index_rows(made.directory.logs):
        pass
    made.directory.write_checkpoints()
    whole = (made.folder / made.files("*.log")[0]).read_bytes()[: made.log.segments.active.size_bytes]
    destroy(made, position_in(whole, BEFORE), HEADER_SIZE + 20)
    log = look(made, "after a kill")
    assert list(served(log)) == [each for each in range(END + 6) if not FIRST <= each < END]
