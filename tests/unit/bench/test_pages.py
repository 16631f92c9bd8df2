"""The tables of the documentation are the tables of the code."""

from __future__ import annotations

import re
from pathlib import Path

from tidelog.bench import compare
from tidelog.protocol.api import SERVED, api_name

DOCS = Path(__file__).parents[3] / "docs"


def test_the_apis_of_the_compatibility_page_are_those_served() -> None:
    page = (DOCS / "compatibility.md").read_text()
    rows = re.findall(r"\| (\w+) \| (\d+) \| (\d+)-(\d+) (?=\|)", page)
    told = {int(key): (name, range(int(first), int(last) + 1)) for name, key, first, last in rows}
    assert told == {int(key): (api_name(key), versions) for key, versions in SERVED.items()}


def test_every_row_of_the_benchmark_is_on_its_page() -> None:
    page = (DOCS / "benchmarks.md").read_text()
    for scenario in compare.catalogue():
        assert f"`{scenario.name}`" in page
