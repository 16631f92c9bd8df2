"""The `tidelog` command: passes its arguments to `cli/commands.py`, which loads the command.

Exit codes: 0 done, 1 failed (with one line on standard error), 2 wrong usage.
"""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        from tidelog.cli.commands import run

        return run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:  # before a command is there that handles it
        sys.stderr.write("tidelog: interrupted\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
