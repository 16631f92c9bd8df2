"""Looks for a history that breaks a rule of storage after a mistake was planted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def assert_caught(make_history: Callable[[int], Any], invariant: str, first_seed: int, count: int) -> None:
    """Run histories until one fails with the name of `invariant` in its error, and fail if none does.

    Args:
        make_history: Makes the history of a seed, which has a method `run`.
        invariant: The rule that the mistake breaks; "" for any error.
        first_seed: The search begins there. A mistake that one history in hundreds meets needs a seed that is known to
            meet it, because a search takes up to half a minute. After a change to histories a later one may do so.
        count: How many seeds are tried.
    """
    others: set[str] = set()
    for seed in range(first_seed, first_seed + count):
        try:
            make_history(seed).run()
        except Exception as error:
            if invariant in str(error):
                return
            others.add(f"{type(error).__name__}: {error}"[:150])
    pytest.fail(f"not caught by {invariant}, only by {sorted(others)[:5]}")
