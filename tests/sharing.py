"""Which tests stay together when `pytest -n` spreads them over several processes (`--dist loadgroup`).

Fast tests of a file do, and those that share a node, a cluster or a Spark session that is made once: it would be made
again in each process. Every other slow test goes where a process is free.
"""

from __future__ import annotations

from typing import Any

import pytest

_MADE_ONCE = ("class", "module", "package", "session")
# All files that use these stay together: they are made once for a whole run, and take long.
_FOR_ALL_FILES = ("spark",)


def group_of(item: pytest.Item) -> str | None:
    """The name that the tests of a group have in common; None for a test by itself."""
    file = item.nodeid.partition("::")[0]  # pytest-xdist puts the group behind it
    if not isinstance(item, pytest.Function) or item.get_closest_marker("slow") is None:
        return file
    definitions: dict[str, Any] = item._fixtureinfo.name2fixturedefs
    shared = [
        name
        for name, definition in definitions.items()
        if definition[-1].baseid.startswith("tests") and definition[-1].scope in _MADE_ONCE
    ]
    if common := [name for name in shared if name in _FOR_ALL_FILES]:
        return common[0]
    return file if shared else None


def keep_together(items: list[pytest.Item]) -> None:
    for item in items:
        if (group := group_of(item)) is not None:
            item.add_marker(pytest.mark.xdist_group(group))
