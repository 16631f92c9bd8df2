"""The bytes that a process on this machine has sent and received over TCP, from the kernel (sock_diag).

The kernel counts per socket, so the process need not count. The counters of a closed connection are lost. Therefore
callers take the difference of two close moments, socket by socket.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE, _ERROR = 3, 2
_INET_DIAG_INFO = 2
_ESTABLISHED = 1 << 1
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_INODE_AT = 68
_MESSAGE_BYTES = 72
_BYTES_ACKED_AT, _BYTES_RECEIVED_AT = 120, 128


@dataclass(frozen=True, slots=True)
class ConnectionBytes:
    """The sent and received bytes of one connection."""

    sent: int
    received: int


def per_socket() -> dict[int, ConnectionBytes]:
    """Socket inode -> its bytes, for all established TCP connections of this network namespace. Raises OSError without
    sock_diag.
    """
    connections: dict[int, ConnectionBytes] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(2)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, _ESTABLISHED)
            header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0)
            netlink.send(header + body)
            while _read(netlink.recv(1 << 18), connections):
                pass
    return connections


def _read(data: bytes, connections: dict[int, ConnectionBytes]) -> bool:
    """Read the messages of one datagram. Returns False after the last message."""
    position = 0
    while position + _HEADER.size <= len(data):
        size, kind, _, _, _ = _HEADER.unpack_from(data, position)
        if kind == _DONE or size < _HEADER.size:
            return False
        if kind == _ERROR:
            raise OSError(-struct.unpack_from("=i", data, position + _HEADER.size)[0], "sock_diag is refused")
        end = position + size
        first = position + _HEADER.size
        inode = struct.unpack_from("=I", data, first + _INODE_AT)[0]
        attribute = first + _MESSAGE_BYTES
        while attribute + 4 <= end:
            length, name = struct.unpack_from("=HH", data, attribute)
            if length < 4:
                break
            if name == _INET_DIAG_INFO and length >= 4 + _BYTES_RECEIVED_AT + 8:
                sent, received = struct.unpack_from("=QQ", data, attribute + 4 + _BYTES_ACKED_AT)
                connections[inode] = ConnectionBytes(sent, received)
            attribute += (length + 3) & ~3
        position += (size + 3) & ~3
    return True


def inodes(pid: int) -> set[int]:
    """The open sockets of a process; empty if it is gone or not readable for this user."""
    numbers = set()
    try:
        with os.scandir(Path("/proc", str(pid), "fd")) as entries:
            for entry in entries:
                try:
                    target = os.readlink(entry.path)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    numbers.add(int(target[8:-1]))
    except OSError:
        pass
    return numbers


def carried_between(
    before: Mapping[int, ConnectionBytes], after: Mapping[int, ConnectionBytes], owned: Iterable[int]
) -> ConnectionBytes:
    """The bytes of these sockets between two moments; a new socket started at 0."""
    sent = received = 0
    nothing = ConnectionBytes(0, 0)
    for inode in owned:
        if (now := after.get(inode)) is not None:
            then = before.get(inode, nothing)
            sent += max(now.sent - then.sent, 0)
            received += max(now.received - then.received, 0)
    return ConnectionBytes(sent, received)
