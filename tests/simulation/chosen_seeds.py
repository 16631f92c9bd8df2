"""Which seeds a test of histories runs: those of TIDELOG_SEEDS in chunks, or the one of TIDELOG_SEED."""

from __future__ import annotations

import os

CHUNK = 50


def chosen(by_default: int) -> list[range]:
    if "TIDELOG_SEED" in os.environ:
        seed = int(os.environ["TIDELOG_SEED"])
        return [range(seed, seed + 1)]
    count = int(os.environ.get("TIDELOG_SEEDS", by_default))
    return [range(first, min(first + CHUNK, count)) for first in range(0, count, CHUNK)]
