"""The minimal cost of a Produce on the brokers' event loops: reads, writes to files, answers.

A server on uvloop in a process of its own. Of each frame it knows the size, the correlation id and where the batch must
lie; it writes the batch to a file and answers as many bytes as a broker does. Nothing is checked, looked up or kept,
so the system calls are those of a produce and the Python is the least there can be. With three replicas two followers,
processes as well, fetch the batch and write it to files of their own; the answer waits for their next fetches. A small
request is told as a multiple of it, because absolute figures move with the machine.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import cast

import uvloop

from tidelog.bench.frames import ProducePlan
from tidelog.bench.raw import BenchError
from tidelog.testing.usage import cpu_ns

_HEAD = Struct(">ihhi")  # size, API key, version, correlation id
_ANSWER_HEAD = Struct(">ii")
_SIZE = Struct(">i")
_TAGS_BYTES = 3  # behind the batch of the only partition
_BUFFER_BYTES = 64 * 1024
# A node's request for one partition in a fetch session, and the answer without the batches, each with its size field.
_FETCH_BYTES = 115
_FETCHED_HEAD_BYTES = 77
_FETCH = _SIZE.pack(_FETCH_BYTES - 4) + bytes(_FETCH_BYTES - 4)
_PATIENCE_S = 30.0


class _Frames(asyncio.BufferedProtocol):
    """A connection that keeps what came in one buffer until its owner has used it."""

    def __init__(self) -> None:
        self._end = 0
        self._view = memoryview(bytearray(_BUFFER_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end :]


class Replicas:
    """What the leader has written and not answered: it goes to the followers when each has a fetch that waits.

    The answers go to the client when each follower has sent its next fetch. One client at a time.
    """

    def __init__(self, followers: int) -> None:
        self._followers = followers
        self._waiting: list[asyncio.Transport] = []
        self._batches: list[bytes] = []
        self._answers: list[bytes] = []
        self._replicated: list[bytes] = []

    def appended(self, client: asyncio.Transport, batches: Sequence[bytes], answers: Sequence[bytes]) -> None:
        self._client = client
        self._batches += batches
        self._answers += answers
        if len(self._waiting) == self._followers:
            self._send()

    def fetched(self, follower: asyncio.Transport) -> None:
        self._waiting.append(follower)
        if len(self._waiting) == self._followers:
            if self._replicated:
                self._client.write(b"".join(self._replicated))
                self._replicated = []
            if self._batches:
                self._send()

    def _send(self) -> None:
        frame = b"".join((bytes(_FETCHED_HEAD_BYTES - 4), *self._batches))
        frame = _SIZE.pack(len(frame)) + frame
        waiting, self._waiting, self._batches = self._waiting, [], []
        self._replicated, self._answers = self._answers, []
        for follower in waiting:
            follower.write(frame)


class FollowerConnection(_Frames):
    """The leader's side of a follower, which has one fetch in flight."""

    def __init__(self, replicas: Replicas) -> None:
        super().__init__()
        self._replicas = replicas

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        if self._end == _FETCH_BYTES:
            self._end = 0
            self._replicas.fetched(self._transport)


class LeaderConnection(_Frames):
    """The follower's side: a fetch, and for each answer a write to the file and the next fetch."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._position = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._transport.write(_FETCH)

    def buffer_updated(self, nbytes: int) -> None:
        self._end = end = self._end + nbytes
        if end >= _SIZE.size and _SIZE.unpack_from(self._view)[0] + _SIZE.size == end:
            self._position += os.pwrite(self._descriptor, self._view[_FETCHED_HEAD_BYTES:end], self._position)
            self._end = 0
            self._transport.write(_FETCH)


class FloorConnection(_Frames):
    """Frames in, batches to the file, answers of one size out: all that were read leave with one write."""

    def __init__(self, descriptor: int, answer_bytes: int, batch_bytes: int, replicas: Replicas | None = None) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._rest = bytes(answer_bytes - 4)
        self._answer_bytes = answer_bytes
        self._batch_bytes = batch_bytes
        self._replicas = replicas
        self._position = 0

    def buffer_updated(self, nbytes: int) -> None:
        view, start, end = self._view, 0, self._end + nbytes
        out, batches = [], []
        while end - start >= _HEAD.size:
            size, _, _, correlation_id = _HEAD.unpack_from(view, start)
            stop = start + 4 + size
            if stop > end:
                break
            batch_end = stop - _TAGS_BYTES
            batch = view[batch_end - self._batch_bytes : batch_end]
            self._position += os.pwrite(self._descriptor, batch, self._position)
            out.append(_ANSWER_HEAD.pack(self._answer_bytes, correlation_id) + self._rest)
            if self._replicas is not None:
                batches.append(bytes(batch))
            start = stop
        if start:
            view[: end - start] = view[start:end]
        self._end = end - start
        if self._replicas is not None:
            if out:
                self._replicas.appended(self._transport, batches, out)
        elif len(out) == 1:
            self._transport.write(out[0])
        elif out:
            self._transport.writelines(out)


class Floor:
    """The servers as processes, inside a `with` block; `directory` is on the file system that the brokers write to."""

    def __init__(self, directory: Path, plan: ProducePlan, replicas: int = 1) -> None:
        [batch] = plan.batches.values()
        self._folder = tempfile.TemporaryDirectory(prefix="floor-", dir=directory)
        self._arguments = (str(plan.answer_size_bytes), str(len(batch)), str(replicas - 1))
        self._followers = replicas - 1
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Floor:
        try:
            self.port, leader_port = self._start("lead", "log", *self._arguments)
            for number in range(1, self._followers + 1):
                self._start("follow", f"log-{number}", str(leader_port))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, role: str, log: str, *arguments: str) -> list[int]:
        """Start a process; the ports that it tells once it is ready."""
        command = [sys.executable, "-m", "tidelog.bench.floor", role, str(Path(self._folder.name, log)), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes.append(process)
        assert process.stdout is not None
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        line = process.stdout.readline() if poll.poll(_PATIENCE_S * 1000) else b""  # written whole, with one write
        if not line:
            raise BenchError("a server of the floor did not start")
        return [int(port) for port in line.split()]

    @property
    def cpu_ns(self) -> int:
        """CPU of all its processes so far."""
        return sum(cpu_ns(process.pid) for process in self._processes)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.communicate(timeout=_PATIENCE_S)
        self._folder.cleanup()


async def _lead(path: str, answer_bytes: int, batch_bytes: int, followers: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    replicas = Replicas(followers) if followers else None
    client_port = await _listen(lambda: FloorConnection(descriptor, answer_bytes, batch_bytes, replicas))
    leader_port = await _listen(lambda: FollowerConnection(replicas)) if replicas is not None else 0
    print(client_port, leader_port, flush=True)
    await _until_its_owner_is_gone()


async def _follow(path: str, leader_port: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    await asyncio.get_running_loop().create_connection(lambda: LeaderConnection(descriptor), "127.0.0.1", leader_port)
    print(leader_port, flush=True)
    await _until_its_owner_is_gone()


async def _listen(connection: Callable[[], asyncio.BufferedProtocol]) -> int:
    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    return int(server.sockets[0].getsockname()[1])


async def _until_its_owner_is_gone() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    _role, _path, *_numbers = sys.argv[1:]
    uvloop.run((_lead if _role == "lead" else _follow)(_path, *map(int, _numbers)))
