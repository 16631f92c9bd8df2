"""A process that appends and flushes is killed at some moment; what it said was acknowledged is there."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, line_of
from tests.unit.storage.batches import NOW, offsets_of, records_of
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.segments.reader import headers

WORK = """
import sys
from tidelog.protocol.batches.records import encode_batch
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.segments.log_config import LogConfig
from tidelog.storage.log.directory import LogDirectory
now = int(sys.argv[2])
config = LogConfig(segment_bytes=20_000, index_interval_bytes=500, flush_messages=1)
directory = LogDirectory.open(OsDisk(), sys.argv[1], node_id=1, cluster_id="c")
logs = directory.load(lambda topic: config, now)
log = logs.get(("t", 0)) or directory.create_log("t", 0, bytes(15) + b"x", config, now)
entry = log.producers.entries.get(7)
sequence = entry.last_sequence + 1 if entry else 0
print("ready", flush=True)
while True:
    for _ in range(1 + sequence % 3):
        value = b"%d" % sequence * (sequence % 50)
        record = (now + sequence, None, value, ())
        batch = encode_batch([record], producer_id=7, producer_epoch=0, base_sequence=sequence)
        log.append_as_leader(memoryview(batch), 1, now)
        sequence += 1
    log.flush()
    log.set_high_watermark(log.committable_offset)
    if sequence % 100 < 3:
        directory.write_checkpoints()
    print(log.committable_offset, flush=True)
"""
CONFIG = LogConfig(segment_bytes=20_000, index_interval_bytes=500, flush_messages=1)


@pytest.mark.slow
def test_acknowledged_records_survive_a_hard_kill(tmp_path: Path):
    rng = random.Random(5)
    acknowledged = 0
    for _ in range(25):
        process = subprocess.Popen(
            [sys.executable, "-c", WORK, str(tmp_path), str(NOW)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        assert line_of(process) == "ready\n"
        # So many flushes and a moment: how far it gets is not for the machine's speed to say.
        answers = [line_of(process).strip() for _ in range(rng.randrange(50))]
        time.sleep(rng.random() * 0.01)
        process.send_signal(signal.SIGKILL)
        answers += process.stdout.read().split()
        process.wait(PATIENCE_S)
        process.stdout.close()
        if answers:
            acknowledged = int(answers[-1]) if len(answers[-1]) >= len(answers[0]) else int(answers[-2])
        directory = LogDirectory.open(OsDisk(), str(tmp_path), node_id=1, cluster_id="c")
        log = directory.load(lambda topic: CONFIG, NOW)["t", 0]
        assert log.log_end_offset >= acknowledged
        found = records_of(log)
        assert offsets_of(found) == list(range(log.log_end_offset))
        assert all(r.value == b"%d" % r.offset * (r.offset % 50) for r in found)
        for segment in log.segments:
            places = {header.last_offset: position for position, header in headers(segment)}
            assert all(places[offset] == position for offset, position in segment.offset_index.rows())
        if rng.random() < 0.3:
            directory.close()
        else:
            directory._lock.release()
    assert acknowledged > 500
