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
    except (KeyboardInterrupt, RuntimeError) as error:  # before a command is there that handles it
        # CPython 3.11 raises a RuntimeError for an interrupt while it makes a class.
        if not isinstance(error, KeyboardInterrupt) and not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        sys.stderr.write("tidelog: interrupted\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
