"""Run many histories of the storage simulation from the command line: python -m tests.simulation.run_storage -h."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback

from tests.simulation.storage_history import History


def main() -> int:
    parser = argparse.ArgumentParser(description="Seeded histories of a log on a disk that loses what was not synced.")
    parser.add_argument("--seeds", type=int, default=300, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="replay this one and show what it does")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    first, count = arguments.first, arguments.seeds
    if arguments.seed is not None:
        first, count = arguments.seed, 1
    began, failures, crashes = time.process_time(), 0, 0
    for seed in range(first, first + count):
        history = History(seed)
        try:
            history.run()
        except Exception:
            failures += 1
            traceback.print_exc()
            print(f"replay with: python -m tests.simulation.run_storage --seed {seed}", file=sys.stderr)
        crashes += history.crashes
        if arguments.seed is not None:
            print("\n".join(history.steps))
    seconds = time.process_time() - began
    print(f"{count} histories, {crashes} crashes, {failures} failures, {1000 * seconds / count:.1f} ms CPU each")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
