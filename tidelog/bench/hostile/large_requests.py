"""Requests of a megabyte or less that name as much as a broker decodes: one at a time, each second.

Written out by hand, as all attacks are. Each is one API; the counts are just below what Tidelog refuses to decode.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Callable, Iterable
from typing import Final

from tidelog.bench.hostile.attacks import TOPIC, Attack, Peer, request, text

PAUSE_S: Final = 0.2


def _array(elements: Iterable[bytes]) -> bytes:
    listed = list(elements)
    return struct.pack(">i", len(listed)) + b"".join(listed)


def _compact_length(length: int) -> bytes:
    out = bytearray()
    value = length + 1
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _names(count: int) -> list[str]:
    return [f"none-{number:06}" for number in range(count)]


def update_features(count: int = 20_000) -> bytes:
    features = b"".join(
        _compact_length(len(name)) + name.encode() + struct.pack(">hbb", 1, 1, 0) for name in _names(count)
    )
    body = struct.pack(">i", 1000) + _compact_length(count) + features + b"\0\0"
    return request(57, 1, body, flexible=True)


def alter_configs(count: int = 9_500) -> bytes:
    config = _array([text("retention.ms") + text("1000")])
    return request(33, 1, _array(b"\2" + text(name) + config for name in _names(count)) + b"\0")


def alter_configs_of_one(count: int = 16_000) -> bytes:
    configs = _array(text(name) + text("1000") for name in _names(count))
    return request(33, 1, _array([b"\2" + text(TOPIC) + configs]) + b"\0")


def incremental_alter_configs(count: int = 9_500) -> bytes:
    config = _array([text("retention.ms") + b"\0" + text("1000")])
    return request(44, 0, _array(b"\2" + text(name) + config for name in _names(count)) + b"\0")


def incremental_alter_configs_of_broker(count: int = 15_000) -> bytes:
    configs = _array(text(name) + b"\0" + text("1000") for name in _names(count))
    return request(44, 0, _array([b"\4" + text("") + configs]) + b"\0")


def alter_loggers(count: int = 15_000) -> bytes:
    configs = _array(text(name) + b"\0" + text("INFO") for name in _names(count))
    return request(44, 0, _array([b"\x08" + text("1") + configs]) + b"\0")


def list_offsets(count: int = 14_000) -> bytes:
    partitions = _array([struct.pack(">iq", 0, -1)])
    return request(2, 1, struct.pack(">i", -1) + _array(text(name) + partitions for name in _names(count)))


def list_offsets_of_one(count: int = 35_000) -> bytes:
    partitions = _array(struct.pack(">iq", index, -1) for index in range(count))
    return request(2, 1, struct.pack(">i", -1) + _array([text(TOPIC) + partitions]))


def produce(count: int = 20_000) -> bytes:
    """Topics that there are not; what they are sent is empty."""
    partitions = _array([struct.pack(">ii", 0, 0)])
    topics = _array(text(name) + partitions for name in _names(count))
    return request(0, 3, struct.pack(">hhi", -1, 1, 1000) + topics)


def fetch(count: int = 12_000) -> bytes:
    partitions = _array([struct.pack(">iqi", 0, 0, 1)])
    topics = _array(text(name) + partitions for name in _names(count))
    return request(1, 4, struct.pack(">iiiib", -1, 0, 1, 1000, 0) + topics)


def fetch_of_one(count: int = 28_000) -> bytes:
    partitions = _array(struct.pack(">iqi", index, 0, 1) for index in range(count))
    return request(1, 4, struct.pack(">iiiib", -1, 0, 1, 1000, 0) + _array([text(TOPIC) + partitions]))


def _attack(made: Callable[[], bytes]) -> Attack:
    async def attack(port: int, seconds: float) -> str:
        ask = made()
        ends = time.monotonic() + seconds
        took: list[float] = []
        answers = set()
        while time.monotonic() < ends:
            peer = await Peer.open(port)
            if peer is not None:
                began = time.monotonic()
                await peer.send(ask)
                answers.add(len(await peer.answer()))
                took.append(time.monotonic() - began)
                peer.close()
            await asyncio.sleep(PAUSE_S)
        slowest = max(took, default=0.0) * 1000
        return f"{len(took)} requests of {len(ask)} bytes, answers of {sorted(answers)}, after {slowest:.0f} ms at most"

    return attack


LARGE_REQUESTS: Final[dict[str, Attack]] = {
    "features": _attack(update_features),
    "configs of many topics": _attack(alter_configs),
    "many configs of a topic": _attack(alter_configs_of_one),
    "increments of many topics": _attack(incremental_alter_configs),
    "many increments of brokers": _attack(incremental_alter_configs_of_broker),
    "many loggers": _attack(alter_loggers),
    "offsets of many topics": _attack(list_offsets),
    "offsets of many partitions": _attack(list_offsets_of_one),
    "produces to many topics": _attack(produce),
    "fetches of many topics": _attack(fetch),
    "fetches of many partitions": _attack(fetch_of_one),
}
