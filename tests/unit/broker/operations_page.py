"""The table of metrics in `docs/operations.md`, rendered from the definitions; run as a module it is rewritten."""

from __future__ import annotations

from pathlib import Path

from tidelog.broker.metrics.definitions import METRICS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
BEGIN, END = "<!-- metrics: generated -->\n", "<!-- end of metrics -->"


def table() -> str:
    lines = ["", "| metric | type | labels | | Kafka's |", "|---|---|---|---|---|"]
    for metric in METRICS.values():
        labels = " ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} | {metric.kafka} |")
    return "\n".join([*lines, "", ""])


def parts(page: str) -> tuple[str, str, str]:
    """What is before the table, the table, what is behind it."""
    before, _, rest = page.partition(BEGIN)
    found, end, behind = rest.partition(END)
    assert end, "docs/operations.md has lost the marks around its table"
    return before + BEGIN, found, end + behind


if __name__ == "__main__":
    before, _, behind = parts(PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(before + table() + behind, encoding="utf-8")
