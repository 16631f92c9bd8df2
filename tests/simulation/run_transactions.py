"""Run many histories of transactions, as `run_cluster` runs the others.

python -m tests.simulation.run_transactions --seeds 10000 --first 0 --jobs 2
python -m tests.simulation.run_transactions --first 7 --seeds 1 --verbose      the report of one history
python -m tests.simulation.run_transactions --minimise 7                       the fewest faults that still break it
"""

from __future__ import annotations

import sys

from tests.simulation import run_cluster
from tests.simulation.transaction_history import TransactionHistory


def main(arguments: list[str] | None = None) -> int:
    return run_cluster.main(arguments, TransactionHistory, __doc__)


if __name__ == "__main__":
    sys.exit(main())
