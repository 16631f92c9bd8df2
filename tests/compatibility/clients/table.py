"""The table of docs/compatibility.md that says which version of which API each client asks for, and its columns.

It is made by a run of the matrix (`TIDELOG_COMPAT_TABLE=write`); every other run compares what it sees with it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tests.compatibility.clients.recorder import Seen
from tidelog.protocol.api import SERVED, api_name

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"
BEGIN, END = "<!-- made by a run of the matrix: begin -->", "<!-- end -->"


def rendered(versions: Mapping[str, str], seen: Seen) -> str:
    """Markdown: a column for each client of `versions` (name -> version), a row for each API any of them used."""
    names = list(versions)
    lines = [
        "| API | served | " + " | ".join(names) + " |",
        "|---" * (len(names) + 2) + "|",
        "| | | " + " | ".join(versions.values()) + " |",
    ]
    for key in sorted({key for name in names for key in seen.get(name, {})}):
        served = SERVED[key]
        used = [", ".join(map(str, sorted(seen.get(name, {}).get(key, ())))) for name in names]
        lines.append(f"| {api_name(key)} ({key}) | {served.start}-{served.stop - 1} | " + " | ".join(used) + " |")
    return "\n".join(lines) + "\n"


def write(table: str) -> None:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    assert after, f"{PAGE.name} has no place for the table"
    PAGE.write_text(f"{before}{BEGIN}\n\n{table}\n{END}{after}")


def told() -> tuple[dict[str, str], Seen]:
    """What the page says: the versions of the clients, and what each asks for."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    header, _, second, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    names = header[2:]
    seen: Seen = {name: {} for name in names}
    for api, _, *cells in rows:
        found = re.search(r"\((\d+)\)$", api)
        assert found is not None, api
        for name, cell in zip(names, cells):
            seen[name][int(found[1])] = {int(version) for version in cell.split(",") if version}
    return dict(zip(names, second[2:])), seen
