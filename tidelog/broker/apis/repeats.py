"""The bound of duplicates in one request, for APIs that answer each duplicate in full.

Without the bound a request of a few kilobytes could have an answer of gigabytes, made in one iteration of the event
loop. Kafka has no bound; no known client sends duplicates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

from tidelog.protocol.errors import ErrorCode, KafkaError

REPEATS_MAX: Final = 10


def check_repeats(names: Iterable[Hashable]) -> None:
    """Raises KafkaError(INVALID_REQUEST), whose text is short: the answer repeats it for each element."""
    for _, times in Counter(names).most_common(1):
        if times > REPEATS_MAX:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"asked for {times} times, above {REPEATS_MAX}")
