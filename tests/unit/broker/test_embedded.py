"""The broker inside a test process: starts, serves, stops, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin, Producer
from tidelog.protocol.errors import ConfigError
from tidelog.storage.files.disk import DirectoryInUse, OsLock
from tidelog.testing import embedded
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.embedded import EmbeddedBroker
from tidelog.testing.processes import ServerFailed


def test_it_serves_on_a_port_of_its_own_and_leaves_nothing_behind() -> None:
    with EmbeddedBroker() as broker:
        host, _, port = broker.bootstrap_servers.rpartition(":")
        socket.create_connection((host, int(port)), PATIENCE_S).close()
        directory = broker.directory
        assert (directory / "meta.properties").is_file()
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), PATIENCE_S)
    assert not directory.exists()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tidelog")]


def test_a_given_directory_is_kept_and_opened_again(tmp_path: Path) -> None:
    for _ in range(2):
        with EmbeddedBroker(tmp_path / "data"):
            pass
    assert (tmp_path / "data" / "meta.properties").is_file()


def test_what_prevents_a_start_is_raised_where_it_was_started() -> None:
    with pytest.raises(ConfigError, match=r"num\.partitons"):
        EmbeddedBroker(config={"num.partitons": "3"}).start()
    with pytest.raises(ConfigError, match="not served yet"):
        EmbeddedBroker(config={"listeners": "SSL://127.0.0.1:0"}).start()


def serves(broker: EmbeddedBroker) -> bool:
    with Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
        return producer.send_and_wait("t", b"x").offset >= 0


@pytest.mark.parametrize("given", [True, False])
def test_a_broker_that_was_stopped_starts_again(tmp_path: Path, given: bool) -> None:
    broker = EmbeddedBroker(tmp_path if given else None)
    for _ in range(2):
        broker.start()
        assert serves(broker)
        assert broker.directory.is_dir()
        broker.stop()
        assert broker.bootstrap_servers == ""
    broker.stop()


def test_a_second_start_is_the_first() -> None:
    with EmbeddedBroker().start() as broker:
        address, directory = broker.bootstrap_servers, broker.directory
        assert broker.start() is broker
        assert (broker.bootstrap_servers, broker.directory) == (address, directory)
        assert serves(broker)
    assert not directory.exists()


def test_a_start_that_failed_can_be_tried_again(tmp_path: Path) -> None:
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    broker = EmbeddedBroker(config={"listeners": f"PLAINTEXT://127.0.0.1:{port}"})
    with pytest.raises(OSError, match="in use"):
        broker.start()
    assert not broker.directory.exists()
    taken.close()
    with broker:
        assert broker.bootstrap_servers == f"127.0.0.1:{port}"
        assert serves(broker)


def test_the_heap_of_the_test_process_is_not_frozen() -> None:
    before = gc.get_freeze_count()
    with EmbeddedBroker():
        assert gc.get_freeze_count() <= before  # a frozen object that is dropped meanwhile counts no more


def test_values_have_their_own_types() -> None:
    config = {"num.partitions": 3, "auto.create.topics.enable": False, "log.cleaner.io.buffer.load.factor": 0.8}
    with (
        EmbeddedBroker(config=config) as broker,
        Admin(bootstrap_servers=broker.bootstrap_servers) as admin,
        Producer(bootstrap_servers=broker.bootstrap_servers) as producer,
    ):
        admin.create_topics([NewTopic("t")])
        assert len(producer.partitions_for("t")) == 3


def test_the_address_is_the_first_that_clients_are_told() -> None:
    listeners = "EXTERNAL://127.0.0.1:0,INTERNAL://127.0.0.1:0"
    protocols = "EXTERNAL:PLAINTEXT,INTERNAL:PLAINTEXT"
    config = {
        "listeners": listeners,
        "listener.security.protocol.map": protocols,
        "inter.broker.listener.name": "INTERNAL",
    }
    with EmbeddedBroker(config=config) as broker:
        host, _, port = broker.bootstrap_servers.rpartition(":")
        assert host == "127.0.0.1"
        assert port.isdecimal()
        assert serves(broker)


def test_a_start_that_is_interrupted_at_once_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the node's thread had a task that could be cancelled, the end was waited for in vain for 30 s."""
    began = threading.Event()
    interrupted = threading.Event()
    run = asyncio.run

    def late_run(main: Any) -> Any:
        began.set()
        assert interrupted.wait(PATIENCE_S)
        return run(main)

    def interrupt(self: Any) -> str:
        self._thread.start()
        assert began.wait(PATIENCE_S)
        threading.Timer(0.2, interrupted.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", late_run)
    monkeypatch.setattr(embedded._NodeThread, "await_ready", interrupt)
    broker = EmbeddedBroker()
    with pytest.raises(KeyboardInterrupt):
        broker.start()
    assert not broker.directory.exists()


@pytest.mark.slow
@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize(
    ("listeners", "host"),
    [
        ("PLAINTEXT://127.0.0.1:0", "127.0.0.1"),
        ("PLAINTEXT://127.0.0.2:0", "127.0.0.2"),
        ("PLAINTEXT://[::1]:0", "[::1]"),
        ("CONTROLLER://127.0.0.1:0, PLAINTEXT://localhost:0 ", "localhost"),
    ],
)
def test_a_restart_keeps_the_address_of_any_listener(process: bool, listeners: str, host: str) -> None:
    config = {"listeners": listeners, "controller.listener.names": "CONTROLLER"}
    with EmbeddedBroker(config=config, process=process) as broker:
        address = broker.bootstrap_servers
        assert address.rpartition(":")[0] == host
        assert serves(broker)
        broker.restart()
        assert broker.bootstrap_servers == address
        assert serves(broker)


@pytest.mark.slow
@pytest.mark.parametrize("process", [False, True])
def test_a_restart_that_failed_can_be_tried_again(process: bool) -> None:
    with EmbeddedBroker(process=process) as broker:
        assert serves(broker)
        run: Any = broker._run
        (run.node if process else run).stop()  # so that another can have the port before the restart
        address, directory = broker.bootstrap_servers, broker.directory
        with (
            socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))),
            pytest.raises((OSError, ServerFailed), match="in use"),
        ):
            broker.restart()
        broker.restart()
        assert broker.bootstrap_servers == address
        with Producer(bootstrap_servers=address) as producer:
            assert producer.send_and_wait("t", b"x").offset == 1, "the data is there"
    assert not directory.exists()


def test_a_directory_stays_where_it_was_when_the_working_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log directory went offline, and with it the broker."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with EmbeddedBroker("data") as broker:
        monkeypatch.chdir(tmp_path / "other")
        assert serves(broker)
        broker.restart()
        with Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
            assert producer.send_and_wait("t", b"x").offset == 1
    assert list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize("make", [EmbeddedBroker, lambda directory: EmbeddedCluster(1, directory)])
def test_a_comma_in_the_path_of_a_directory_is_refused(tmp_path: Path, make: Any) -> None:
    """The data was in two other directories."""
    with pytest.raises(ConfigError, match=r"separates directories by commas, and there is one in .*a,b"):
        make(tmp_path / "a,b").start()
    assert list(tmp_path.iterdir()) == []


def test_a_fork_keeps_neither_port_nor_connections_nor_directory() -> None:
    """A process pool that forks while a broker runs has its descriptors, and the next start found all in use."""
    with EmbeddedBroker() as broker:
        port = int(broker.bootstrap_servers.rpartition(":")[2])
        connection = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        assert serves(broker)  # the broker has accepted the connection before
        fork = os.fork()
        if fork == 0:
            signal.alarm(int(2 * PATIENCE_S))
            signal.pause()
        try:
            broker.restart()
            assert serves(broker)
            with connection:
                assert connection.recv(1) == b""
            broker.stop()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        finally:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


def test_a_fork_that_ends_does_not_unlock_the_directory(tmp_path: Path) -> None:
    with EmbeddedBroker(tmp_path / "data"):
        fork = os.fork()
        if fork == 0:
            try:
                gc.collect()
                for each in [one for one in gc.get_objects() if isinstance(one, OsLock)]:
                    each.__del__()
            finally:
                os._exit(0)
        assert os.waitpid(fork, 0)[1] == 0
        with pytest.raises(DirectoryInUse):
            EmbeddedBroker(tmp_path / "data").start()
