"""Damage to one file of one replica: which file, which place, which bytes. Pure but for `inflict`.

An `Injury` is chosen before anything runs: places are fractions, so that the same seed damages the same place of what
is there. `find` picks the file among those of a node, `damaged` says what becomes of its bytes; `inflict` does it
behind the back of a node whose files are in a directory (the simulated disk has its own).
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.damage.replicas import Batch, parse_batches

PAGE_BYTES = 4096
METADATA = "__cluster_metadata-0"
OFFSETS = "__consumer_offsets-"

# Field of a batch header -> where it stands and how long it is.
FIELDS = {
    "base_offset": (0, 8),
    "length": (8, 4),
    "epoch": (12, 4),
    "magic": (16, 1),
    "crc": (17, 4),
    "last_offset_delta": (23, 4),
}
ONE_BATCH_WAYS = (*FIELDS, "payload_bit", "payload_bits", "zero_batch")
BATCH_WAYS = (*ONE_BATCH_WAYS, "zero_page", "cut_tail", "cut_batches")
FILE_WAYS = ("flip", "zero", "cut", "garbage", "empty", "remove")
DATA_TARGETS = ("sealed", "active", "metadata_log", "offsets_log")
DIRECTORY_FILES = {
    "high_watermarks": "replication-offset-checkpoint",
    "recovery_points": "recovery-point-offset-checkpoint",
    "log_starts": "log-start-offset-checkpoint",
    "clean_shutdown": ".kafka_cleanshutdown",
}
WEIGHTS = {
    **dict.fromkeys(("sealed", "active"), 12),
    **dict.fromkeys(("metadata_log", "offsets_log"), 4),
    **dict.fromkeys(("index", "timeindex", "snapshot", "epochs", "metadata_snapshot"), 2),
    **dict.fromkeys(("txnindex", "partition_metadata", "metadata_epochs", *DIRECTORY_FILES), 1),
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
    target = target or rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    way = rng.choice(BATCH_WAYS if target in DATA_TARGETS else FILE_WAYS)
    return Injury(target, way, rng.random(), rng.random(), rng.random())


def inflict(injury: Injury, data_directory: Path, partition_directory: str) -> str:
    """Damage what the injury names in this node's directory; what was done. `partition_directory` is "topic-0"."""
    sizes = {}
    for one in data_directory.rglob("*"):
        try:
            if one.is_file():
                sizes[str(one.relative_to(data_directory))] = one.stat().st_size
        except FileNotFoundError:
            pass  # a temporary file of a node that runs
    name = find(injury, sizes, partition_directory)
    if name is None:
        return "nothing there to damage"
    file = data_directory / name
    before = file.read_bytes() if file.exists() else b""
    after, what = damaged(injury, before)
    if after is None:
        file.unlink()
    else:
        file.touch()
        _write_what_differs(file, before, after)
    return f"{name}: {what}"


def _write_what_differs(file: Path, before: bytes, after: bytes) -> None:
    """Nothing else: the node may be writing to the same file."""
    common = min(len(before), len(after))
    first = next((at for at in range(common) if before[at] != after[at]), common)
    last = next((at + 1 for at in range(common - 1, first - 1, -1) if before[at] != after[at]), first)
    with open(file, "r+b") as opened:
        opened.seek(first)
        opened.write(after[first:last])
        opened.seek(common)
        opened.write(after[common:])
    if len(after) < len(before):
        os.truncate(file, len(after))


def find(injury: Injury, sizes: Mapping[str, int], partition_directory: str) -> str | None:
    """The file that is meant, of a node's files by their path below its data directory, with their sizes."""
    target, files = injury.target, sorted(sizes)
    if target in DIRECTORY_FILES:
        return DIRECTORY_FILES[target]
    directory = METADATA if target.startswith("metadata_") else partition_directory
    if target in ("epochs", "metadata_epochs"):
        return f"{directory}/leader-epoch-checkpoint"
    if target == "partition_metadata":
        return f"{directory}/partition.metadata"
    if target == "offsets_log":
        logs = [one for one in files if one.startswith(OFFSETS) and one.endswith(".log") and sizes[one]]
        return _at(logs, injury.file_at)
    segments = [one for one in files if one.startswith(f"{directory}/") and one.endswith(".log")]
    if target in ("active", "metadata_log"):
        filled = [one for one in segments if sizes[one]]
        return filled[-1] if filled else None
    if target == "sealed":
        return _at(segments[:-1], injury.file_at)
    if target == "txnindex":
        log = _at(segments, injury.file_at)
        return None if log is None else log.removesuffix(".log") + ".txnindex"
    suffix = {"metadata_snapshot": "checkpoint"}.get(target, target)
    named = [one for one in files if one.startswith(f"{directory}/") and one.endswith(f".{suffix}")]
    return _at(named, injury.file_at)


def _at(files: list[str], fraction: float) -> str | None:
    return files[int(fraction * len(files))] if files else None


def damaged(injury: Injury, data: bytes) -> tuple[bytes | None, str]:
    """The bytes after the damage, None for a file that is gone; and what was done, in words."""
    rng = random.Random(injury.amount)
    if injury.target not in DATA_TARGETS:
        return _damage_file(injury, data, rng)
    batches = parse_batches(data, "", [])
    if not batches:
        return data, "no batch there"
    batch = batches[int(injury.place * len(batches))]
    changed = bytearray(data)
    what = _damage_batch(injury, changed, batch, rng)
    where = f"the batch {batch.base_offset} to {batch.next_offset - 1} at {batch.position}"
    return bytes(changed), f"{injury.way} of {where}, {what}"


# Batches


def _damage_batch(injury: Injury, data: bytearray, batch: Batch, rng: random.Random) -> str:
    first, last = batch.position, batch.position + batch.size_bytes
    size_bytes = len(data)
    if injury.way in FIELDS:
        return _damage_field(injury.way, data, batch, rng)
    if injury.way in ("payload_bit", "payload_bits"):
        bits = [rng.randrange(8 * (first + 61), 8 * last) for _ in range(1 if injury.way == "payload_bit" else 20)]
        for bit in set(bits):
            data[bit // 8] ^= 1 << bit % 8
        return f"bits of the bytes {sorted({bit // 8 for bit in bits})[:3]}"
    if injury.way in ("zero_page", "zero_batch"):
        if injury.way == "zero_page":
            first = first // PAGE_BYTES * PAGE_BYTES
            last = min(first + PAGE_BYTES, size_bytes)
        data[first:last] = bytes(last - first)
        return f"zeros from {first} to {last}"
    kept = first + 1 + int(injury.amount * (batch.size_bytes - 2)) if injury.way == "cut_tail" else first
    del data[kept:]
    return f"{kept} bytes left of {size_bytes}"


def _damage_field(field: str, data: bytearray, batch: Batch, rng: random.Random) -> str:
    at, size = FIELDS[field]
    position = batch.position + at
    old = bytes(data[position : position + size])
    kinds: list[Callable[[], bytes]] = [
        lambda: (int.from_bytes(old, "big") ^ 1 << rng.randrange(8 * size)).to_bytes(size, "big"),
        lambda: (int.from_bytes(old, "big") ^ 1 << rng.randrange(min(8 * size, 10))).to_bytes(size, "big"),
        lambda: rng.randbytes(size),
        lambda: bytes(size),
        lambda: b"\xff" * size,
        lambda: struct.pack(">Q", int.from_bytes(old, "big") + rng.choice((-1, 1, 7)) & (1 << 64) - 1)[-size:],
    ]
    new = old
    while new == old:
        new = rng.choice(kinds)()
    data[position : position + size] = new
    return f"{old.hex()} became {new.hex()}"


# Other files


def _damage_file(injury: Injury, data: bytes, rng: random.Random) -> tuple[bytes | None, str]:
    size = f"of {len(data)} bytes"
    if not data or injury.way == "garbage":
        garbage = rng.randbytes(rng.choice((7, 34, 68, 200)))
        return (garbage if not data or injury.amount < 0.5 else data + garbage), f"{len(garbage)} bytes of garbage"
    position = int(injury.place * len(data))
    if injury.way == "remove":
        return None, f"removed, {size}"
    if injury.way == "empty":
        return b"", f"emptied, {size}"
    if injury.way == "cut":
        return data[: min(position, len(data) - 1)], f"cut to {position} {size}"
    changed = bytearray(data)
    if injury.way == "zero":
        count = min(rng.choice((4, 16, PAGE_BYTES)), len(data) - position)
        changed[position : position + count] = bytes(count)
        return bytes(changed), f"{count} zeros at {position} {size}"
    changed[position] ^= 1 << rng.randrange(8)
    return bytes(changed), f"a bit at {position} {size}"
