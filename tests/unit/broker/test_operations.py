"""What `docs/operations.md` and the Grafana dashboard say of the metrics is what a scrape says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.broker import operations_page
from tests.unit.broker.conftest import StartNode
from tests.unit.broker.scraping import Scrape, live, scrape
from tidelog.broker.metrics.definitions import HISTOGRAM, METRICS

DASHBOARD = Path(__file__).resolve().parents[3] / "docs" / "grafana-dashboard.json"
OF_PROMETHEUS = {"instance", "job", "le"}


def test_the_table_of_metrics_is_what_the_definitions_say():
    _, found, _ = operations_page.parts(operations_page.PAGE.read_text(encoding="utf-8"))
    assert found == operations_page.table(), "run: python -m tests.unit.broker.operations_page"


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def expressions() -> Iterator[tuple[str, str]]:
    """Every query of the dashboard with its legend, those of its variables too."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"], ""


def metrics_in(text: str) -> set[str]:
    return set(re.findall(r"\b(?:tidelog|process|python)_[a-z_]+", text))


def labels_in(expression: str, legend: str) -> set[str]:
    by = re.findall(r"\b(?:by|on|without|ignoring) \(([a-z_, ]+)\)", expression)
    matched = re.findall(r"([a-z_]+)(?:=~|!~|!=|=)\"", expression)
    return {*re.findall(r"\w+", " ".join(by)), *matched, *re.findall(r"{{(\w+)}}", legend)}


def known(metric: str) -> str:
    """The table's name of a series' metric."""
    base = re.sub(r"_(bucket|sum|count)$", "", metric)
    return base if base in METRICS and METRICS[base].kind == HISTOGRAM else metric


@pytest.fixture
async def found(start_node: StartNode) -> Scrape:
    node = await start_node(**{"metrics.port": "0"})
    await live(await node.connect())
    return await scrape(node)


async def test_every_metric_of_the_dashboard_is_in_a_scrape(found: Scrape):
    told = {name for name, _ in found.series}
    shown = {metric for expression, _ in expressions() for metric in metrics_in(expression)}
    assert shown <= told
    assert len(shown) > 40


async def test_every_metric_that_the_page_names_is_in_a_scrape(found: Scrape):
    told = {name for name, _ in found.series}
    page = operations_page.PAGE.read_text(encoding="utf-8")
    named = {metric for metric in metrics_in(page) if not metric.endswith("_")}
    assert {known(metric) for metric in named} <= {known(name) for name in told}


def test_every_label_of_the_dashboard_is_one_of_its_metrics():
    for expression, legend in expressions():
        there = {label for metric in metrics_in(expression) for label in _labels(metric)} | OF_PROMETHEUS
        assert labels_in(expression, legend) <= there, expression


def _labels(metric: str) -> tuple[str, ...]:
    return METRICS[known(metric)].labels if known(metric) in METRICS else ()


def test_an_unknown_metric_or_label_would_be_noticed():
    expression = 'sum by (topic) (rate(tidelog_no_such_total{apy="x"}[5m]))'
    assert metrics_in(expression) == {"tidelog_no_such_total"}
    assert labels_in(expression, "{{node}}") == {"topic", "apy", "node"}


def test_the_dashboard_can_be_imported():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
    assert [each["name"] for each in dashboard()["templating"]["list"]] == ["datasource", "job", "instance"]


def test_no_two_panels_lie_on_each_other():
    taken: set[tuple[int, int]] = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
