"""What the kernel counts on a connection is what was sent over it."""

from __future__ import annotations

import os
import socket
import time

import pytest

from tests.patience import PATIENCE_S
from tidelog.cli.socket_bytes import ConnectionBytes, carried_between, inodes, per_socket


def test_both_ends_of_a_connection_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with client, server:
            try:
                before = per_socket()
            except OSError as error:
                pytest.skip(f"sock_diag: {error}")
            client.sendall(b"x" * 10_000)
            got = 0
            while got < 10_000:
                got += len(server.recv(10_000))
            server.sendall(b"y" * 300)
            assert len(client.recv(1000)) == 300
            # The last bytes count when they are acknowledged, which the kernel may put off.
            deadline = time.monotonic() + PATIENCE_S
            while True:
                after = per_socket()
                inode = os.fstat(server.fileno()).st_ino
                if carried_between(before, after, [inode]).sent == 300 or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            mine = inodes(os.getpid())
            for end, expected in ((client, ConnectionBytes(10_000, 300)), (server, ConnectionBytes(300, 10_000))):
                inode = os.fstat(end.fileno()).st_ino
                assert inode in mine
                assert carried_between(before, after, [inode]) == expected


def test_sockets_that_came_and_went() -> None:
    before = {1: ConnectionBytes(100, 10), 2: ConnectionBytes(5, 5)}
    after = {1: ConnectionBytes(150, 10), 3: ConnectionBytes(7, 1)}
    assert carried_between(before, after, [1, 2, 3]) == ConnectionBytes(57, 1)
    assert carried_between(before, after, []) == ConnectionBytes(0, 0)
