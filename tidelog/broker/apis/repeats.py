"""How often one request may name the same thing, where its answer tells all about it each time.

A request of a few kilobytes could otherwise have an answer of gigabytes, made in one turn of the loop. Kafka answers
any number of times; no client known to us names anything twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

from tidelog.protocol.errors import ErrorCode, KafkaError

REPEATS_MAX: Final = 10


def check_repeats(names: Iterable[Hashable]) -> None:
    """Raises KafkaError(INVALID_REQUEST)."""
    for name, times in Counter(names).most_common(1):
        if times > REPEATS_MAX:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"{name} is asked for {times} times, above {REPEATS_MAX}")
