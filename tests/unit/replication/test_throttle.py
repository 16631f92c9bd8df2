"""Which replicas a topic's list of throttled replicas names."""

from __future__ import annotations

import pytest

from tidelog.replication.throttle import is_throttled


@pytest.mark.parametrize(
    ("replicas", "named"),
    [
        (None, False),
        ("", False),
        ("*", True),
        ("3:1", True),
        ("0:1, 3:1 ,4:1", True),
        ("3:2,1:3", False),
        ("33:1,3:11", False),
    ],
)
def test_a_replica_is_named_by_its_partition_and_its_broker(replicas: str | None, named: bool) -> None:
    assert is_throttled(replicas, 3, 1) is named


def test_the_list_of_a_topic_is_taken_apart_once_for_all_its_partitions() -> None:
    """A tool that moves a topic of thousands of partitions names each of them."""

    class Watched(str):
        taken_apart = 0

        def split(self, *args: object) -> list[str]:
            Watched.taken_apart += 1
            return str.split(self, ",")

    both = [Watched(",".join(f"{index}:{node}" for index in range(100))) for node in (1, 2)]
    for index in range(100):
        assert [is_throttled(replicas, index, 1) for replicas in both] == [True, False]
    assert Watched.taken_apart == 2
