"""Damage to one file of one replica: which file, which place, which bytes.

An `Injury` is chosen before anything runs: places are fractions, so that the same seed damages the same place of
what is there. `inflict` finds the file and changes it behind the node's back; it returns what it did, in words.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.damage.replicas import Batch, parse_batches

PAGE_BYTES = 4096
METADATA = "__cluster_metadata-0"

# Field of a batch header -> where it stands and how long it is.
FIELDS = {
    "base_offset": (0, 8),
    "length": (8, 4),
    "epoch": (12, 4),
    "magic": (16, 1),
    "crc": (17, 4),
    "last_offset_delta": (23, 4),
}
BATCH_WAYS = (*FIELDS, "payload_bit", "payload_bits", "zero_page", "zero_batch", "cut_tail", "cut_batches")
FILE_WAYS = ("flip", "zero", "cut", "garbage", "empty", "remove")
DATA_TARGETS = ("sealed", "active", "metadata_log", "offsets_log")
COMPANIONS = ("index", "timeindex", "txnindex", "snapshot", "epochs", "partition_metadata", "metadata_epochs")
DIRECTORY_FILES = {
    "high_watermarks": "replication-offset-checkpoint",
    "recovery_points": "recovery-point-offset-checkpoint",
    "log_starts": "log-start-offset-checkpoint",
    "clean_shutdown": ".kafka_cleanshutdown",
}


@dataclass(frozen=True, slots=True)
class Injury:
    """`target` names the kind of file, `way` what happens to it; `file_at`, `place` and `amount` are fractions."""

    target: str
    way: str
    file_at: float
    place: float
    amount: float

    def __str__(self) -> str:
        return f"{self.target}:{self.way}@{self.file_at:.2f}/{self.place:.2f}"


def choose(rng: random.Random, target: str | None = None) -> Injury:
    targets = [
        *[(12, one) for one in ("sealed", "active")],
        *[(4, one) for one in ("metadata_log", "offsets_log")],
        *[(2, one) for one in ("index", "timeindex", "snapshot", "epochs", "metadata_snapshot")],
        *[(1, one) for one in ("txnindex", "partition_metadata", "metadata_epochs", *DIRECTORY_FILES)],
    ]
    target = target or rng.choices([one for _, one in targets], [weight for weight, _ in targets])[0]
    way = rng.choice(BATCH_WAYS if target in DATA_TARGETS else FILE_WAYS)
    return Injury(target, way, rng.random(), rng.random(), rng.random())


def inflict(injury: Injury, data_directory: Path, partition_directory: str) -> str:
    """Damage what the injury names in this node's directory. `partition_directory` is the partition's, "topic-0"."""
    rng = random.Random(injury.amount)
    file = _find(injury, data_directory, partition_directory)
    if file is None:
        return "nothing there to damage"
    name = f"{file.parent.name}/{file.name}"
    before = file.read_bytes() if file.exists() else b""
    if injury.target in DATA_TARGETS:
        what = _damage_batches(injury, file, before, rng)
    else:
        what = f"{_damage_file(injury, file, before, rng)} of {len(before)} bytes"
    return f"{name}: {what}"


def _find(injury: Injury, data: Path, partition_directory: str) -> Path | None:
    directory = data / partition_directory
    if injury.target in DIRECTORY_FILES:
        return data / DIRECTORY_FILES[injury.target]
    if injury.target in ("metadata_log", "metadata_snapshot", "metadata_epochs"):
        directory = data / METADATA
    if injury.target == "offsets_log":
        logs = [one for one in sorted(data.glob("__consumer_offsets-*/*.log")) if one.stat().st_size]
        return _at(logs, injury.file_at)
    if injury.target in ("epochs", "metadata_epochs"):
        return directory / "leader-epoch-checkpoint"
    if injury.target == "partition_metadata":
        return directory / "partition.metadata"
    segments = sorted(directory.glob("*.log"))
    if injury.target == "txnindex":
        return _at(segments, injury.file_at, ".txnindex")
    if injury.target in ("active", "metadata_log"):
        filled = [one for one in segments if one.stat().st_size]
        return filled[-1] if filled else None
    if injury.target == "sealed":
        return _at(segments[:-1], injury.file_at)
    suffix = {"metadata_snapshot": "checkpoint"}.get(injury.target, injury.target)
    return _at(sorted(directory.glob(f"*.{suffix}")), injury.file_at)


def _at(files: list[Path], fraction: float, suffix: str | None = None) -> Path | None:
    if not files:
        return None
    found = files[int(fraction * len(files))]
    return found if suffix is None else found.with_suffix(suffix)


# Batches


def _damage_batches(injury: Injury, file: Path, data: bytes, rng: random.Random) -> str:
    batches = parse_batches(data, file.name, [])
    if not batches:
        return "no batch there"
    batch = batches[int(injury.place * len(batches))]
    where = f"{injury.way} of the batch {batch.base_offset} to {batch.next_offset - 1} at {batch.position}"
    ways: dict[str, Callable[[], str]] = {
        "payload_bit": lambda: _flip(file, data, batch, 1, rng),
        "payload_bits": lambda: _flip(file, data, batch, 20, rng),
        "zero_page": lambda: _zero_page(file, data, batch),
        "zero_batch": lambda: _write(file, batch.position, bytes(batch.size_bytes)),
        "cut_tail": lambda: _cut(file, batch.position + 1 + int(injury.amount * (batch.size_bytes - 2))),
        "cut_batches": lambda: _cut(file, batch.position),
    }
    if injury.way in ways:
        return f"{where}, {ways[injury.way]()}"
    return f"{where}, {_damage_field(injury, file, data, batch, rng)}"


def _damage_field(injury: Injury, file: Path, data: bytes, batch: Batch, rng: random.Random) -> str:
    at, size = FIELDS[injury.way]
    position = batch.position + at
    old = data[position : position + size]
    kinds: list[Callable[[], bytes]] = [
        lambda: (int.from_bytes(old, "big") ^ 1 << rng.randrange(8 * size)).to_bytes(size, "big"),
        lambda: (int.from_bytes(old, "big") ^ 1 << rng.randrange(min(8 * size, 10))).to_bytes(size, "big"),
        lambda: rng.randbytes(size),
        lambda: bytes(size),
        lambda: b"\xff" * size,
        lambda: struct.pack(">q", int.from_bytes(old, "big") + rng.choice((-1, 1, 7)))[-size:],
    ]
    new = old
    while new == old:
        new = rng.choice(kinds)()
    _write(file, position, new)
    return f"{old.hex()} became {new.hex()}"


def _flip(file: Path, data: bytes, batch: Batch, bits: int, rng: random.Random) -> str:
    changed = bytearray(data[batch.position + 61 : batch.position + batch.size_bytes])
    if not changed:
        return "no payload"
    for _ in range(bits):
        bit = rng.randrange(8 * len(changed))
        changed[bit // 8] ^= 1 << bit % 8
    return _write(file, batch.position + 61, bytes(changed))


def _zero_page(file: Path, data: bytes, batch: Batch) -> str:
    page = batch.position // PAGE_BYTES * PAGE_BYTES
    return _write(file, page, bytes(min(PAGE_BYTES, len(data) - page)))


def _write(file: Path, position: int, data: bytes) -> str:
    with open(file, "r+b") as opened:
        opened.seek(position)
        opened.write(data)
    return f"{len(data)} bytes at {position}"


def _cut(file: Path, size_bytes: int) -> str:
    before = file.stat().st_size
    os.truncate(file, size_bytes)
    return f"{size_bytes} bytes left of {before}"


# Other files


def _damage_file(injury: Injury, file: Path, data: bytes, rng: random.Random) -> str:
    if not data or injury.way == "garbage":
        garbage = rng.randbytes(rng.choice((7, 34, 68, 200)))
        file.write_bytes(garbage if not data or injury.amount < 0.5 else data + garbage)
        return f"garbage, {len(garbage)} bytes"
    if injury.way == "remove":
        file.unlink()
        return "removed"
    if injury.way == "empty":
        _cut(file, 0)
        return "emptied"
    if injury.way == "cut":
        return _cut(file, int(injury.place * (len(data) - 1)))
    position = int(injury.place * len(data))
    if injury.way == "zero":
        size = min(rng.choice((4, 16, PAGE_BYTES)), len(data) - position)
        return "zeros, " + _write(file, position, bytes(size))
    return "a bit, " + _write(file, position, bytes([data[position] ^ 1 << rng.randrange(8)]))
