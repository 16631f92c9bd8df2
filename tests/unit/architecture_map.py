"""The map in `docs/ARCHITECTURE.md`: a line for each room and file, from its docstring. Run as a module, writes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tidelog"
PAGE = ROOT / "docs" / "ARCHITECTURE.md"
BEGIN = "<!-- Begin of the map: python -m tests.unit.architecture_map writes it. -->\n"
END = "<!-- End of the map. -->\n"
# Rooms of which every file is of one kind: their own line says enough.
ALIKE = ("protocol/messages",)


def docstring(source: str) -> str:
    """A module's docstring, read as text: to parse all modules takes seconds."""
    found = re.match(r'\s*[rR]?"""(.+?)"""', source, re.DOTALL)
    return found[1] if found else ""


def first_sentence(path: Path) -> str:
    """Of a module's docstring, without its full stop; up to a colon that the next sentence belongs to."""
    paragraph = " ".join(docstring(path.read_text()).strip().partition("\n\n")[0].split())
    sentence = re.match(r"(.+?\.)(?= [A-Z`]|$)", paragraph)
    return (sentence[1] if sentence else paragraph).rstrip(".")


def lines_of(room: Path, depth: int) -> Iterator[str]:
    indent = "  " * depth
    if depth:
        yield f"{'  ' * (depth - 1)}{room.name}/ - {first_sentence(room / '__init__.py')}"
    if str(room.relative_to(PACKAGE)) in ALIKE:
        return
    for path in sorted(room.glob("*.py")):
        if path.name != "__init__.py":
            yield f"{indent}{path.name} - {first_sentence(path)}"
    for inner in sorted(path for path in room.iterdir() if (path / "__init__.py").is_file()):
        yield from lines_of(inner, depth + 1)


def rendered() -> str:
    """The page as it should be: its prose as it is, the map anew."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    tree = "\n".join(lines_of(PACKAGE, 0))
    return f"{before}{BEGIN}\n```text\n{tree}\n```\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rendered())
