"""The `tidelog` command: hands its words to `cli/commands.py`, which loads the one command they name.

Exit codes: 0 done, 1 failed (one line on standard error says why), 2 wrong usage.
"""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    from tidelog.cli.commands import run

    return run(sys.argv[1:] if arguments is None else list(arguments))


if __name__ == "__main__":
    sys.exit(main())
