"""Kafka's own dump tool reads every file a Tidelog node writes, and finds in it what was written."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.compatibility.conftest import OPTIONS
from tests.compatibility.filling import CODECS, GROUP, Filling, fill, read_back
from tidelog.bench import peers
from tidelog.testing.processes import TidelogProcess

pytestmark = pytest.mark.usefixtures("need_java")

DUMP = "org.apache.kafka.tools.DumpLogSegments"
# What the tool prints, on either stream, when something is wrong with a file.
COMPLAINTS = re.compile(
    r"Mismatches in|Non-consecutive offsets|timestamp mismatch|out of order timestamp|not found in the log"
    r"|invalid bytes at the end|isvalid: false|Error at |Ignoring unknown file|Exception|corrupt",
    re.IGNORECASE,
)
# Not a complaint: 4.3.1 says this of every segment that does not start at 0, Kafka's own too.
OPENING = re.compile(r"^Non-consecutive offsets in (\S+)\n  -1 is followed by (\d+)\n", re.MULTILINE)


def dump(files: Iterable[Path], *flags: str) -> str:
    """The tool's output for these files; it must exit with 0 and complain of nothing."""
    chosen = sorted(files)
    assert chosen, "no files to dump"
    done = peers.java(DUMP, *flags, "--files", ",".join(map(str, chosen)))
    assert done.returncode == 0, done.stderr
    errors = OPENING.sub(lambda found: "" if Path(found[1]).stem == found[2].zfill(20) else found[0], done.stderr)
    assert errors.strip() == ""
    assert COMPLAINTS.search(done.stdout) is None, COMPLAINTS.search(done.stdout)
    for file in chosen:
        assert f"Dumping {file}" in done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Filling]]:
    """The data directory of a node that was filled, killed, started again, and stopped."""
    node = TidelogProcess(tmp_path_factory.mktemp("dumped"), options=OPTIONS)
    with node:
        filling = fill(node.bootstrap_servers)
        node.kill()
        node.start()
        assert read_back(node.bootstrap_servers, filling) == filling.records
    assert node.exit_code == 0, node.output_tail()
    yield node.data_directory, filling
    shutil.rmtree(node.directory)


def logs(data: Path, pattern: str) -> list[Path]:
    return [file for file in data.glob(pattern) if file.stat().st_size]


def test_every_record_of_every_codec_is_read(written: tuple[Path, Filling]) -> None:
    data, filling = written
    output = dump(logs(data, "filled-*/*.log"), "--deep-iteration")
    assert output.count("| offset: ") == sum(map(len, filling.records.values()))
    assert set(re.findall(r"compresscodec: (\w+)", output)) == {*CODECS}
    counts = map(int, re.findall(r" count: (\d+) ", output))
    assert sum(counts) == sum(map(len, filling.records.values()))
    assert "isvalid: true" in output


def test_keys_and_values_are_what_was_sent(written: tuple[Path, Filling]) -> None:
    data, filling = written
    for codec in CODECS:
        output = dump(logs(data, f"filled-{codec}-0/*.log"), "--print-data-log")
        keys = re.findall(r"^\| offset: (\d+) .* key: (\S+)", output, re.MULTILINE)
        records = filling.records[f"filled-{codec}", 0]
        assert [(int(offset), key.encode()) for offset, key in keys] == [
            (offset, record[0]) for offset, record in enumerate(records)
        ]


@pytest.mark.parametrize("flag", ["--index-sanity-check", "--verify-index-only"])
def test_every_index_is_sane_and_agrees_with_its_log(written: tuple[Path, Filling], flag: str) -> None:
    data, _ = written
    files = list(data.glob("*/*.index")) + list(data.glob("*/*.timeindex"))
    assert len([file for file in files if file.stat().st_size]) > 20
    output = dump(files, flag)
    if flag == "--index-sanity-check":
        judged = re.findall(r"^(\S+)(?: passed sanity check\.| is empty\.)$", output, re.MULTILINE)
        assert sorted(judged) == sorted(map(str, files))


def test_the_complaints_are_noticed(written: tuple[Path, Filling], tmp_path: Path) -> None:
    """Plants a wrong index entry: the check above must not be blind."""
    data, _ = written
    source = max(data.glob("filled-none-0/*.index"), key=lambda file: file.stat().st_size)
    for suffix in (".log", ".index", ".timeindex"):
        shutil.copy(source.with_suffix(suffix), tmp_path)
    index = tmp_path / source.name
    spoiled = bytearray(index.read_bytes())
    relative, position = struct.unpack_from(">ii", spoiled, 8)
    struct.pack_into(">ii", spoiled, 8, relative + 1, position)
    index.write_bytes(spoiled)
    with pytest.raises(AssertionError):
        dump([index], "--verify-index-only")


def test_producer_snapshots_name_the_last_sequence_of_each_partition(written: tuple[Path, Filling]) -> None:
    data, filling = written
    newest = {}
    for file in sorted(data.glob("filled-*/*.snapshot")):
        newest[file.parent.name] = file
    assert len(newest) == len(filling.records)
    output = dump(newest.values())
    for (topic, partition), records in filling.records.items():
        file = newest[f"{topic}-{partition}"]
        assert int(file.stem) == len(records)
        section = output.split(f"Dumping {file}\n", 1)[1].split("Dumping ", 1)[0]
        assert re.search(
            rf"producerEpoch: 0 .*lastSequence: {len(records) - 1} lastOffset: {len(records) - 1} ", section
        )


def test_the_offsets_decoder_reads_the_group(written: tuple[Path, Filling]) -> None:
    data, filling = written
    output = dump(logs(data, "__consumer_offsets-*/*.log"), "--offsets-decoder")
    commits = re.findall(
        r'key: \{"type":"1","data":\{"group":"([^"]+)","topic":"([^"]+)","partition":(\d+)\}\}'
        r' payload: \{"version":"\d","data":\{"offset":(\d+),',
        output,
    )
    found = {(topic, int(index)): int(offset) for group, topic, index, offset in commits if group == GROUP}
    assert found == {where: offset for where, (offset, _) in filling.committed.items()}
    members = re.findall(r'key: \{"type":"2","data":\{"group":"([^"]+)"\}\} payload: \{"version":"3"', output)
    assert GROUP in members


def test_the_metadata_decoder_reads_the_cluster(written: tuple[Path, Filling]) -> None:
    data, filling = written
    files = logs(data, "__cluster_metadata-0/*.log") + logs(data, "__cluster_metadata-0/*.checkpoint")
    output = dump(files + logs(data, "*.checkpoint"), "--cluster-metadata-decoder")
    topics = set(re.findall(r'"type":"TOPIC_RECORD","version":0,"data":\{"name":"([^"]+)"', output))
    assert topics == {topic for topic, _ in filling.records} | {"__consumer_offsets"}
    assert output.count('"type":"PARTITION_RECORD"') == len(filling.records) + 4
    assert "LeaderChange: " in output
    for kind in ("REGISTER_BROKER_RECORD", "FEATURE_LEVEL_RECORD", "PRODUCER_IDS_RECORD"):
        assert f'"type":"{kind}"' in output


def test_the_small_files_have_kafkas_form(written: tuple[Path, Filling]) -> None:
    data, filling = written
    properties = dict(line.split("=", 1) for line in (data / "meta.properties").read_text().splitlines() if "=" in line)
    assert properties.keys() == {"version", "cluster.id", "node.id", "directory.id"}
    assert properties["version"] == "1"
    assert (data / ".kafka_cleanshutdown").exists()
    for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
        version, count, *lines = (data / name).read_text().splitlines()
        assert version == "0"
        assert int(count) == len(lines)
        points = {(topic, int(index)): int(offset) for topic, index, offset in (line.rsplit(" ", 2) for line in lines)}
        for where, records in filling.records.items():
            assert points[where] == len(records), name
    for topic, index in filling.records:
        home = data / f"{topic}-{index}"
        topic_id = (home / "partition.metadata").read_text()
        assert re.fullmatch(r"version: 0\ntopic_id: [\w-]{22}\ncrc32c: [0-9a-f]{8}\n", topic_id)
        version, count, *epochs = (home / "leader-epoch-checkpoint").read_text().splitlines()
        assert (version, int(count)) == ("0", len(epochs))
        starts = [tuple(map(int, line.split())) for line in epochs]
        assert starts[0][1] == 0
        assert starts == sorted(starts)
