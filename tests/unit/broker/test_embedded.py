"""The broker inside a test process: starts, serves, stops, and leaves nothing behind."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tidelog.broker.config import ConfigError
from tidelog.broker.embedded import EmbeddedBroker


def test_it_serves_on_a_port_of_its_own_and_leaves_nothing_behind() -> None:
    with EmbeddedBroker() as broker:
        host, _, port = broker.bootstrap_servers.rpartition(":")
        socket.create_connection((host, int(port)), 5).close()
        directory = broker.directory
        assert (directory / "meta.properties").is_file()
    with pytest.raises(OSError):
        socket.create_connection((host, int(port)), 5)
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
