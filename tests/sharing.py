"""Which tests stay together when `pytest -n 3 --dist loadscope` spreads them over several processes.

Those of a file do: what they share (a node, compiled codecs) is made once. Where each test starts processes of its own,
or simulates for seconds, each goes where a process is free; all that use the one Spark session stay together.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]
ONE_BY_ONE = ("tests/cluster/", "tests/demo/", "tests/simulation/")
TOGETHER = ("tests/spark/",)


def scope_of(node_id: str) -> str:
    """What the tests that stay together have in common; the whole id where a test goes by itself."""
    file = node_id.partition("::")[0]
    for folder in TOGETHER:
        if file.startswith(folder):
            return folder
    return node_id if file.startswith(ONE_BY_ONE) and not makes_something_once(file) else file


@cache
def makes_something_once(file: str) -> bool:
    """Whether the file has a fixture for more than one test."""
    return re.search(r'scope="(class|module|package|session)"', (ROOT / file).read_text()) is not None


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)
