"""Classic mistakes, planted one at a time, each of which the simulated clusters must catch within 1,000 seeds.

The histories are the ordinary ones, steered for some plants towards the faults under which the mistake shows (stated
beside it); the same steering without the plant breaks nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.simulation import planted
from tests.simulation.cluster_history import ClusterHistory
from tests.simulation.planted import Plant

SEEDS = 1_000

# What each is to be caught by, and the options of its histories.
PLANTS: list[tuple[Plant, tuple[str, ...], dict[str, Any]]] = [
    (planted.skip_the_fsync_of_a_vote, (), {}),
    (planted.forget_the_vote, (), {}),
    (planted.count_the_isr_wrong, (), {}),
    (planted.acknowledge_before_the_high_watermark, ("AcknowledgedIsCommitted",), {}),
    (planted.truncate_too_little, (), {}),
    (planted.truncate_by_high_watermark, (), {}),
]


def hunt(options: dict[str, Any], names: tuple[str, ...], seeds: int = SEEDS) -> tuple[int, str]:
    """The first seed that breaks what is expected, and how."""
    others: set[str] = set()
    for seed in range(seeds):
        try:
            ClusterHistory(seed, **options).run()
        except Exception as error:
            name = str(error).partition(":")[0]
            if not names or name in names:
                return seed, str(error)
            others.add(name)
    pytest.fail(f"not caught by {names} in {seeds} histories, only by {sorted(others)}")


@pytest.mark.slow
@pytest.mark.parametrize(("plant", "names", "options"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_caught(
    plant: Plant, names: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    plant(monkeypatch)
    hunt(options, names)
