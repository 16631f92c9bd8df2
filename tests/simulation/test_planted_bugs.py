"""Classic mistakes, planted one at a time, each of which the simulated clusters must catch within 300 seeds.

The histories are the ordinary ones, steered for some plants towards the faults under which the mistake shows (stated
beside it); the same steering without the plant breaks nothing.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.old_truncation import truncate_by_high_watermark
from tests.simulation import planted
from tests.simulation.cluster_history import ClusterHistory
from tests.simulation.planted import Plant

SEEDS = 300

# Leaders that are cut off with clients on their side, so that what they append is not what the others go on with.
DIVERGING = {"weights": {"isolate": 10, "kill_leader": 4, "cut_pair": 2}}

# A vote file that was not synced is an old one, torn or gone. Voters whose votes are lost do not help each other to
# recover them: the histories in which two have lost theirs do not end.
POWER_FAILING = {"weights": {"lose_power": 10, "kill_controller": 10, "lose_power_everywhere": 6}}

# What each may be caught by, and the options of its histories.
PLANTS: list[tuple[Plant, tuple[str, ...], dict[str, Any]]] = [
    (planted.skip_the_fsync_of_a_vote, ("OneLeaderPerEpoch", "HistoriesEnd"), POWER_FAILING),
    (planted.count_the_isr_wrong, ("HighWatermarkIsReplicated", "CommittedRecordsNeverChange"), {}),
    (planted.acknowledge_before_the_high_watermark, ("AcknowledgedIsCommitted",), {}),
    (planted.truncate_too_little, ("EveryReplicaReturns", "CommittedRecordsNeverChange", "HistoriesEnd"), DIVERGING),
    (truncate_by_high_watermark, ("HighWatermarkIsReplicated", "CommittedRecordsNeverChange"), {}),
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


@pytest.mark.hunt
@pytest.mark.parametrize(("plant", "names", "options"), PLANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_planted_bug_is_caught(
    plant: Plant, names: tuple[str, ...], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    if options:
        for seed in range(3):
            ClusterHistory(seed, **options).run()  # the soil itself is sound
    plant(monkeypatch)
    hunt(options, names)
