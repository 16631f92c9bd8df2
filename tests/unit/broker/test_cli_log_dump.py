"""`tidelog log dump` shows what the files hold, says what does not fit, and changes nothing."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from tidelog.cli.main import main
from tidelog.protocol.batches.records import encode_batch
from tidelog.protocol.messages.coordinator_records import encode_key, encode_value
from tidelog.protocol.messages.group_records import OffsetCommitKey, OffsetCommitValue
from tidelog.protocol.messages.metadata_records import TopicRecord, frame
from tidelog.storage.files.checkpoints import encode_leader_epochs, encode_offsets, encode_partition_metadata
from tidelog.storage.producers.producer_snapshots import encode_snapshot
from tidelog.storage.producers.producer_state import ProducerEntry

SEGMENT = "00000000000000000040.log"


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    directory = tmp_path / "flights-0"
    directory.mkdir()
    first = encode_batch([(1000, b"DL", b"one", (("h", b"\xff"),)), (1001, None, None, ())], base_offset=40)
    second = encode_batch(
        [(1002, b"UA", b"\xff\x00", ())], base_offset=42, producer_id=7, producer_epoch=0, base_sequence=0
    )
    path = directory / SEGMENT
    path.write_bytes(bytes(first) + bytes(second))
    return path


def rows(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, list[dict]]:
    status = main(["log", "dump", "--json", *map(str, words)])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_batches_of_a_segment(segment: Path, capsys: pytest.CaptureFixture[str]):
    status, (first, second) = rows(capsys, segment)
    assert status == 0
    assert (first["base_offset"], first["last_offset"], first["records"], first["crc_valid"]) == (40, 41, 2, True)
    assert second["batch"] == first["size_bytes"]
    assert second["producer_id"] == 7
    assert "producer_id" not in first


def test_records_of_a_segment(segment: Path, capsys: pytest.CaptureFixture[str]):
    status, shown = rows(capsys, "--records", segment)
    records = [row for row in shown if "offset" in row]
    assert status == 0
    assert [(row["offset"], row["key"]) for row in records] == [(40, "DL"), (41, None), (42, "UA")]
    assert records[0]["headers"] == [{"name": "h", "value_base64": "/w=="}]
    assert records[2]["value_base64"] == "/wA="


def test_a_torn_tail_is_said_and_fails(segment: Path, capsys: pytest.CaptureFixture[str]):
    segment.write_bytes(segment.read_bytes()[:-3])
    status, shown = rows(capsys, segment)
    assert status == 1
    assert "no whole batch" in shown[-1]["error"]


def test_a_flipped_bit_is_said_and_its_records_are_not_shown(segment: Path, capsys: pytest.CaptureFixture[str]):
    data = bytearray(segment.read_bytes())
    data[70] ^= 1
    segment.write_bytes(data)
    status, shown = rows(capsys, "--records", segment)
    assert status == 1
    assert [row["crc_valid"] for row in shown if "batch" in row] == [False, True]
    assert [row["offset"] for row in shown if "offset" in row] == [42]


def test_text_has_a_line_for_each_row(segment: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["log", "dump", str(segment)]) == 0
    title, first, second = capsys.readouterr().out.splitlines()
    assert title == str(segment)
    assert "base_offset: 40" in first
    assert "crc_valid: yes" in second


def test_indexes_up_to_their_unused_end(segment: Path, capsys: pytest.CaptureFixture[str]):
    index = segment.with_suffix(".index")
    index.write_bytes(struct.pack(">iiii", 0, 0, 2, 90) + bytes(80))
    times = segment.with_suffix(".timeindex")
    times.write_bytes(struct.pack(">qi", 1001, 1))
    _, shown = rows(capsys, index, times)
    assert [(row["offset"], row.get("position")) for row in shown] == [(40, 0), (42, 90), (41, None)]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("00000000000000000040.index", struct.pack(">iiii", 2, 90, 1, 180), "entries must grow"),
        ("00000000000000000040.index", struct.pack(">ii", 2, 90) + b"odd", "11 bytes are no multiple of 8"),
        ("00000000000000000040.timeindex", struct.pack(">qiqi", 1001, 1, 1000, 2), "entries must not go back"),
        ("00000000000000000040.timeindex", struct.pack(">qi", 1001, 1) + b"odd", "15 bytes are no multiple of 12"),
    ],
)
def test_a_damaged_index_is_said(name: str, data: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / name).write_bytes(data)
    status, shown = rows(capsys, tmp_path)
    assert (status, shown[-1]["error"]) == (1, said)


def test_every_file_of_a_directory(segment: Path, capsys: pytest.CaptureFixture[str]):
    directory = segment.parent
    (directory / "leader-epoch-checkpoint").write_bytes(encode_leader_epochs([(0, 0), (3, 41)]))
    (directory / "partition.metadata").write_bytes(encode_partition_metadata(bytes(range(16))))
    (directory / "00000000000000000043.snapshot").write_bytes(encode_snapshot([ProducerEntry(7, 0)]))
    (directory / "notes.txt").write_text("not ours")
    (directory.parent / "recovery-point-offset-checkpoint").write_bytes(encode_offsets({("flights", 0): 43}))
    status, shown = rows(capsys, directory.parent)
    assert status == 0
    assert {Path(row["file"]).name for row in shown} == {
        SEGMENT,
        "leader-epoch-checkpoint",
        "partition.metadata",
        "00000000000000000043.snapshot",
        "recovery-point-offset-checkpoint",
    }
    assert {"leader_epoch": 3, "start_offset": 41}.items() <= shown[-2].items()


def test_a_damaged_snapshot_and_checkpoint_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "00000000000000000043.snapshot").write_bytes(b"\0\1damaged")
    (tmp_path / "leader-epoch-checkpoint").write_text("0\n7\n1 1\n")
    status, shown = rows(capsys, tmp_path)
    assert status == 1
    assert all("error" in row for row in shown)
    assert len(shown) == 2


def test_records_of_internal_topics_are_decoded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    offsets, metadata = tmp_path / "__consumer_offsets-3", tmp_path / "__cluster_metadata-0"
    for directory in (offsets, metadata):
        directory.mkdir()
    key = encode_key(OffsetCommitKey(group="delays", topic="flights", partition=5))
    value = encode_value(OffsetCommitValue(offset=99), 1)
    (offsets / SEGMENT).write_bytes(bytes(encode_batch([(1, key, value, ()), (1, key, None, ()), (1, b"?", b"", ())])))
    record = frame(TopicRecord(name="flights", topic_id=bytes(range(16))), 0)
    (metadata / SEGMENT).write_bytes(bytes(encode_batch([(1, None, record, ())])))
    status, shown = rows(capsys, "--records", offsets, metadata)
    assert "delays" in shown[1]["key"]
    assert "99" in shown[1]["value"]
    assert shown[2]["value"] is None
    assert "error" in shown[3]
    assert "flights" in shown[5]["record"]
    assert status == 1


def test_an_unknown_or_missing_file_and_an_empty_directory_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    unknown = tmp_path / "notes.txt"
    unknown.write_text("hello")
    assert main(["log", "dump", str(unknown)]) == 1
    assert capsys.readouterr().err == f"tidelog: {unknown}: not a file of a log directory that can be shown\n"
    assert main(["log", "dump", str(tmp_path / "nothing.log")]) == 1
    assert capsys.readouterr().err == f"tidelog: {tmp_path}/nothing.log: No such file or directory\n"
    (tmp_path / "empty").mkdir()
    assert main(["log", "dump", f"{tmp_path}/empty/"]) == 1
    assert capsys.readouterr().err == f"tidelog: {tmp_path}/empty/: it contains no file of a log directory\n"
