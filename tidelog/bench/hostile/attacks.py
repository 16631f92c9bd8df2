"""What a stranger can do to a node: each attack is a coroutine that goes on until it is cancelled, or is done.

Requests are written out by hand: what attacks a broker should not be made by its own codecs. An attack returns what it
saw, in words.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Final

import cramjam
import crc32c

from tidelog.bench import frames

COMPACTED, TOPIC = "hostile-compacted", "hostile"
CONNECT_AT_ONCE: Final = 200
LISTENING: Final = "127.0.0.1"

Attack = Callable[[int, float], Awaitable[str]]


class Peer:
    """A connection that may be refused or closed at any moment."""

    def __init__(self) -> None:
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, port: int) -> Peer | None:
        peer = cls()
        try:
            peer.reader, peer.writer = await asyncio.open_connection(LISTENING, port, limit=1 << 16)
        except OSError:
            return None
        return peer

    async def send(self, data: bytes) -> bool:
        try:
            self.writer.write(data)
            await self.writer.drain()
        except (OSError, RuntimeError):
            return False
        return not self.writer.is_closing()

    async def answer(self) -> bytes:
        """Empty when the node hangs up."""
        try:
            (size,) = struct.unpack(">i", await self.reader.readexactly(4))
            return await self.reader.readexactly(size)
        except (OSError, asyncio.IncompleteReadError):
            return b""

    @property
    def is_open(self) -> bool:
        return not (self.reader.at_eof() or self.reader.exception() or self.writer.is_closing())

    def close(self) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.transport.abort()  # what was not read is dropped, so that no close waits for it


async def open_many(port: int, count: int) -> list[Peer]:
    peers: list[Peer] = []
    for start in range(0, count, CONNECT_AT_ONCE):
        many = min(CONNECT_AT_ONCE, count - start)
        peers += [each for each in await asyncio.gather(*(Peer.open(port) for _ in range(many))) if each is not None]
    return peers


def close_all(peers: list[Peer]) -> None:
    for peer in peers:
        peer.close()


def request(key: int, version: int, body: bytes, *, flexible: bool = False) -> bytes:
    frame = struct.pack(">hhih", key, version, 7, 1) + b"x" + (b"\0" if flexible else b"") + body
    return struct.pack(">i", len(frame)) + frame


def text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


async def nothing(port: int, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "no attack"


async def idle_connections(port: int, seconds: float, count: int = 15_000) -> str:
    """As many as files allow, each asking once and then staying."""
    peers = await open_many(port, count)
    began = time.monotonic()
    answered = 0
    for start in range(0, len(peers), CONNECT_AT_ONCE):
        some = peers[start : start + CONNECT_AT_ONCE]
        for peer in some:
            await peer.send(request(18, 0, b""))
        answered += sum(bool(each) for each in await asyncio.gather(*(peer.answer() for peer in some)))
    await asyncio.sleep(max(0.0, seconds - (time.monotonic() - began)))
    close_all(peers)
    return f"{len(peers)} opened, {answered} served"


async def comings_and_goings(port: int, seconds: float) -> str:
    ends = time.monotonic() + seconds
    count = 0

    async def come_and_go() -> None:
        nonlocal count
        while time.monotonic() < ends:
            peer = await Peer.open(port)
            if peer is not None:
                peer.close()
                count += 1

    await asyncio.gather(*(come_and_go() for _ in range(20)))
    return f"{count / seconds:.0f} connections a second"


async def garbage(port: int, seconds: float) -> str:
    """Frames of random bytes, and requests with a few bytes changed."""
    rng = random.Random(1)
    ends = time.monotonic() + seconds
    batch = frames.record_batch([b"value"] * 5, int(time.time() * 1000))
    good = [frames.produce(frames.ProducePlan(TOPIC, {0: batch}), 1), request(3, 1, struct.pack(">i", -1))]
    good += [frames.fetch(TOPIC, {0: 0}, 1, max_wait_ms=0), request(18, 0, b"")]
    sent = 0

    async def stranger() -> None:
        nonlocal sent
        while time.monotonic() < ends:
            peer = await Peer.open(port)
            if peer is None:
                continue
            for _ in range(20):
                data = bytearray(rng.choice(good))
                for _ in range(rng.randint(1, 4)):
                    data[rng.randrange(4, len(data))] = rng.randrange(256)
                sent += 1
                if not await peer.send(bytes(data) if rng.random() < 0.9 else rng.randbytes(200)):
                    break
            await asyncio.sleep(0)
            peer.close()

    await asyncio.gather(*(stranger() for _ in range(10)))
    return f"{sent / seconds:.0f} requests a second"


async def claims(port: int, seconds: float) -> str:
    """Frames of 2 GB, which end a connection, and of 100 MB of which a byte a second arrives."""
    peers = await open_many(port, 500)
    for number, peer in enumerate(peers):
        await peer.send(struct.pack(">i", 2_000_000_000 if number % 2 else 100_000_000))
    for _ in range(max(1, int(seconds))):
        await asyncio.sleep(1)
        for peer in peers:
            await peer.send(b"x")
    open_still = sum(peer.is_open for peer in peers)
    close_all(peers)
    return f"{len(peers)} connections, {open_still} still open"


async def half_requests(port: int, seconds: float) -> str:
    """Twenty frames of 90 MB at once, of which the last byte never comes."""
    peers = await open_many(port, 20)
    piece = bytes(1 << 20)

    async def fill(peer: Peer) -> bool:
        await peer.send(struct.pack(">i", 90_000_000))
        for _ in range(85):
            if not await peer.send(piece):
                return False
        return True

    whole = await asyncio.gather(*map(fill, peers))
    await asyncio.sleep(seconds)
    open_still = sum(peer.is_open for peer in peers)
    close_all(peers)
    return f"{sum(whole)} sent 85 MB, {open_still} of {len(peers)} still open"


async def slow_readers(port: int, seconds: float, count: int = 300) -> str:
    """Fetches of 2 MB in a row whose answers are not read."""
    peers = await open_many(port, count)
    ask = frames.fetch(TOPIC, {0: 0}, 1, max_wait_ms=0)
    for peer in peers:
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await peer.send(ask * 20)
    await asyncio.sleep(seconds)
    close_all(peers)
    return f"{len(peers)} connections, 20 fetches of 2 MB each"


async def unread_answers(port: int, seconds: float, count: int = 100) -> str:
    """Small requests without end, and none of the answers read."""
    peers = await open_many(port, count)
    ask = request(3, 1, struct.pack(">i", -1)) * 50
    ends = time.monotonic() + seconds

    async def flood(peer: Peer) -> int:
        sent = 0
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while time.monotonic() < ends:
            try:
                async with asyncio.timeout_at(asyncio.get_running_loop().time() + 0.5):
                    if not await peer.send(ask):
                        break
            except TimeoutError:
                continue
            sent += 50
        return sent

    sent = sum(await asyncio.gather(*map(flood, peers)))
    close_all(peers)
    return f"{sent} requests from {len(peers)} connections"


async def bombs(port: int, seconds: float) -> str:
    """Batches of some hundred bytes that stand for hundreds of megabytes, for a topic whose records are looked at."""
    payloads: dict[int, bytes] = {
        4: bytes(cramjam.zstd.compress(bytes(400 << 20))),
        1: zlib.compress(bytes(900 << 20), 9, 31),
    }
    asks = []
    for codec, payload in payloads.items():
        covered = struct.pack(">hiqqqhii", codec, 99_999, *[int(time.time() * 1000)] * 2, -1, -1, -1, 100_000)
        covered += payload
        batch = struct.pack(">qiibI", 0, len(covered) + 9, -1, 2, crc32c.crc32c(covered)) + covered
        asks.append(frames.produce(frames.ProducePlan(COMPACTED, {0: batch}), 1))
    peers = await open_many(port, 2)
    ends = time.monotonic() + seconds
    errors: dict[int, int] = {}
    sent = 0
    while time.monotonic() < ends:
        for peer, ask in zip(peers, asks):
            await peer.send(ask)
        for peer in peers:
            answer = await peer.answer()
            error = struct.unpack_from(">h", answer, 4 + 3 + len(COMPACTED) + 5)[0] if answer else -1
            errors[error] = errors.get(error, 0) + 1
            sent += 1
    close_all(peers)
    return f"{sent / seconds:.1f} bombs a second, error codes {sorted(errors)}"


async def enormous_arrays(port: int, seconds: float) -> str:
    """Requests for 45,000 topics, for ten million nothings, and with 45,000 tagged fields; one of them each second."""
    topics = struct.pack(">i", 45_000) + b"".join(text(f"none-{n:06}") for n in range(45_000))
    nothings = b"\x81\xad\xe2\x04" + b"\x01\x00" * 10_000_000 + bytes(4)
    tags = b"\0\1\0\0" + b"\xc8\xdf\x02" + b"\x07\x00" * 45_000
    asks = [request(3, 1, topics), request(3, 9, nothings, flexible=True), request(3, 9, tags, flexible=True)]
    ends = time.monotonic() + seconds
    answers = []
    number = 0
    while time.monotonic() < ends:
        peer = await Peer.open(port)
        if peer is not None:
            await peer.send(asks[number % len(asks)])
            answers.append(len(await peer.answer()))
            peer.close()
        number += 1
        await asyncio.sleep(1)
    return f"{number} requests, answers of {sorted(set(answers))} bytes"


ATTACKS: Final[dict[str, Attack]] = {
    "nothing": nothing,
    "idle connections": idle_connections,
    "comings and goings": comings_and_goings,
    "garbage": garbage,
    "claims": claims,
    "half requests": half_requests,
    "slow readers": slow_readers,
    "unread answers": unread_answers,
    "bombs": bombs,
    "enormous arrays": enormous_arrays,
}
