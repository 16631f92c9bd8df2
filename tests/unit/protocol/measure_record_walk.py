"""What looking at produced records costs: python -m tests.unit.protocol.measure_record_walk (docs/decisions/0014)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tidelog.protocol.batches.batch_builder import encode_batch
from tidelog.protocol.batches.record_batch import HEADER_SIZE
from tidelog.protocol.batches.record_walk import check_records
from tidelog.storage.segments.append import admit
from tidelog.storage.segments.append_rules import AppendRules
from tidelog.storage.segments.log_config import LogConfig

NOW_MS = 1_700_000_000_000
ROUNDS, RECORDS_PER_ROUND = 7, 20_000


def best_us(work: Callable[[], object], runs: int) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(runs):
            work()
        best = min(best, (time.process_time() - began) / runs)
    return best * 1e6


def main() -> None:
    rng = random.Random(1)
    for count, size in ((1, 200), (16, 1000), (1000, 1000), (1000, 100)):
        for varies in (False, True):
            sizes = [size + (rng.randint(-size // 5, size // 5) if varies else 0) for _ in range(count)]
            batch = memoryview(encode_batch([(NOW_MS + n // 3, None, bytes(each), ()) for n, each in enumerate(sizes)]))
            us = best_us(
                lambda batch=batch, count=count: check_records(batch, HEADER_SIZE, len(batch), count),  # type: ignore[misc]
                max(5, RECORDS_PER_ROUND // count),
            )
            kind = "lengths that vary" if varies else "one length"
            print(f"{count:5} x {size:5} B, {kind:17}: {us:7.1f} us, {us * 1000 / len(batch):5.2f} s/GB")
    rules = AppendRules(LogConfig())
    values = [(NOW_MS, None, bytes(rng.choices(b"abcdefgh ", k=200)), ()) for _ in range(10)]
    for codec in range(5):
        batch = memoryview(encode_batch(values, compression=codec))

        def produce(batch: memoryview = batch) -> None:
            batch[:8] = bytes(8)
            admit(batch, 0, 0, NOW_MS, rules, True)

        print(f"admit, 10 x 200 B, codec {codec}, {len(batch)} B: {best_us(produce, 2000):.1f} us")


if __name__ == "__main__":
    main()
