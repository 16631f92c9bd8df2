"""The report as one HTML file that needs no network: styles, script and charts are inside it.

A content security policy forbids everything else. Tables sort by a click on a heading. Every text
that was measured or given is escaped.
"""

from __future__ import annotations

from html import escape

from tidelog.bench.page.charts import as_svg
from tidelog.bench.page.markdown import shown, verdict_word
from tidelog.bench.studies.results import Cell, Report, StudyResult, Table, Verdict

_STYLE = """
:root { color-scheme: light dark; --ink: #1d252c; --muted: #5d6a75; --paper: #ffffff; --line: #d9dfe4;
  --good: #12734a; --bad: #b03a1e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ed; --muted: #98a5b0; --paper: #14191e; --line: #323b44; --good: #5fd0a0; --bad: #f0896d; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 68rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.25rem; margin: 3rem 0 .25rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
p, dl, figcaption, .note { color: var(--muted); margin: .25rem 0; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; font-size: .9rem; }
dd { margin: 0; color: var(--ink); }
figure { margin: 1rem 0; } figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { cursor: pointer; } th[aria-sort=ascending]::after { content: " \\2191"; }
th[aria-sort=descending]::after { content: " \\2193"; }
td.n, th.n { text-align: right; } td.long { white-space: normal; min-width: 16rem; }
.yes { color: var(--good); } .no { color: var(--bad); font-weight: 600; }
"""

_SCRIPT = """
for (const head of document.querySelectorAll("th")) {
  head.tabIndex = 0;
  const sort = () => {
    const place = head.cellIndex, body = head.closest("table").tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = row => row.cells[place].dataset.value ?? row.cells[place].textContent;
    const compare = (a, b) => {
      const [x, y] = [Number(a), Number(b)];
      return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
    };
    [...body.rows].sort((a, b) => compare(key(a), key(b)) * (down ? -1 : 1)).forEach(row => body.append(row));
  };
  head.addEventListener("click", sort);
  head.addEventListener("keydown", event => { if (event.key === "Enter") sort(); });
}
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_LONG_CELL_CHARACTERS = 60
_VERDICT_STYLES = {True: "yes", False: "no", None: ""}


def as_html(report: Report, json_name: str = "") -> str:
    """The whole page. `json_name`: the file with the raw figures that lies beside it."""
    numbers = iter(range(1, 1 + sum(len(study.charts) for study in report.studies)))
    facts = {"taken": report.started, "command": report.command}
    facts |= {name: str(value) for name, value in report.machine.items()} | report.versions
    parts = [
        "<h1>Tidelog benchmark report</h1>",
        "<p>All nodes and clients share one machine over loopback: compare lines, not machines.</p>",
        _facts(facts),
    ]
    if json_name:
        parts.append(f'<p>Raw figures: <a href="{escape(json_name)}">{escape(json_name)}</a></p>')
    if report.is_interrupted:
        parts.append('<p class="no">The run was interrupted; studies that are not complete say so.</p>')
    parts += [_study(study, [as_svg(chart, next(numbers)) for chart in study.charts]) for study in report.studies]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>Tidelog benchmark report</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _facts(facts: dict[str, str]) -> str:
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<dl>{rows}</dl>"


def _study(study: StudyResult, drawings: list[str]) -> str:
    parts = [f"<h2>{study.number}. {escape(study.title)}</h2>", f"<p>{escape(study.question)}</p>"]
    if study.kept_from:
        parts.append(f"<p>Kept from an earlier run: {escape(study.kept_from)}.</p>")
    if not study.is_complete:
        parts.append('<p class="no">Not complete.</p>')
    parts.append(_facts(study.parameters | {"took": f"{study.elapsed_s:.0f} s"}))
    for chart, drawing in zip(study.charts, drawings):
        parts.append(f"<figure><h3>{escape(chart.title)}</h3>{drawing}</figure>")
    parts += [_table(table) for table in study.tables]
    if study.verdicts:
        parts.append(_verdicts(study.verdicts))
    parts += [f'<p class="no">Failed: {escape(failure)}</p>' for failure in study.failures]
    return "<section>" + "\n".join(parts) + "</section>"


def _verdicts(verdicts: list[Verdict]) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("law", "broker", "holds", "figures"))
    rows = "".join(
        f'<tr><td class="long">{escape(each.statement)}</td><td>{escape(each.broker)}</td>'
        f'<td class="{_VERDICT_STYLES[each.holds]}">{verdict_word(each.holds)}</td>'
        f'<td class="long">{escape(each.evidence)}</td></tr>'
        for each in verdicts
    )
    return f"<h3>Verdicts</h3>{_whole_table(head, rows)}"


def _table(table: Table) -> str:
    is_number = [
        any(not isinstance(row[place], str | None) for row in table.rows) for place in range(len(table.columns))
    ]
    head = "".join(
        f"<th{' class=n' if number else ''}>{escape(name)}</th>" for name, number in zip(table.columns, is_number)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    return f"{title}{_whole_table(head, body)}{note}"


def _whole_table(head: str, body: str) -> str:
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    if isinstance(cell, str):
        kind = ' class="long"' if len(cell) > _LONG_CELL_CHARACTERS else ""
        return f"<td{kind}>{escape(cell)}</td>"
    value = "" if cell is None else f' data-value="{cell}"'
    return f'<td class="n"{value}>{shown(cell)}</td>'
