"""Shares, deviation rates, spread and alarms, against figures worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.replication.controller.decisions.balance import assess


def test_an_even_cluster_has_even_shares() -> None:
    found = assess({"leaders": {1: 5, 2: 5, 3: 5, 4: 5}, "bytes in": {1: 9, 2: 9, 3: 9, 4: 9}})
    assert list(found.shares.values()) == [0.25] * 4
    assert found.spread == 0
    assert found.spread_max == pytest.approx(0.025)
    assert found.deviating == []
    assert not found.is_spread_too_wide


def test_worked_by_hand() -> None:
    """leaders 6 2 0 0 of 8, cpu 1 1 1 1 of 4: loads 1.0 0.5 0.25 0.25 of 2."""
    found = assess({"leaders": {1: 6, 2: 2, 3: 0, 4: 0}, "cpu": {1: 1, 2: 1, 3: 1, 4: 1}})
    assert found.measure_shares["leaders"] == {1: 0.75, 2: 0.25, 3: 0, 4: 0}
    assert list(found.shares.values()) == [0.5, 0.25, 0.125, 0.125]
    assert list(found.deviations.values()) == [1.0, 0.0, 0.5, 0.5]
    assert found.deviating == [1, 3, 4]
    assert found.spread == pytest.approx(((0.25**2 + 0 + 0.125**2 + 0.125**2) / 4) ** 0.5)
    assert found.is_spread_too_wide


def test_the_alarms_begin_above_their_limits() -> None:
    within = assess({"leaders": {1: 109, 2: 91, 3: 100, 4: 100}})
    assert within.deviations[1] == pytest.approx(0.09)
    assert within.deviating == []
    beyond = assess({"leaders": {1: 111, 2: 89, 3: 100, 4: 100}})
    assert beyond.deviating == [1, 2]
    assert not beyond.is_spread_too_wide, "two small deviations are not a wide spread"


def test_weights_decide_what_counts() -> None:
    measures = {"leaders": {1: 3, 2: 1}, "cpu": {1: 1, 2: 3}}
    assert assess(measures).shares[1] == 0.5
    assert assess(measures, {"leaders": 1, "cpu": 3}).shares[1] == pytest.approx((0.75 + 3 * 0.25) / 4)
    assert assess(measures, {"leaders": 1}).shares[1] == 0.75


def test_what_is_zero_everywhere_says_nothing() -> None:
    found = assess({"leaders": {1: 1, 2: 1}, "disk read": {1: 0, 2: 0}})
    assert "disk read" not in found.measure_shares
    assert found.shares[1] == 0.5
    idle = assess({"leaders": {1: 0, 2: 0}})
    assert list(idle.shares.values()) == [0.5, 0.5]
    assert idle.deviating == []


@given(
    st.integers(1, 9).flatmap(
        lambda count: st.dictionaries(
            st.sampled_from("abcd"),
            st.fixed_dictionaries({broker: st.floats(0, 1e12) for broker in range(count)}),
            min_size=1,
        )
    )
)
def test_shares_add_up(measures: dict[str, dict[int, float]]) -> None:
    found = assess(measures)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert all(share >= 0 for share in found.shares.values())


def test_what_is_negligible_says_nothing() -> None:
    """Idle processes differ by a page here and a file there."""
    idle = {"cpu": {1: 0.001, 2: 0.004}, "leaders": {1: 5.0, 2: 5.0}}
    assert assess(idle).deviating == [1, 2]
    result = assess(idle, negligible={"cpu": 0.01, "leaders": 1.0})
    assert (result.deviating, list(result.measure_shares)) == ([], ["leaders"])
    busy = {"cpu": {1: 0.9, 2: 0.1}}
    assert assess(busy, negligible={"cpu": 0.5}).deviating == [1, 2]
    assert assess(busy, negligible={"cpu": 0.51}).shares == {1: 0.5, 2: 0.5}
