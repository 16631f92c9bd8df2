"""The `tidelog` command: hands the words over to the one command they name.

`tidelog start` is on the path to readiness, so the plain forms of it are read here without click; everything else,
help and mistakes included, goes through `cli/commands.py`. Nothing but the standard library is imported at the top.
Exit codes: 0 done, 1 failed (one line on standard error says why), 2 wrong usage.
"""

from __future__ import annotations

import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        from tidelog import __version__

        sys.stdout.write(f"tidelog {__version__}\n")
        return 0
    if words[:1] == ["start"]:
        plain = plain_start(words[1:])
        if plain is not None:
            from tidelog.broker.cli.start import start

            return start(*plain)
    from tidelog.broker.cli.commands import run

    return run(words)


def plain_start(words: list[str]) -> tuple[str | None, dict[str, str]] | None:
    """The file and the overrides of `tidelog start [FILE] [-o key=value]...`; None when click must look at it."""
    file: str | None = None
    overrides: dict[str, str] = {}
    pending = iter(words)
    for word in pending:
        if word in ("-o", "--override"):
            key, equals, value = next(pending, "").partition("=")
            if not equals or not key:
                return None
            overrides[key.strip()] = value.strip()
        elif word.startswith("-") or file is not None:
            return None
        else:
            file = word
    return file, overrides


if __name__ == "__main__":
    sys.exit(main())
