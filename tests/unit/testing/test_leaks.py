"""Starts and stops in a row leave no thread, descriptor, process, port or directory, and the memory does not grow.

The same of starts that fail, of brokers that are not stopped, of runs with pytest-xdist, and of the fork server.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.doses import dose
from tests.patience import PATIENCE_S
from tests.unit.client.test_loop_thread import interrupted_at
from tidelog.client.sync import Producer
from tidelog.protocol.errors import ConfigError
from tidelog.testing import ports
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.embedded import EmbeddedBroker
from tidelog.testing.ports import free_port
from tidelog.testing.processes import ServerFailed, delete_temporary_directory, make_temporary_directory
from tidelog.testing.usage import rss_bytes

ROOT = Path(__file__).resolve().parents[3]
# A start that kept its node would keep several times that: an idle node weighs 1 to 2 MB on top of the imports.
GROWTH_BYTES_PER_START = 150_000
WARM_UP_STARTS = 3
XDIST_WORKERS = 3


class Held(NamedTuple):
    """What this process and its descendants hold; `children` are the descriptors of each descendant by its pid."""

    threads: int
    descriptors: int
    directories: frozenset[str]
    claimed_ports: frozenset[int]
    children: dict[int, int]


def held() -> Held:
    gc.collect()
    directories = frozenset(name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tidelog-"))
    return Held(
        threading.active_count(),
        descriptors(os.getpid()),
        directories,
        frozenset(ports._claimed),
        {pid: descriptors(pid) for pid in descendants(os.getpid())},
    )


def descriptors(pid: int) -> int:
    """How many a process holds; none once it has ended."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def descendants(ancestor: int) -> list[int]:
    """The processes that this one started, and those they started; those that have ended but are not awaited too.

    Without Spark's JVM, which other tests have started, and which opens and closes files when it likes.
    """
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                name, _, fields = (entry / "stat").read_text().rpartition(")")
                if not name.endswith("(java"):
                    parents[int(entry.name)] = int(fields.split()[1])
    found: list[int] = []
    generation = [ancestor]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation]
        found += generation
    return found


def held_at_rest() -> Held:
    """What is held once it has not changed for a second: the fork server closes its end of a fork after its end."""
    deadline_s = time.monotonic() + PATIENCE_S
    last, since_s = held(), time.monotonic()
    while time.monotonic() < min(since_s + 1, deadline_s):
        time.sleep(0.05)
        if (now := held()) != last:
            last, since_s = now, time.monotonic()
    return last


def assert_nothing_is_left(before: Held) -> None:
    """What is held becomes what was held before, at rest."""
    deadline_s = time.monotonic() + PATIENCE_S
    while held() != before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert held() == before


def memory_bytes() -> int:
    return sum(map(rss_bytes, [os.getpid(), *descendants(os.getpid())]))


def start_and_stop(make: Callable[[], Any]) -> None:
    with make() as server, Producer(bootstrap_servers=server.bootstrap_servers) as producer:
        producer.send_and_wait("t", b"x")


@pytest.fixture
def own_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_port()  # opens the file of claims that all processes share, before directories are made elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
@pytest.mark.usefixtures("own_temporary_directory")
@pytest.mark.parametrize(
    "make",
    [
        EmbeddedBroker,
        pytest.param(lambda: EmbeddedBroker(process=True), id="process"),
        pytest.param(lambda: EmbeddedCluster(1, cuttable=True), id="cluster"),
        pytest.param(lambda: EmbeddedCluster(3), id="cluster-of-three", marks=pytest.mark.hunt),
    ],
)
def test_nothing_is_left_of_starts_and_stops(make: Callable[[], Any]) -> None:
    for _ in range(WARM_UP_STARTS):
        start_and_stop(make)
    before, before_bytes = held_at_rest(), memory_bytes()
    starts = dose("TIDELOG_EMBEDDED_STARTS")
    for _ in range(starts):
        start_and_stop(make)
    assert_nothing_is_left(before)
    growth_bytes = memory_bytes() - before_bytes
    assert growth_bytes < max(starts, 40) * GROWTH_BYTES_PER_START, f"{growth_bytes / starts:.0f} bytes a start"


@pytest.mark.slow
@pytest.mark.usefixtures("own_temporary_directory")
@pytest.mark.parametrize("process", [False, True])
def test_nothing_is_left_of_starts_that_fail_nor_of_a_port_of_the_users(process: bool) -> None:
    start_and_stop(lambda: EmbeddedBroker(process=process))
    before = held_at_rest()
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        listeners = f"PLAINTEXT://127.0.0.1:{occupied.getsockname()[1]}"
        with pytest.raises((OSError, ServerFailed)):
            EmbeddedBroker(process=process, config={"listeners": listeners}).start()
    for config in ({"no.such.key": "1"}, {"listeners": "PLAINTEXT"}, {"log.dirs": "/proc/1/no-directory"}):
        with pytest.raises((ConfigError, ServerFailed, OSError)):
            EmbeddedBroker(process=process, config=config).start()
    start_and_stop(lambda: EmbeddedBroker(process=process, config={"listeners": listeners}))
    assert_nothing_is_left(before)


def enter(broker: EmbeddedBroker) -> None:
    with broker:
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("own_temporary_directory")
@pytest.mark.parametrize("call", [EmbeddedBroker.start, EmbeddedBroker.stop, enter])
def test_a_broker_that_an_interrupt_left_can_be_stopped(call: Callable[[EmbeddedBroker], Any]) -> None:
    for step in count():
        broker = EmbeddedBroker()
        if call is EmbeddedBroker.stop:
            broker.start()
        was_interrupted = interrupted_at(step, lambda: call(broker), ("testing/embedded.py",))  # noqa: B023
        broker.stop()
        deadline_s = time.monotonic() + PATIENCE_S
        while any(thread.name == "tidelog-embedded" for thread in threading.enumerate()):
            assert time.monotonic() < deadline_s, f"step {step}"
            time.sleep(0.01)
        assert not broker.bootstrap_servers
        if not was_interrupted:
            break
        if call is EmbeddedBroker.stop:
            assert not broker.directory.exists(), f"step {step}"
    assert step > 10


UNSTOPPED = """
import os, sys
from tidelog.testing import EmbeddedBroker, EmbeddedCluster
broker, process, cluster = EmbeddedBroker().start(), EmbeddedBroker(process=True).start(), EmbeddedCluster(1)
cluster.start()
fork = os.fork()
if fork == 0:
    sys.exit(0)
assert os.waitpid(fork, 0)[1] == 0
assert all(os.listdir(server.directory) for server in (broker, process, cluster)), "a fork deletes none"
"""


@pytest.mark.slow
def test_directories_of_brokers_that_are_not_stopped_end_with_the_interpreter(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", UNSTOPPED], env=environment, check=True, timeout=PATIENCE_S)
    assert [path.name for path in tmp_path.iterdir()] == [f"tidelog-ports-{os.getuid()}"]


KILLED = """
import os, signal
from tidelog.testing import EmbeddedBroker, EmbeddedCluster
broker, process, cluster = EmbeddedBroker().start(), EmbeddedBroker(process=True).start(), EmbeddedCluster(1)
cluster.start()
os.kill(os.getpid(), signal.SIGTERM)
"""
NEXT = """
from tidelog.testing import EmbeddedBroker
with EmbeddedBroker():
    pass
"""


@pytest.mark.usefixtures("own_temporary_directory")
def test_a_directory_whose_deletion_was_interrupted_is_deleted_by_the_next_call(monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    directory = make_temporary_directory("tidelog-")
    with monkeypatch.context() as context:
        context.setattr(shutil, "rmtree", interrupt)
        with pytest.raises(KeyboardInterrupt):
            delete_temporary_directory(directory)
    delete_temporary_directory(directory)
    assert list(directory.parent.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("own_temporary_directory")
def test_directories_of_a_run_that_was_killed_end_with_the_next(tmp_path: Path) -> None:
    """Not those of a run that lives, and not those of the user."""
    (tmp_path / "tidelog-users").mkdir(mode=0o700)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with EmbeddedBroker() as running:
        names = {running.directory.name, f"{running.directory.name}.owner", "tidelog-users"}
        assert {path.name for path in tmp_path.iterdir()} == names
        killed = subprocess.run([sys.executable, "-c", KILLED], env=environment, check=False, timeout=PATIENCE_S)
        assert killed.returncode == -signal.SIGTERM
        names |= {f"tidelog-ports-{os.getuid()}"}
        assert {path.name for path in tmp_path.iterdir()} > names
        subprocess.run([sys.executable, "-c", NEXT], env=environment, check=True, timeout=PATIENCE_S)
        assert {path.name for path in tmp_path.iterdir()} == names
        assert (running.directory / "meta.properties").is_file()


USERS_TESTS = """
import tempfile
import pytest
from tidelog.testing import EmbeddedBroker, EmbeddedCluster
from tests.unit.testing.test_leaks import assert_nothing_is_left, free_port, held_at_rest, start_and_stop

KINDS = {"thread": EmbeddedBroker, "process": lambda: EmbeddedBroker(process=True), "cluster": EmbeddedCluster}


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_of_the_run():
    free_port()  # the claims are those of all workers, the directories not
    tempfile.tempdir = tempfile.mkdtemp(prefix="worker-")
    for make in KINDS.values():
        start_and_stop(make)
    before = held_at_rest()
    yield
    assert_nothing_is_left(before)


@pytest.mark.parametrize("number", range(STARTS))
@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_broker_for_a_test(kind, number):
    start_and_stop(KINDS[kind])


@pytest.mark.parametrize("number", range(STARTS // 6))
def test_a_cluster_for_a_test(number):
    start_and_stop(KINDS["cluster"])


def test_what_stays_open_ends_with_the_worker(tidelog_broker, tidelog_topic):
    pass
"""


@pytest.mark.hunt
def test_nothing_is_left_of_a_run_with_xdist(tmp_path: Path) -> None:
    """Each worker starts and stops its share, and holds at the end what it held at the beginning."""
    starts = dose("TIDELOG_EMBEDDED_STARTS")
    (tmp_path / "test_users.py").write_text(USERS_TESTS.replace("STARTS", str(starts)))
    temporary, mark = tmp_path / "temporary", f"TIDELOG_LEAKS={uuid.uuid4()}"
    temporary.mkdir()
    name, _, value = mark.partition("=")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-p", "tidelog.testing.pytest_plugin"]
        + ["-p", "no:cacheprovider", "-n", str(XDIST_WORKERS)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        | {"TMPDIR": str(temporary), name: value},
        timeout=PATIENCE_S * (5 + starts),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{2 * starts + starts // 6 + 1} passed" in done.stdout
    deadline_s = time.monotonic() + PATIENCE_S
    while processes_with(mark) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not processes_with(mark)
    left = [path.name for path in temporary.rglob("tidelog-*")]
    assert left == [f"tidelog-ports-{os.getuid()}"], "the file of claims is shared and stays"


def processes_with(mark: str) -> list[int]:
    """The processes with this variable in the environment with which they started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found
