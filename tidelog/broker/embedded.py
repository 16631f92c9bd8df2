"""A broker inside the calling process, for tests: a real node on a thread of its own, on a port of its own choice.

Records live in a directory that is removed at the end, unless one is given. Not for production: it shares the caller's
interpreter lock.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tidelog.broker.config import NodeConfig
from tidelog.broker.node import run_node

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


class EmbeddedBroker:
    """`with EmbeddedBroker() as broker:` and clients connect to `broker.bootstrap_servers`.

    `config`: Kafka's configuration keys, as text. Raises what `run_node` raises when it cannot start.
    """

    def __init__(self, directory: str | Path | None = None, config: Mapping[str, str] | None = None) -> None:
        self.bootstrap_servers = ""
        self.directory = Path(directory) if directory is not None else Path()
        self._is_temporary = directory is None
        self._config = dict(config or {})
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> EmbeddedBroker:
        if self._is_temporary:
            self.directory = Path(tempfile.mkdtemp(prefix="tidelog-"))
        defaults = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": str(self.directory),
            "group.initial.rebalance.delay.ms": "0",
        }
        try:
            config = NodeConfig(defaults | self._config)
        except BaseException:
            self.stop()
            raise
        self._thread = threading.Thread(target=self._run, args=(config,), name="tidelog-embedded", daemon=True)
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_S):
            self.stop()
            raise TimeoutError(f"the embedded broker was not ready in {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self.stop()
            raise failure
        return self

    def stop(self) -> None:
        """Shut down cleanly; what was acknowledged is on disk. May be called again."""
        if self._loop is not None and self._task is not None and self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            self._thread = None
        if self._is_temporary and self.directory != Path():
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, config: NodeConfig) -> None:
        try:
            asyncio.run(self._serve(config))
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self, config: NodeConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        await run_node(config, self._announce)

    def _announce(self, line: str) -> None:
        # "... ready: PLAINTEXT://127.0.0.1:9092 (cluster ..."
        self.bootstrap_servers = line.partition(" ready: ")[2].partition(" (")[0].partition("://")[2]
        self._ready.set()
