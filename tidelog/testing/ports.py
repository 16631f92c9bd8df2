"""Free TCP ports on loopback for servers that are told their port before they listen.

A port is claimed for as long as this process lives: a server that is killed and started again keeps its port, and
another process of the same user, such as a second test run, is never given it meanwhile. A claim is a lock on one byte
of a file that all of them share, so the kernel gives it back when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# Below the range that outgoing connections take theirs from.
FIRST_PORT, LAST_PORT = 15_000, 31_999
_ATTEMPTS = 1_000
_claimed: set[int] = set()
"""POSIX locks exclude other processes, not the one that holds them."""


class NoFreePort(Exception):
    """Other processes have claimed every port that was tried."""


def free_port(also: Sequence[int] = ()) -> int:
    """A port that is now claimed by this process; so are those at the distances `also` behind it."""
    choice = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = choice.randint(FIRST_PORT, LAST_PORT - max(also, default=0))
        if _claim([port, *(port + distance for distance in also)]):
            return port
    raise NoFreePort(f"no free port between {FIRST_PORT} and {LAST_PORT}")


def _claim(ports: Sequence[int]) -> bool:
    """All of them, or none."""
    if any(port in _claimed or not _can_be_bound(port) for port in ports):
        return False
    locked: list[int] = []
    for port in ports:
        try:
            fcntl.lockf(_claims(os.getpid()), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            for one in locked:
                fcntl.lockf(_claims(os.getpid()), fcntl.LOCK_UN, 1, one)
            return False
        locked.append(port)
    _claimed.update(ports)
    return True


def _can_be_bound(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@cache
def _claims(pid: int) -> int:
    """The open file of claims; one for each process, because a fork does not inherit locks."""
    path = Path(tempfile.gettempdir(), f"tidelog-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
