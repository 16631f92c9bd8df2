"""`python -m tidelog.bench` is `tidelog bench`."""

from __future__ import annotations

from tidelog.bench.command import command

if __name__ == "__main__":
    command(prog_name="python -m tidelog.bench")
