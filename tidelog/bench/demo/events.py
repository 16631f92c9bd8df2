"""How the demo's processes talk: a child prints one JSON object a line, its parent reads them as they come.

A child also listens on its standard input: the line "stop" asks it to finish, and the end of the input means that the
parent is gone, so that no child outlives the demo whatever happens to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

_LINE_LIMIT_BYTES = 1 << 20
# A child, and the Python workers that Spark starts from one, run this interpreter and this checkout.
_CHECKOUT = str(Path(__file__).resolve().parents[3])
_ENVIRONMENT = {
    **os.environ,
    "PYSPARK_PYTHON": sys.executable,
    "PYSPARK_DRIVER_PYTHON": sys.executable,
    "PYTHONPATH": os.pathsep.join(filter(None, (_CHECKOUT, os.environ.get("PYTHONPATH")))),
}


class ChildFailed(Exception):
    """A child ended before its work was done; the message ends with what it printed last."""


class Stalled(Exception):
    """Nothing has moved for a minute; the message says what was waited for."""


def emit(event: str, **values: Any) -> None:
    """In a child: tells the parent."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


class Child:
    """A Python module run as a process, its events read from its output."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, errors: Path) -> None:
        self.name = name
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, name: str, module: str, arguments: list[str], directory: Path) -> Child:
        """Starts `python -m MODULE ARGUMENTS`; what it prints on standard error goes to a file in `directory`."""
        errors = directory / f"{name.replace(' ', '-')}.log"
        descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                module,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=descriptor,
                env=_ENVIRONMENT,
                start_new_session=True,
                limit=_LINE_LIMIT_BYTES,
            )
        finally:
            os.close(descriptor)
        return cls(name, process, errors)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Every event until the child closes its output; ChildFailed when it ends badly."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(b"{"):
                yield json.loads(line)
        status = await self._process.wait()
        if status != 0:
            raise ChildFailed(f"the {self.name} ended with status {status}:\n{self._last_words()}")

    def tell(self, word: str) -> None:
        """Sends one line to the child; without effect when it has ended."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(word.encode() + b"\n")

    async def end(self, patience_s: float = 3.0) -> None:
        """Makes sure that it and everything it started is gone: asked first, then told, then forced."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        for word in (None, signal.SIGTERM, signal.SIGKILL):
            if word is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, word)
            if await self._gone(patience_s):
                return

    async def _gone(self, patience_s: float) -> bool:
        """Whether no process of the child's group is left, after waiting for it for a while."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while asyncio.get_running_loop().time() < deadline:
            if self._process.returncode is not None:
                try:
                    os.killpg(self._process.pid, 0)
                except ProcessLookupError:
                    return True
            await asyncio.sleep(0.02)
        return False

    def _last_words(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return "\n".join(f"  {line}" for line in lines[-12:])
