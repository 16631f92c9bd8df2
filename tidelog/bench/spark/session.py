"""The process that measures with Spark (`worker.py`): jobs go in, figures come out, each within a time limit.

A process that does not answer is killed with its JVM. The next job gets a new one: a job that hangs fails alone.
Where Spark does not even start, each further job fails at once, for the same reason.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tidelog.bench.raw import BenchError

START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 60.0
_READ_BYTES = 1 << 16
_LOOK_S = 0.5


class Session:
    """The worker inside a `with` block, started for the first job. `log` gets what the JVM prints."""

    def __init__(self, command: Sequence[str], log: Path, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self._command = list(command)
        self._log = log
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._why_not_started = ""

    def do(self, timeout_s: float, **job: Any) -> dict[str, Any]:
        """Run one job. Raises BenchError with its failure, or when it is not done in time."""
        process = self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            pass  # it has ended: there is no answer either
        answer = self._receive(process, timeout_s, f"Spark has not done the job {job.get('kind')!r}")
        if "failure" in answer:
            raise BenchError(answer["failure"])
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        if self._why_not_started:
            raise BenchError(self._why_not_started)
        if self._process is None:
            with self._log.open("ab") as log:
                # A group of its own, with the JVM: both are killed together.
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                )
            try:
                self._receive(self._process, self._start_timeout_s, "Spark has not started")
            except BenchError as error:
                self._why_not_started = str(error)
                raise
        return self._process

    def _receive(self, process: subprocess.Popen[bytes], timeout_s: float, what: str) -> dict[str, Any]:
        """The next answer. Without one the process is killed, and BenchError says why."""
        assert process.stdout is not None
        line = b""
        deadline_s = time.monotonic() + timeout_s
        waiting = select.poll()
        waiting.register(process.stdout, select.POLLIN)
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            # A JVM that has the pipe too keeps it open when the process ends.
            if not waiting.poll(min(_LOOK_S, left_s) * 1000) and process.poll() is None:
                if left_s:
                    continue
                self._kill()
                raise BenchError(f"{what} after {timeout_s:g} s")
            part = os.read(process.stdout.fileno(), _READ_BYTES) if waiting.poll(0) else b""
            if not part:
                self._kill()
                raise BenchError(f"the Spark session has ended: {self._last_words()}")
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:
                pass  # a job that was not sent is still in the buffer

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        try:
            if process is not None and error is None:
                assert process.stdin is not None
                process.stdin.close()
                process.wait(_STOP_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._kill()
