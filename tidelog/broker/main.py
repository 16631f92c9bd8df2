"""The `tidelog` command."""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 failed, 2 wrong usage."""
    words = sys.argv[1:] if arguments is None else arguments
    if words == ["--version"]:
        from tidelog import __version__

        sys.stdout.write(f"tidelog {__version__}\n")
        return 0
    return 2
