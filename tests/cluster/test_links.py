"""The network of the cluster tests does what it says: it holds, delivers late, resets, refuses."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.patience import PATIENCE_S
from tidelog.testing.links import Links
from tidelog.testing.ports import free_port


class Echo:
    """Answers every connection with what it is sent."""

    def __init__(self) -> None:
        self.port = free_port()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    @staticmethod
    def _answer(connection: socket.socket) -> None:
        with connection:
            while True:
                try:
                    data = connection.recv(1000)
                    connection.sendall(data)
                except OSError:
                    return
                if not data:
                    return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def links() -> Iterator[Links]:
    network = Links()
    yield network
    network.close()


@pytest.fixture
def door(links: Links) -> Iterator[int]:
    """Where node 1 reaches node 2, which echoes and runs."""
    echo = Echo()
    port = links.port(1, 2, echo.port)
    links.up(2)
    yield port
    echo.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE_S)


def echoes(connection: socket.socket, data: bytes) -> bool:
    """Whether the data comes back."""
    connection.sendall(data)
    return connection.recv(1000) == data


def is_held(connection: socket.socket, data: bytes) -> bool:
    """Whether the data does not come back."""
    connection.sendall(data)
    connection.settimeout(0.2)
    try:
        connection.recv(1000)
    except TimeoutError:
        return True
    else:
        return False
    finally:
        connection.settimeout(PATIENCE_S)


def test_everything_passes_while_nothing_is_cut(door: int) -> None:
    with connect(door) as connection:
        assert echoes(connection, b"one")
        assert echoes(connection, b"two")


def test_a_cut_holds_what_is_sent_and_healing_delivers_it(links: Links, door: int) -> None:
    with connect(door) as connection:
        assert echoes(connection, b"before")
        links.cut([1], [2])
        assert is_held(connection, b"held")
        links.heal()
        assert connection.recv(1000) == b"held"


def test_a_cut_of_others_changes_nothing(links: Links, door: int) -> None:
    links.cut([3], [1, 2])
    links.hush([2], [3])
    with connect(door) as connection:
        assert echoes(connection, b"passes")


@pytest.mark.parametrize(("sender", "receiver"), [(1, 2), (2, 1)])
def test_a_hush_holds_one_way(links: Links, door: int, sender: int, receiver: int) -> None:
    with connect(door) as connection:
        assert echoes(connection, b"before")
        links.hush([sender], [receiver])
        assert is_held(connection, b"late")
        links.heal()
        assert connection.recv(1000) == b"late"


def test_connecting_through_a_cut_hangs_until_it_heals(links: Links, door: int) -> None:
    links.cut([2], [1])
    with connect(door) as connection:
        assert is_held(connection, b"first")
        links.heal()
        assert connection.recv(1000) == b"first"


def test_healing_with_a_reset_ends_what_was_held(links: Links, door: int) -> None:
    with connect(door) as connection:
        assert echoes(connection, b"before")
        links.cut([1], [2])
        connection.sendall(b"lost")
        links.heal(reset=True)
        with pytest.raises(ConnectionResetError):
            connection.recv(1000)
    with connect(door) as connection:
        assert echoes(connection, b"again")


def test_who_is_down_refuses(links: Links, door: int) -> None:
    links.down(2)
    with pytest.raises(ConnectionRefusedError):
        connect(door)
    links.up(2)
    with connect(door) as connection:
        assert echoes(connection, b"back")


def test_a_cut_hides_that_the_other_is_down(links: Links, door: int) -> None:
    links.cut([1], [2])
    links.down(2)
    with connect(door) as connection:
        assert is_held(connection, b"?")
    links.heal()
    with pytest.raises(ConnectionRefusedError):
        connect(door)


def test_the_end_of_a_connection_is_news_too(links: Links) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    door = links.port(1, 2, listener.getsockname()[1])
    links.up(2)
    with listener, connect(door) as connection:
        accepted, _ = listener.accept()
        links.cut([1], [2])
        accepted.close()
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        links.heal()
        deadline = time.monotonic() + 30
        connection.settimeout(30)
        assert connection.recv(1) == b""
        assert time.monotonic() < deadline
