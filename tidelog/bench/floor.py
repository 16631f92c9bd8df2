"""The minimal cost of a Produce on the broker's event loop: one read, one write to a file, one answer.

A server on uvloop in a process of its own. Of each frame it knows the size, the correlation id and where the batch must
lie; it writes the batch to a file and answers as many bytes as a broker does. Nothing is checked, looked up or kept,
so the system calls are those of a produce and the Python is the least there can be. A small request is told as a
multiple of it, because absolute figures move with the machine.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from struct import Struct
from typing import cast

import uvloop

from tidelog.bench.frames import ProducePlan
from tidelog.bench.raw import BenchError
from tidelog.testing.usage import cpu_ns

_HEAD = Struct(">ihhi")  # size, API key, version, correlation id
_ANSWER_HEAD = Struct(">ii")
_TAGS_BYTES = 3  # behind the batch of the only partition
_BUFFER_BYTES = 64 * 1024


class FloorConnection(asyncio.BufferedProtocol):
    """Frames in, batches to the file, answers of one size out: all that were read leave with one write."""

    def __init__(self, descriptor: int, answer_bytes: int, batch_bytes: int) -> None:
        self._descriptor = descriptor
        self._rest = bytes(answer_bytes - 4)
        self._answer_bytes = answer_bytes
        self._batch_bytes = batch_bytes
        self._position = self._end = 0
        self._view = memoryview(bytearray(_BUFFER_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        view, start, end = self._view, 0, self._end + nbytes
        out = []
        while end - start >= _HEAD.size:
            size, _, _, correlation_id = _HEAD.unpack_from(view, start)
            stop = start + 4 + size
            if stop > end:
                break
            batch_end = stop - _TAGS_BYTES
            self._position += os.pwrite(
                self._descriptor, view[batch_end - self._batch_bytes : batch_end], self._position
            )
            out.append(_ANSWER_HEAD.pack(self._answer_bytes, correlation_id) + self._rest)
            start = stop
        if start:
            view[: end - start] = view[start:end]
        self._end = end - start
        if len(out) == 1:
            self._transport.write(out[0])
        elif out:
            self._transport.writelines(out)


class Floor:
    """The server as a process, inside a `with` block; `directory` is on the file system that the broker writes to."""

    def __init__(self, directory: Path, plan: ProducePlan) -> None:
        [batch] = plan.batches.values()
        self._folder = tempfile.TemporaryDirectory(prefix="floor-", dir=directory)
        arguments = [str(Path(self._folder.name, "log")), str(plan.answer_size_bytes), str(len(batch))]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tidelog.bench.floor", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __enter__(self) -> Floor:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__()
            raise BenchError("the server that is the floor did not start")
        self.port = int(line)
        return self

    @property
    def cpu_ns(self) -> int:
        return cpu_ns(self._process.pid)

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


async def _serve(path: str, answer_bytes: int, batch_bytes: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FloorConnection(descriptor, answer_bytes, batch_bytes), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)  # until its owner is gone


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
