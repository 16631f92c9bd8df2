"""A thousand groups that join at once: the attack of those who mean no harm."""

from __future__ import annotations

import asyncio
import struct
import time

from tidelog.bench.hostile.attacks import Peer, close_all, open_many, request, text

GROUPS = 1000
TRIES = 200
RETRIABLE = frozenset({14, 15, 16, 27})


async def thousand_groups(port: int, seconds: float, count: int = GROUPS) -> str:
    """Each finds its coordinator, joins, is assigned, and beats its heart until the time is up."""
    peers = await open_many(port, count)
    began = time.monotonic()
    times = sorted(await asyncio.gather(*(_join(peer, f"group-{n}") for n, peer in enumerate(peers))))
    took = time.monotonic() - began
    await asyncio.sleep(max(0.0, seconds - took))
    close_all(peers)
    joined = [each for each in times if each >= 0]
    if not joined:
        return "none joined"
    return f"{len(joined)} of {count} stable after {took:.1f} s (p50 {joined[len(joined) // 2]:.1f} s)"


async def _join(peer: Peer, group: str) -> float:
    """Seconds until the group is stable; -1 where it never was."""
    began = time.monotonic()
    member = ""
    for _ in range(TRIES):
        error, body = await _ask(peer, 10, 0, text(group), 0)
        if not error:
            protocols = struct.pack(">i", 1) + text("range") + struct.pack(">i", 4) + b"meta"
            join = text(group) + struct.pack(">ii", 30_000, 5_000) + text(member) + text("consumer") + protocols
            error, body = await _ask(peer, 11, 2, join, 4)
        if not error:
            generation, member, leads = _joined(body)
            assignments = struct.pack(">i", 1) + text(member) + struct.pack(">i", 4) + b"mine" if leads else bytes(4)
            sync = text(group) + struct.pack(">i", generation) + text(member) + assignments
            error, body = await _ask(peer, 14, 1, sync, 4)
        if not error:
            error, _ = await _ask(peer, 12, 1, text(group) + struct.pack(">i", generation) + text(member), 4)
            if not error:
                return time.monotonic() - began
        if error not in RETRIABLE:
            return -1.0
        await asyncio.sleep(0.05)
    return -1.0


async def _ask(peer: Peer, key: int, version: int, body: bytes, error_at: int) -> tuple[int, bytes]:
    """The answer's error code, which stands so far behind the header, and what follows it."""
    await peer.send(request(key, version, body))
    answer = await peer.answer()
    if len(answer) < 4 + error_at + 2:
        return -1, b""
    return struct.unpack_from(">h", answer, 4 + error_at)[0], answer[4 + error_at + 2 :]


def _joined(body: bytes) -> tuple[int, str, bool]:
    """Generation, own member id, and whether it leads."""
    (generation,) = struct.unpack_from(">i", body)
    position = 4
    texts = []
    for _ in range(3):  # protocol, leader, member
        (size,) = struct.unpack_from(">h", body, position)
        texts.append(body[position + 2 : position + 2 + size].decode())
        position += 2 + size
    return generation, texts[2], texts[1] == texts[2]
