"""How many connections of whom, and how fast: each limit by itself, and that what is counted is uncounted."""

from __future__ import annotations

import logging
import random

import pytest

from tidelog.broker.network.connection_quotas import (
    ConnectionLimits,
    ConnectionQuotas,
    Refused,
    parse_overrides,
    plain_address,
)
from tidelog.broker.network.repeated_warnings import INTERVAL_S, RepeatedWarnings


def admitted(quotas: ConnectionQuotas, times: int, listener: str = "A", address: str = "1.1.1.1") -> int:
    found = 0
    for _ in range(times):
        try:
            quotas.admit(listener, address, 100.0)
        except Refused:
            break
        found += 1
    return found


def test_the_total_binds_every_listener_but_the_brokers_own() -> None:
    quotas = ConnectionQuotas(ConnectionLimits(total=3), protected="B")
    assert admitted(quotas, 9) == 3
    assert not quotas.too_many
    assert admitted(quotas, 2, "B") == 2
    assert quotas.too_many


def test_a_listener_has_a_limit_of_its_own() -> None:
    quotas = ConnectionQuotas(ConnectionLimits(total=10, of_listener={"B": 2}))
    assert admitted(quotas, 9, "B") == 2
    assert admitted(quotas, 20, "A") == 8


def test_an_address_has_a_limit_and_some_have_another() -> None:
    quotas = ConnectionQuotas(ConnectionLimits(per_address=2, of_address={"2.2.2.2": 4, "3.3.3.3": 0}))
    assert [admitted(quotas, 9, address=each) for each in ("1.1.1.1", "2.2.2.2", "3.3.3.3")] == [2, 4, 0]


def test_who_is_gone_makes_room_and_is_forgotten() -> None:
    quotas = ConnectionQuotas(ConnectionLimits(total=50, per_address=1, of_listener={"A": 40}))
    rng = random.Random(4)
    here: list[str] = []
    for _ in range(5000):
        if here and rng.random() < 0.5:
            quotas.release("A", here.pop(rng.randrange(len(here))))
        else:
            address = f"1.1.1.{rng.randrange(60)}"
            assert admitted(quotas, 1, address=address) == (address not in here and len(here) < 40)
            here = list(dict.fromkeys([*here, address])) if len(here) < 40 else here
    for address in here:
        quotas.release("A", address)
    assert (quotas.total, quotas._of_address, quotas._of_listener) == (0, {}, {"A": 0})


def test_beyond_the_rate_connections_wait_for_their_turn_and_then_are_refused() -> None:
    quotas = ConnectionQuotas(ConnectionLimits(rate=10))
    waits = [quotas.admit("A", "1.1.1.1", 100.0) for _ in range(111)]
    with pytest.raises(Refused, match=r"max\.connection\.creation\.rate=10"):
        quotas.admit("A", "1.1.1.1", 100.0)
    assert waits[:10] == [0.0] * 10
    assert waits[11:14] == pytest.approx([0.1, 0.2, 0.3])
    assert 9.8 < waits[-1] <= 10
    assert quotas.total == len(waits)
    assert quotas.admit("A", "1.1.1.1", 120.0) == 0.0


def test_the_brokers_own_listener_has_only_a_rate_of_its_own() -> None:
    quotas = ConnectionQuotas(ConnectionLimits(rate=0, rate_of_listener={"C": 5}), protected="B")
    assert admitted(quotas, 100, "B") == 100
    assert admitted(quotas, 1, "A") == 0
    assert admitted(quotas, 1, "C") == 0


def test_overrides() -> None:
    assert parse_overrides(" 1.1.1.1:5, [::1]:7,host:0,") == {"1.1.1.1": 5, "::1": 7, "host": 0}
    for wrong in ("1.1.1.1", "a:b"):
        with pytest.raises(ValueError):
            parse_overrides(wrong)


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("::FFFF:a00:1", "10.0.0.1"),
        ("10.0.0.1", "10.0.0.1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("2001:DB8::0:1", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("localhost", "localhost"),
        ("a\0b", "a\0b"),
        ("", ""),
    ],
)
def test_an_address_is_written_in_one_way(written: str, plain: str) -> None:
    assert plain_address(written) == plain
    assert parse_overrides(f"{written}:3") == {plain: 3}


def test_a_warning_that_repeats_is_logged_now_and_then_with_how_many_there_were(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    warnings = RepeatedWarnings(logging.getLogger("tidelog.test"), lambda: now)
    for second in range(25):
        now = float(second)
        warnings.warn("kind", f"at {second}")
        if second == 3:
            warnings.warn("other", "something else")
    assert [record.getMessage() for record in caplog.records] == [
        "at 0",
        "something else",
        f"at 10 (and {INTERVAL_S - 1:.0f} times more in the last 10 s)",
        "at 20 (and 9 times more in the last 10 s)",
    ]
