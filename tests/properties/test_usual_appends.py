"""The short ways for the usual batches of clients and coordinators do nothing that the general way does not do.

Two logs are given the same batches, good and bad; one of them knows the general way alone. Answers, refusals, bytes
and what the logs remember must be the same.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.storage.batches import NOW, Logs, batch, marker
from tidelog.protocol.batches.record_batch import ATTRIBUTES_OFFSET, HEADER_SIZE, stamp, write_crc
from tidelog.protocol.errors import KafkaError
from tidelog.storage.log import partition_log
from tidelog.storage.log.partition_log import PartitionLog
from tidelog.storage.producers.refused_batches import sequenced_header
from tidelog.storage.producers.verification import TransactionAppend, Verification
from tidelog.storage.segments.append import admit, admit_usual
from tidelog.storage.segments.append_rules import AppendRules
from tidelog.storage.segments.inspection import NeedsInspection
from tidelog.storage.segments.log_config import LogConfig

LAST_DELTA_OFFSET = ATTRIBUTES_OFFSET + 2


def harm(rng: random.Random, data: bytearray) -> None:
    """Change some batches."""
    how = rng.choice(("byte", "body", "head", "head", "cut", "more")) if rng.random() < 0.4 else ""
    if how == "byte":
        data[rng.randrange(min(len(data), HEADER_SIZE + 8))] ^= 1 << rng.randrange(8)
    elif how in ("body", "head"):  # whatever it says now, with a checksum that agrees
        data[rng.randrange(ATTRIBUTES_OFFSET, len(data) if how == "body" else HEADER_SIZE)] ^= 1 << rng.randrange(8)
        write_crc(data, 0, len(data))
    elif how == "cut":
        del data[rng.randrange(len(data)) :]
    elif how == "more":
        data += data[: rng.randint(1, len(data))]


def ended(rng: random.Random) -> bytes:
    """The marker of a transaction."""
    data = bytearray(
        marker(
            abort=rng.random() < 0.5, producer_id=rng.choice((1, 2)), epoch=rng.choice((0, 0, 0, 1)),
            coordinator_epoch=rng.choice((0, 0, 1)), timestamp=NOW + rng.choice((0, 0, 20_000)),
        )
    )  # fmt: skip
    harm(rng, data)
    return bytes(data)


def sent(rng: random.Random) -> tuple[bytes, int, int]:
    """A batch, a leader epoch and the time. Drawn without Hypothesis, whose small examples are all alike."""
    producer: dict[str, Any] = {}
    if rng.random() < 0.5:
        producer = {
            "producer_id": rng.choice((1, 2)),
            "producer_epoch": rng.choice((0, 0, 0, 1)),
            "base_sequence": rng.choice((0, 0, 1, 2, 3, -1)),
            "transactional": rng.random() < 0.4,
        }
    data = bytearray(
        batch(
            rng.randint(1, 6),
            value=bytes(rng.choice((0, 5, 90, 700))),
            timestamp=NOW + rng.choice((-1, 0, 1, 7_000, 10**9)),
            compression=rng.choice((0, 0, 0, 1, 4)),
            **producer,
        )
    )
    harm(rng, data)
    return bytes(data), rng.choice((0, 0, 0, 1)), NOW + rng.choice((0, 0, 5_000))


def verified(logs: Logs, data: bytes, how: str, now_ms: int) -> TransactionAppend | None:
    """What the handler of a Produce request gives to the append: the present verification, another one, or none."""
    if how == "plain":
        return None
    if how == "marker":
        return TransactionAppend(transaction_version=2 if logs.log.log_end_offset % 2 else 0)
    header = sequenced_header(data)
    if header is None or how == "none":
        return TransactionAppend()
    producer = header.producer_id, header.producer_epoch, header.base_sequence
    try:
        verification = logs.log.producers.begin_verification(*producer, False, now_ms)
    except KafkaError:
        return TransactionAppend()
    return TransactionAppend(verification if how == "present" else Verification(*producer[1:], False, now_ms))


def append(logs: Logs, data: bytes, epoch: int, now_ms: int, from_client: bool, how: str = "plain") -> Any:
    try:
        info = logs.log.append_as_leader(
            memoryview(bytearray(data)), epoch, now_ms, from_client=from_client,
            transaction=verified(logs, data, how, now_ms),
        )  # fmt: skip
    except KafkaError as error:
        return error.code, error.message, error.record_errors
    except NeedsInspection:
        return NeedsInspection
    return (*info[:-1], None if info.written is None else bytes(info.written))


def remembered(log: PartitionLog) -> Any:
    segment = log.segments.active
    return (
        [
            (each.base_offset, each.next_offset, each.size_bytes, each.max_timestamp, each.offset_of_max_timestamp)
            for each in log.segments
        ],
        segment.offset_index.rows(),
        segment.time_index.rows(),
        list(segment.recent_offsets),
        list(segment.recent_positions),
        (
            segment.warm_from,
            segment.bytes_since_index_row,
            segment.first_batch_timestamp,
            segment.roll_above_timestamp,
            segment.is_full,
        ),
        {
            key: (e.epoch, e.batches, e.last_timestamp, e.transaction_first_offset)
            for key, e in log.producers.entries.items()
        },
        (log.producers.first_open_offset, log.producers.open_transaction_count, len(log.producers.verifications)),
        earlier_state(log),
        (log.log_end_offset, log.producers.end_offset, log.committable_offset, log.leader_epochs.latest),
    )


def earlier_state(log: PartitionLog) -> Any:
    """What a truncation of the last records would return to."""
    earlier = log.producers.earlier(log.log_end_offset - 2)
    if earlier is None:
        return None
    return earlier.end_offset, {key: repr(entry) for key, entry in earlier.entries.items()}


@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.sampled_from(
        (
            {},
            {"cleanup_policy": frozenset({"compact"})},
            {"flush_messages": 2},
            {"message_timestamp_type": "LogAppendTime"},
            {"segment_ms": 3_000},
        )
    ),
)
def test_the_short_way_and_the_general_way_agree(seed: int, from_client: bool, settings: dict[str, Any]) -> None:
    rng = random.Random(seed)
    config = LogConfig(
        segment_bytes=5_000, index_interval_bytes=200, segment_index_bytes=64, max_message_bytes=1_200,
        message_timestamp_after_max_ms=3_600_000, **settings,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tidelog-usual-") as folder:
        usual, general = Logs(Path(folder, "usual"), config), Logs(Path(folder, "general"), config)
        for number in range(40):
            if number == 30:  # something else cuts the file
                for logs in (usual, general):
                    logs.log.segments.active.file.truncate(logs.log.segments.active.size_bytes // 2)
            data, epoch, now_ms = sent(rng)
            how = rng.choice(("plain", "present", "present", "other", "none"))
            if rng.random() < 0.25:  # a transaction ends
                data, from_client_now, how = ended(rng), False, rng.choice(("plain", "marker", "marker", "marker"))
            else:
                from_client_now = from_client
            answer = append(usual, data, epoch, now_ms, from_client_now, how)
            with patch.object(partition_log, "append_usual", lambda *_: None):
                assert append(general, data, epoch, now_ms, from_client_now, how) == answer
            assert remembered(usual.log) == remembered(general.log)
        files = [
            {path.name: path.read_bytes() for path in sorted(logs.folder.glob("*.log"))} for logs in (usual, general)
        ]
        assert files[0] == files[1]


@pytest.mark.parametrize("abort", [False, True])
def test_markers_that_differ_in_one_bit_have_the_same_effect_on_both_ways(tmp_path: Path, abort: bool) -> None:
    """Each ends a transaction, or does not, as the general way says."""
    config = LogConfig(segment_bytes=2_000)
    usual, general = Logs(tmp_path / "usual", config), Logs(tmp_path / "general", config)
    aborted = 0
    for bit in [0, *range(8 * ATTRIBUTES_OFFSET, 8 * HEADER_SIZE)]:
        producer_id = 1_000 + bit
        opening = bytes(batch(producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True))
        ending = bytearray(marker(abort=abort, producer_id=producer_id))
        if bit:
            ending[bit // 8] ^= 1 << bit % 8
            write_crc(ending, 0, len(ending))
        for data, from_client, how in ((opening, True, "present"), (bytes(ending), False, "none")):
            answer = append(usual, data, 0, NOW, from_client, how)
            with patch.object(partition_log, "append_usual", lambda *_: None):
                assert append(general, data, 0, NOW, from_client, how) == answer
        for logs in (usual, general):
            logs.log.set_high_watermark(logs.log.log_end_offset)
        assert remembered(usual.log) == remembered(general.log), f"bit {bit}"
        aborted = len(usual.log.aborted_transactions(0, usual.log.log_end_offset))
        if not bit:  # the marker of this node
            assert usual.log.producers.open_transaction_count == 0
            assert aborted == abort
    assert (aborted > 50) == abort


def replicated(rng: random.Random, next_offset: int) -> bytes:
    """What a follower fetches: usually one batch at its log end."""
    data = bytearray()
    for _ in range(rng.choice((1, 1, 1, 1, 2))):
        piece = bytearray(sent(rng)[0]) or bytearray(1)
        if rng.random() < 0.1:
            piece = bytearray(ended(rng)) or bytearray(1)
        if len(piece) >= HEADER_SIZE:
            offset = next_offset + rng.choice((0, 0, 0, 0, 0, 0, -1, 1, 40))
            stamp(piece, 0, max(offset, 0), rng.choice((0, 0, 0, 0, 1, 5)))
            next_offset += max(read_last_delta(piece), 0) + 1
        data += piece
    return bytes(data)


def read_last_delta(piece: bytearray) -> int:
    return int.from_bytes(piece[LAST_DELTA_OFFSET : LAST_DELTA_OFFSET + 4], "big", signed=True)


def append_as_follower(logs: Logs, data: bytes, now_ms: int, epoch_max: int) -> Any:
    try:
        info = logs.log.append_as_follower(memoryview(bytearray(data)), now_ms, epoch_max=epoch_max)
    except KafkaError as error:
        return error.code, error.message
    return None if info is None else info[:-1]


@given(st.integers(0, 2**32), st.sampled_from(({}, {"cleanup_policy": frozenset({"compact"})}, {"flush_messages": 2})))
def test_the_short_way_and_the_general_way_of_a_follower_agree(seed: int, settings: dict[str, Any]) -> None:
    rng = random.Random(seed)
    config = LogConfig(segment_bytes=5_000, index_interval_bytes=200, segment_index_bytes=64, **settings)
    with tempfile.TemporaryDirectory(prefix="tidelog-usual-") as folder:
        usual, general = Logs(Path(folder, "usual"), config), Logs(Path(folder, "general"), config)
        for number in range(40):
            if number == 30:  # something else cuts the file
                for logs in (usual, general):
                    logs.log.segments.active.file.truncate(logs.log.segments.active.size_bytes // 2)
            data, now_ms = replicated(rng, usual.log.log_end_offset), NOW + rng.choice((0, 0, 5_000))
            epoch_max = rng.choice((1, 1, 1, 0))
            answer = append_as_follower(usual, data, now_ms, epoch_max)
            with patch.object(partition_log, "append_usual_as_follower", lambda *_: None):
                assert append_as_follower(general, data, now_ms, epoch_max) == answer
            assert remembered(usual.log) == remembered(general.log)
        files = [
            {path.name: path.read_bytes() for path in sorted(logs.folder.glob("*.log"))} for logs in (usual, general)
        ]
        assert files[0] == files[1]


@pytest.mark.parametrize("value_bytes", [0, 1, 63, 64, 90, 700])
@pytest.mark.parametrize("place", [-1, -2, HEADER_SIZE - 1, *range(HEADER_SIZE, HEADER_SIZE + 8)])
def test_a_single_record_is_checked_as_on_the_general_way(value_bytes: int, place: int) -> None:
    whole = bytearray(batch(1, value=bytes(value_bytes)))
    rules = AppendRules(LogConfig())
    for byte in range(256):
        data = bytearray(whole)
        data[min(place, len(data) - 1)] = byte
        if place == HEADER_SIZE - 1:  # the number of records, which the last offset confirms
            data[LAST_DELTA_OFFSET + 3] = max(byte - 1, 0)
        write_crc(data, 0, len(data))
        outcomes: list[Any] = []
        for take in (admit_usual, lambda data, now_ms, rules: admit(data, 0, 0, now_ms, rules, True)[1]):
            try:
                outcomes.append(bool(take(memoryview(bytearray(data)), NOW, rules)))
            except KafkaError as error:
                outcomes.append(error.code)
        assert outcomes[0] in (False, outcomes[1]), "it may leave a batch to the general way"
