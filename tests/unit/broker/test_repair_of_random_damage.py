"""Random damage in all replicas of a partition, repaired in parts while some of the replicas cannot be reached.

Each batch has two records, so a reader that passes over a damaged batch gets one with another base offset.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.broker.test_repair_parts import Cluster, Replica, scrub_all
from tests.unit.storage.test_damage import batches_of
from tidelog.broker.replicas import whole_copies

SEEDS = (43, 78, 88, *range(13))
"""In the first three a copied part left no bytes for the rest of the range, which looked like one that was cleaned."""
LEFT_BYTES = (0, 0, 0, 7, 70)
"""What a cut leaves of the first batch that it takes: nothing, less than a header, or a part of the records."""


def zero_batches(path: Path, start: int, end: int) -> None:
    data = bytearray(path.read_bytes())
    end = min(end, len(data))
    data[start:end] = bytes(max(0, end - start))
    path.write_bytes(data)


def damage(replica: Replica, segment: int, batches: list[tuple[int, int]], randomness: random.Random) -> None:
    """Zero some batches of a segment, or cut its end off. `batches`: (position, size) of each before any damage."""
    path = replica.logs.folder / replica.logs.files("*.log")[segment]
    first = randomness.randrange(len(batches))
    is_active = segment == replica.log.segment_count - 1
    if is_active or randomness.random() < 0.5:  # the end of the active segment would count as never written
        last = randomness.randrange(first, len(batches))
        zero_batches(path, batches[first][0], sum(batches[last]))
    else:
        os.truncate(path, min(path.stat().st_size, batches[first][0] + randomness.choice(LEFT_BYTES)))
    scrub_all(replica.log)


def check_what_is_lacking(cluster: Cluster, expected: set[int], randomness: random.Random) -> None:
    """No examination and no start forgets damage."""
    assert cluster.here.lacks() == expected
    if randomness.random() < 0.5:
        scrub_all(cluster.here.log)
        assert cluster.here.lacks() == expected
    if randomness.random() < 0.3:
        cluster.here.logs.close_and_open()
        cluster.partition.log = cluster.here.log
        assert cluster.here.lacks() == expected


@pytest.mark.parametrize("cleanup_policy", ["compact", "delete"])
@pytest.mark.parametrize("seed", SEEDS)
async def test_what_one_replica_has_is_repaired_and_what_none_has_stays_damaged(
    tmp_path: Path, seed: int, cleanup_policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_copies, "WHOLE_COPY_WAIT_S", 0.0)  # no cleaner has run: the range alone is right
    randomness = random.Random(seed)
    cluster = Cluster(tmp_path, others=randomness.choice((2, 3)))
    monkeypatch.setattr(cluster, "high_watermark_of", lambda source: cluster.here.log.log_end_offset)
    others = range(1, len(cluster.replicas))
    shape = [batches_of(cluster.here.logs.folder / name) for name in cluster.here.logs.files("*.log")]
    usual_segment = randomness.randrange(len(shape))
    lacking = []
    for number, replica in enumerate(cluster.replicas):
        replica.logs.config = replace(replica.log.config, cleanup_policy=frozenset({cleanup_policy}))
        replica.log.set_config(replica.logs.config)
        replica.logs.directory.write_checkpoints()
        for _ in range(randomness.randint(0 if number else 1, 2)):
            segment = randomness.choice((usual_segment, usual_segment, randomness.randrange(len(shape))))
            damage(replica, segment, shape[segment], randomness)
        lacking.append(replica.lacks())
    for _ in range(randomness.randint(1, 5)):
        cluster.away = set(randomness.sample(others, randomness.randint(0, len(others))))
        before = cluster.here.lacks()
        await cluster.repair()
        after = cluster.here.lacks()
        assert set.intersection(*lacking) <= after <= before
        check_what_is_lacking(cluster, after, randomness)
    cluster.away = set()
    for _ in range(2):
        await cluster.repair()
    assert cluster.here.lacks() == set.intersection(*lacking)
