"""Handles to client processes: start one, order, hear what it reports, know whether it died.

A client that ends by a signal, or with another status than 0, has died: that is a finding of its own.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.cluster.damage.records import ACK
from tests.patience import PATIENCE_S

CHECKOUT = Path(__file__).resolve().parents[3]


class ClientProcess:
    """`reports` is everything it said so far; acknowledgements or records read are in `file`."""

    def __init__(self, directory: Path, name: str, plan: dict[str, Any]) -> None:
        self.name = name
        self.file = directory / f"{name}.records"
        self.file.unlink(missing_ok=True)
        self.reports: list[dict[str, Any]] = []
        self._lines: queue.Queue[bytes] = queue.Queue()
        self._errors = open(directory / f"{name}.stderr", "wb")  # noqa: SIM115
        tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        full = json.dumps({**plan, "file": str(self.file)})
        command = [*tied, sys.executable, "-m", "tests.cluster.damage.client_process", full]
        environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, cwd=CHECKOUT, env=environment
        )
        self._thread = threading.Thread(target=self._hear, daemon=True)
        self._thread.start()

    def _hear(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)

    def hear(self) -> list[dict[str, Any]]:
        """Everything reported so far."""
        while not self._lines.empty():
            self.reports.append(json.loads(self._lines.get()))
        return self.reports

    def order(self, word: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(word.encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            pass  # it has ended; `died` says so

    def ask(self, word: str, key: str, timeout_s: float) -> dict[str, Any] | None:
        """Give an order and wait for a new report that has `key`; None when none comes."""
        before = len([one for one in self.hear() if key in one])
        self.order(word)
        return self.await_report(key, before, timeout_s)

    def await_report(self, key: str, before: int, timeout_s: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = [one for one in self.hear() if key in one]
            if len(found) > before:
                return found[-1]
            if self.process.poll() is not None and self._lines.empty() and not self._thread.is_alive():
                return None
            time.sleep(0.01)
        return None

    @property
    def died(self) -> str | None:
        """How it ended, if it did not end well."""
        status = self.process.poll()
        if status in (None, 0):
            return None
        lines = Path(self._errors.name).read_text(errors="replace").strip().splitlines()
        return f"{self.name} ended with {status}: {' | '.join(lines[-3:])[-400:]}"

    def records(self) -> list[tuple[int, int, int]]:
        """(partition, number, offset) as appended to its file; a torn last line is left out."""
        data = self.file.read_bytes() if self.file.exists() else b""
        return list(ACK.iter_unpack(data[: len(data) // ACK.size * ACK.size]))

    def end(self, timeout_s: float = 5.0) -> None:
        """Let it end by itself, then end it; a client that is ended here has not died."""
        if self.process.poll() is None:
            self.order("end")
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(PATIENCE_S)
                self.process.returncode = 0
        self._thread.join(5)
        self.hear()
        self._errors.close()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass
