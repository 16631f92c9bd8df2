"""The simulated world itself: asyncio's promises hold on virtual time, the network's and the machine's faults are what
they say, and a seed is the same history in another process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.host import Host
from tests.simulation.simulated_network import GIVE_UP_S, Network
from tests.simulation.world import Broken, World

ROOT = Path(__file__).resolve().parents[2]


class Echo(asyncio.Protocol):
    """Answers what it gets; `got` and `ends` for the test."""

    def __init__(self, answers: bool = True) -> None:
        self.answers = answers
        self.got = b""
        self.ends: list[Exception | None] = []
        self.paused_writing = 0
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.got += data
        if self.answers:
            self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)

    def pause_writing(self) -> None:
        self.paused_writing += 1

    def resume_writing(self) -> None:
        self.paused_writing -= 1


class Pair:
    """A server on host a, port 1, and a client on host b, connected when `connect` returns."""

    def __init__(self, seed: int = 1) -> None:
        self.world = World(seed)
        self.network = Network(self.world)
        self.a = Host(self.world, self.network, "a")
        self.b = Host(self.world, self.network, "b")
        self.accepted: list[Echo] = []
        self.client = Echo(answers=False)
        self.errors: list[OSError] = []

    def accept(self) -> Echo:
        self.accepted.append(Echo())
        return self.accepted[-1]

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_server(self.accept, sock=self.a.bind("a", 1))

    async def dial(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: self.client, "a", 1)
        except OSError as error:
            self.errors.append(error)

    def connect(self) -> Echo:
        self.a.start(self.serve)
        self.b.start(self.dial)
        self.world.run_for(0.1)
        assert self.client.transport is not None
        return self.accepted[0]


def test_time_passes_only_as_events_say():
    world = World(1)
    host = Host(world, Network(world), "a")
    seen: list[tuple[str, float]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        loop.call_later(2, lambda: seen.append(("later", loop.time() - begin)))
        cancelled = loop.call_later(1, lambda: seen.append(("cancelled", 0)))
        cancelled.cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await asyncio.Event().wait()
        seen.append(("timeout", loop.time() - begin))
        await asyncio.gather(asyncio.sleep(1), asyncio.sleep(3))
        assert await loop.run_in_executor(None, lambda: 7) == 7
        assert await asyncio.wait_for(asyncio.sleep(0, "soon"), 1) == "soon"
        seen.append(("end", round(loop.time() - begin, 1)))

    host.start(main)
    world.run_for(100)
    assert seen == [("timeout", 1.5), ("later", 2.0), ("end", 4.5)]


def test_an_exception_that_nobody_handles_breaks_the_history():
    world = World(1)
    host = Host(world, Network(world), "a")

    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)

    host.start(main)
    with pytest.raises(Broken, match="NoUnexpectedException"):
        world.run_for(1)


def test_bytes_arrive_in_order_and_ends_are_seen():
    pair = Pair()
    server = pair.connect()
    sent = b"".join(bytes([number]) * 100 for number in range(200))
    for start in range(0, len(sent), 100):
        pair.client.transport.write(sent[start : start + 100])
    pair.world.run_for(1)
    assert server.got == sent
    assert pair.client.got == sent
    pair.client.transport.close()
    pair.world.run_for(1)
    assert pair.client.ends == [None]
    assert server.ends == [None]


def test_a_killed_process_resets_its_connections_and_refuses_new_ones():
    pair = Pair()
    pair.connect()
    pair.a.kill()
    pair.world.run_for(1)
    assert len(pair.client.ends) == 1
    pair.client = Echo()
    pair.b.kill()
    pair.b.start(pair.dial)
    pair.world.run_for(1)
    assert isinstance(pair.errors[0], ConnectionRefusedError)
    pair.a.start(pair.serve)
    pair.b.kill()
    pair.b.start(pair.dial)
    pair.world.run_for(1)
    assert len(pair.accepted) == 2


def test_a_machine_without_power_says_nothing_until_it_is_back():
    pair = Pair()
    pair.connect()
    pair.a.lose_power()
    pair.client.transport.write(b"hello")
    pair.world.run_for(3)
    assert pair.client.ends == []
    pair.a.start(pair.serve)
    pair.world.run_for(3)
    assert isinstance(pair.client.ends[0], ConnectionResetError)


def test_a_cut_holds_bytes_back_and_healing_delivers_them():
    pair = Pair()
    server = pair.connect()
    pair.network.cut("b", "a", one_way=True)
    pair.client.transport.write(b"one")
    pair.world.run_for(5)
    assert server.got == b""
    pair.client.transport.write(b"two")
    server.transport.write(b"the other way is open")
    pair.network.heal()
    pair.world.run_for(1)
    assert server.got == b"onetwo"
    assert pair.client.got.startswith(b"the other way is open")


def test_a_long_cut_breaks_the_connection():
    pair = Pair()
    pair.connect()
    pair.network.cut("a", "b")
    pair.client.transport.write(b"one")
    pair.world.run_for(GIVE_UP_S + 1)
    assert isinstance(pair.client.ends[0], TimeoutError)


def test_a_paused_process_does_what_was_due_when_it_wakes():
    pair = Pair()
    server = pair.connect()
    assert pair.a.loop is not None
    pair.a.loop.pause()
    pair.client.transport.write(b"one")
    pair.world.run_for(5)
    assert server.got == b""
    assert pair.client.ends == []
    pair.a.loop.resume()
    pair.world.run_for(1)
    assert pair.client.got == b"one"


def test_a_writer_is_held_back_by_a_reader_that_does_not_read():
    pair = Pair()
    server = pair.connect()
    pair.network.cut("a", "b")
    pair.client.transport.write(bytes(100_000))
    assert pair.client.paused_writing == 1
    pair.network.heal()
    pair.world.run_for(1)
    assert pair.client.paused_writing == 0
    assert len(server.got) == 100_000


def test_a_disk_that_fails_in_a_write_stops_the_machine_there():
    world = World(1)
    host = Host(world, Network(world), "a")
    after: list[str] = []

    async def main() -> None:
        host.disk.make_directory("/d")
        host.disk.fail_after(1)
        try:
            host.disk.write_file("/d/f", b"x", sync=True)
        finally:
            asyncio.get_running_loop().call_soon(after.append, "never")

    host.start(main)
    world.run_for(1)
    assert after == []
    assert not host.running
    assert not host.powered


SAME = """
from tests.simulation.single_node import run
print(run({seed}))
"""


@pytest.mark.slow
def test_a_seed_is_the_same_history_in_another_process():
    def trace(seed: int, hash_seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        script = SAME.format(seed=seed)
        done = subprocess.run(
            [sys.executable, "-c", script],
            check=False,
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert trace(5, "1") == trace(5, "2")
    assert trace(5, "1") != trace(6, "1")
