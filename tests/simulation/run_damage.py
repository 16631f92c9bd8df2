"""Run many histories with bad disks, as `run_cluster` runs the others.

python -m tests.simulation.run_damage --seeds 500 --first 0 --jobs 1
python -m tests.simulation.run_damage --first 7 --seeds 1 --verbose      the report of one history
python -m tests.simulation.run_damage --minimise 7                       the fewest faults that still break it
"""

from __future__ import annotations

import sys

from tests.simulation import run_cluster
from tests.simulation.damage_history import DamageHistory


def main(arguments: list[str] | None = None) -> int:
    return run_cluster.main(arguments, DamageHistory, __doc__)


if __name__ == "__main__":
    sys.exit(main())
