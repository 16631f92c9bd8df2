"""The benchmark report as a page: what is in it, what is escaped, and that a real browser draws it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tidelog.bench.compare import OURS, THEIRS
from tidelog.bench.figures import percentile
from tidelog.bench.page.charts import as_svg
from tidelog.bench.page.html import as_html
from tidelog.bench.page.markdown import as_markdown, shown
from tidelog.bench.studies.command import write
from tidelog.bench.studies.results import (
    Chart,
    Mark,
    Report,
    Series,
    StudyResult,
    Table,
    Verdict,
    rate_over_time,
)

BROWSER = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
# Reports what the page looks like once it is laid out, and that sorting works.
PROBE = """
<script>
const boxes = [...document.querySelectorAll("svg")].map(each => each.getBoundingClientRect());
const head = document.querySelector("th.n"), place = head.cellIndex;
const column = () => [...head.closest("table").tBodies[0].rows].map(row => row.cells[place].textContent);
head.click(); const up = column(); head.click(); const down = column();
document.body.dataset.seen = JSON.stringify({
  drawn: boxes.filter(box => box.width > 300 && box.height > 100).length,
  lines: document.querySelectorAll("svg path").length, up, down,
});
</script>
"""


def report() -> Report:
    table = Table("Records a second", ["setting", "rate"], [["a|b", 10.0], ["<b>c</b>", 9.0], ["d", 1234], ["e", None]])
    lines = [
        Series("tidelog, acks=all", OURS, [(1, 10.0), (2, 20.0)], "all"),
        Series("kafka, acks=all", THEIRS, [(1, 5.0), (2, 6.0)], "all"),
    ]
    chart = Chart("Rate <of> records", "replicas", "records a second", lines, [Mark(1.5, "kill")], y_is_log=True)
    other = Chart("Again", "seconds", "records", [Series("tidelog", OURS, [(0.5, 0.0), (1.5, 3.0)])])
    empty = Chart("Nothing measured", "seconds", "records", [Series("tidelog", OURS, [])])
    study = StudyResult(5, "Kills", "What is lost?", {"nodes": "4"}, [table], [chart, other, empty])
    study.verdicts = [Verdict("nothing is lost", OURS, True, "0"), Verdict("x < y", THEIRS, False, "2 & 1")]
    study.failures = ["kafka: <did not start>"]
    return Report("2026-01-01 00:00 UTC", "tidelog bench report", {"cpus": 2}, {"tidelog": "0.1.0"}, [study])


def test_a_report_goes_to_json_and_back() -> None:
    assert Report.from_json(report().to_json()) == report()


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 2}', '{"format": 1, "studies": []}', "null"])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"report|Expecting"):
        Report.from_json(text)


def test_studies_of_an_earlier_report_are_kept_with_their_origin() -> None:
    earlier = Report("monday", "report --full", {}, {})
    for number in (1, 2, 3, 5):
        tables = [Table("figures", ["one"], [[1]])] if number != 5 else []  # of the last one nothing was measured
        earlier.studies.append(StudyResult(number, f"study {number}", "", tables=tables, is_complete=number != 3))
    now = Report("tuesday", "report --scenario 2", {}, {})
    now.keep(earlier, [2])
    assert [(study.number, study.is_complete) for study in now.studies] == [(1, True), (3, False)]
    later = Report("wednesday", "report --scenario 4", {}, {})
    later.keep(Report.from_json(now.to_json()), [4])
    assert [study.kept_from for study in later.studies] == ["monday, report --full"] * 2
    assert "Kept from an earlier run: monday, report --full." in as_markdown(later)
    assert "Kept from an earlier run: monday, report --full." in as_html(later, "report.json")


@pytest.mark.slow
def test_texts_are_escaped() -> None:
    page = as_html(report(), "report.json")
    assert "<b>c</b>" not in page
    assert "&lt;b&gt;c&lt;/b&gt;" in page
    assert "<did" not in page
    assert "x &lt; y" in page
    assert "a\\|b" in as_markdown(report())


@pytest.mark.slow
def test_the_page_needs_no_network() -> None:
    page = as_html(report(), "report.json")
    assert "default-src 'none'" in page
    addresses = set(re.findall(r'(?:src|href)="([^"]*)"', page))
    assert {address for address in addresses if not address.startswith("#")} == {"report.json"}
    assert "url(http" not in page
    assert "@import" not in page


@pytest.mark.slow
def test_every_id_of_a_page_is_there_once() -> None:
    page = as_html(report())
    ids = re.findall(r'\bid="([^"]*)"', page)
    assert ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:xlink:href|href)="#([^"]*)"', page)) <= set(ids)
    assert set(re.findall(r"url\(#([^)]*)\)", page)) <= set(ids)


def test_a_chart_takes_the_colour_of_the_page_and_fits_its_width() -> None:
    drawn = as_svg(report().studies[0].charts[0], 1)
    assert "currentColor" in drawn
    assert "#010203" not in drawn
    opening = drawn[: drawn.index(">")]
    assert "viewBox" in opening
    assert not re.search(r'\s(width|height)="', opening)


@pytest.mark.slow
def test_the_summary_shows_charts_that_are_files_of_their_own(tmp_path: Path) -> None:
    found = report()
    write(found, tmp_path)
    shown_files = re.findall(r"^!\[.+\]\((.+)\)$", (tmp_path / "report.md").read_text(), re.MULTILINE)
    assert len(shown_files) == sum(len(study.charts) for study in found.studies) > 0
    for file in shown_files:
        drawn = (tmp_path / file).read_text()
        assert ElementTree.fromstring(drawn).get("width")
        assert "currentColor" not in drawn
        assert "#010203" not in drawn
    first = ElementTree.parse(tmp_path / shown_files[0]).getroot()
    assert found.studies[0].charts[0].title in "".join(first.itertext())


@pytest.mark.slow
def test_a_study_that_is_not_complete_says_so() -> None:
    found = report()
    assert "Not complete" in as_html(found)
    assert "Not complete" in as_markdown(found)
    found.studies[0].is_complete = True
    assert "Not complete" not in as_html(found)
    assert "Not complete" not in as_markdown(found)


@pytest.mark.parametrize(
    ("cell", "text"), [(None, "-"), ("x", "x"), (12345, "12,345"), (1234.5, "1,234"), (0.01234, "0.0123"), (0, "0")]
)
def test_a_cell_has_three_digits(cell: str | float | int | None, text: str) -> None:
    assert shown(cell) == text


def test_percentiles_are_by_nearest_rank() -> None:
    ordered = [float(value) for value in range(1, 101)]
    assert [percentile(ordered, each) for each in (0, 50, 99, 99.99)] == [1.0, 51.0, 100.0, 100.0]
    assert percentile([], 50) is None


def test_rates_are_counted_in_steps() -> None:
    assert rate_over_time([0.1, 0.2, 0.6, 9.0], 0.5, 1.0) == [(0.25, 4.0), (0.75, 2.0)]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no browser (make clients installs chromium where apt can)")
def test_a_real_browser_draws_every_chart_without_an_error(tmp_path: Path) -> None:
    assert BROWSER is not None
    page = tmp_path / "report.html"
    page.write_text(as_html(report(), "report.json").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    common = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*common, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    match = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert match is not None, done.stderr[-1000:]
    seen = json.loads(match[1].replace("&quot;", '"'))
    assert seen["drawn"] == 3
    assert seen["lines"] > 10
    assert seen["up"] == ["-", "9", "10", "1,234"]
    assert seen["down"] == seen["up"][::-1]
    picture = tmp_path / "page.png"
    subprocess.run([*common, f"--screenshot={picture}", page.as_uri()], capture_output=True, timeout=240, check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
