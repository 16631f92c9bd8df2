"""Free TCP ports on loopback, for servers that need their port before they listen.

Invariant: a port belongs to this process until it releases the port or ends. A server that is killed and restarted
keeps its port, and no other process of the same user, such as a second test run, gets it meanwhile.
A claim is a lock on one byte of a file that all these processes share. The kernel releases the lock
at any end of the process.
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

# Below the range of ports for outgoing connections.
FIRST_PORT, LAST_PORT = 15_000, 31_999
_ATTEMPTS = 1_000
_claimed: set[int] = set()
"""The claims of this process; a POSIX lock excludes only other processes."""


class NoFreePort(Exception):
    """Other processes have claimed all ports that were tried."""


def free_port(also: Sequence[int] = ()) -> int:
    """Claim a port for this process, and the ports at the distances `also` after it."""
    choice = random.SystemRandom()
    for _ in range(_ATTEMPTS):
        port = choice.randint(FIRST_PORT, LAST_PORT - max(also, default=0))
        if _claim([port, *(port + distance for distance in also)]):
            return port
    raise NoFreePort(f"no free port between {FIRST_PORT} and {LAST_PORT}")


def release_ports(ports: Sequence[int]) -> None:
    """Give up claims of this process."""
    for port in ports:
        if port in _claimed:
            fcntl.lockf(_claims_file(os.getpid()), fcntl.LOCK_UN, 1, port)
            _claimed.discard(port)


def _claim(ports: Sequence[int]) -> bool:
    """Claim all these ports, or none."""
    if any(port in _claimed or not _can_be_bound(port) for port in ports):
        return False
    locked: list[int] = []
    for port in ports:
        try:
            fcntl.lockf(_claims_file(os.getpid()), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
        except OSError:
            for locked_port in locked:
                fcntl.lockf(_claims_file(os.getpid()), fcntl.LOCK_UN, 1, locked_port)
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
def _claims_file(pid: int) -> int:
    """The open file of claims, one for each process id, because a fork does not inherit locks."""
    path = Path(tempfile.gettempdir(), f"tidelog-ports-{os.getuid()}")
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
