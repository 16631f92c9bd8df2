"""Limits the number of connections and their creation rate (Kafka's ConnectionQuotas). Pure.

One server counts all its connections, those of each listener, and those of each address. To keep the creation rate, an
admitted connection may have to wait before it is read. Invariant: `release` uncounts each connection that `admit`
counted; a refused connection is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv6Address

from tidelog.protocol.java_text import parse_integer, trim

UNLIMITED = 2**31 - 1
# The longest wait of a connection beyond the rate, Kafka's quota window. One that had to wait longer is refused.
WAIT_S_MAX = 10.0


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The configured limits. `of_listener` and `rate_of_listener` hold those of listeners with limits of their own."""

    total: int = UNLIMITED
    per_address: int = UNLIMITED
    of_address: Mapping[str, int] = field(default_factory=dict)
    of_listener: Mapping[str, int] = field(default_factory=dict)
    rate: int = UNLIMITED
    rate_of_listener: Mapping[str, int] = field(default_factory=dict)


class Refused(Exception):
    """A connection is refused. `limit` is the name of the setting that refuses it."""

    def __init__(self, limit: str, value: int, of: str = "") -> None:
        super().__init__(f"{limit}={value}{f' of {of}' if of else ''} is reached")
        self.limit = limit


class ConnectionQuotas:
    """`protected`: the inter-broker listener, if there are others. The total limit does not apply to it."""

    def __init__(self, limits: ConnectionLimits, protected: str | None = None) -> None:
        self.limits = limits
        self.protected = protected
        self.total = 0
        self._of_address: dict[str, int] = {}
        self._of_listener: dict[str, int] = {}
        self._rate_limits: dict[str, _RateLimit] = {}

    def admit(self, listener: str, address: str, now_s: float) -> float:
        """Count a new connection. The seconds for which it must wait. Raises Refused."""
        limits = self.limits
        most = limits.of_listener.get(listener, UNLIMITED)
        if self._of_listener.get(listener, 0) >= most:
            raise Refused("max.connections", most, f"listener {listener}")
        if self.total >= limits.total and listener != self.protected:
            raise Refused("max.connections", limits.total)
        most = limits.of_address.get(address, limits.per_address)
        if self._of_address.get(address, 0) >= most:
            raise Refused("max.connections.per.ip", most, address)
        wait_s = self._wait_s(listener, now_s)
        self.total += 1
        self._of_address[address] = self._of_address.get(address, 0) + 1
        self._of_listener[listener] = self._of_listener.get(listener, 0) + 1
        return wait_s

    def release(self, listener: str, address: str) -> None:
        self.total -= 1
        self._of_listener[listener] -= 1
        left = self._of_address[address] - 1
        if left:
            self._of_address[address] = left
        else:
            del self._of_address[address]  # keeps the dict bounded

    @property
    def too_many(self) -> bool:
        """Whether the protected listener has exceeded the total, so that another connection must be closed."""
        return self.total > self.limits.total

    def _wait_s(self, listener: str, now_s: float) -> float:
        limits = self.limits
        rates = {} if listener == self.protected else {"": limits.rate}
        rates[listener] = limits.rate_of_listener.get(listener, UNLIMITED)
        rate_limits = [
            (self._rate_limits.setdefault(name, _RateLimit()), rate) for name, rate in rates.items() if rate < UNLIMITED
        ]
        waits = [each.wait_s(rate, now_s) for each, rate in rate_limits]
        wait_s = max(waits, default=0.0)
        if wait_s > WAIT_S_MAX:
            raise Refused("max.connection.creation.rate", rate_limits[waits.index(wait_s)][1])
        for each, rate in rate_limits:
            each.take(rate, now_s)
        return wait_s


class _RateLimit:
    """Limits connections to a rate. One second's worth may come at once, the others evenly spaced."""

    __slots__ = ("_next_s",)

    def __init__(self) -> None:
        self._next_s = 0.0

    def wait_s(self, rate: int, now_s: float) -> float:
        if rate <= 0:
            return WAIT_S_MAX * 2
        return max(0.0, self._next_s - now_s)

    def take(self, rate: int, now_s: float) -> None:
        self._next_s = max(self._next_s, now_s - 1.0) + 1.0 / rate


def parse_overrides(items: str) -> dict[str, int]:
    """Parse max.connections.per.ip.overrides, "host:limit,...". Raises ValueError."""
    limits: dict[str, int] = {}
    for item in filter(None, map(str.strip, items.split(","))):
        host, colon, limit = item.rpartition(":")
        if not colon:
            raise ValueError(f"{item!r} is not host:limit")
        limits[plain_address(host.strip("[] "))] = parse_integer(trim(limit))
    return limits


def plain_address(host: str) -> str:
    """The one way to write an IP address, in which Java compares them: a listener on `[::]` sees a client of IPv4 as
    `::ffff:1.2.3.4`. Anything else stays as it is.
    """
    if ":" not in host:
        return host
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or address)
