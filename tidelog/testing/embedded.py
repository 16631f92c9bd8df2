"""A broker for tests, on a free port: a real node on a thread of the calling process, or in a process
of its own.

The records are in a temporary directory, unless the caller passes one. On a thread the broker shares
the caller's interpreter lock, so it is not for production. Invariant: a broker is stopped or running,
and `start` and `stop` switch between the two any number of times. The state of one run is in a
`_ThreadRun` or a `_ProcessRun`, so that the next run does not see it. A broker keeps its address until it is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tidelog.broker.config.node_config import NodeConfig, as_text
from tidelog.broker.node import Node
from tidelog.broker.node_ports import os_ports
from tidelog.protocol.addresses import address_text
from tidelog.testing.ports import free_port, release_ports
from tidelog.testing.processes import (
    ForkedNode,
    check_keys,
    check_log_directory,
    delete_temporary_directory,
    format_directory,
    make_temporary_directory,
)

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0

_PORT_0 = re.compile(r":0(?=\s*(,|$))")
_LOOPBACK_OF_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where to reach a listener that is bound to every interface."""

Scalar = str | int | float | bool


class EmbeddedBroker:
    """`with EmbeddedBroker() as broker:`; clients connect to `broker.bootstrap_servers`.

    `config`: Kafka's configuration keys, with values of their type or as text. Without a `directory`
    each run has a new one. A new directory gets `cluster_id`, or else an id of its own. `start` raises
    the error that prevents the start: ConfigError, ForeignDirectory, OSError, TimeoutError. With
    `process` the broker is a process of its own, which `kill`, `pause` and `resume` treat as such, and
    the error of its start is ServerFailed.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        config: Mapping[str, Scalar] | None = None,
        *,
        process: bool = False,
        cluster_id: str | None = None,
    ) -> None:
        self.bootstrap_servers = ""
        """host:port of the running broker, else empty."""
        # A test may change its working directory while the broker runs.
        self.directory = Path(directory).resolve() if directory is not None else Path()
        self._is_temporary = directory is None
        if config is not None and not isinstance(config, Mapping):
            raise TypeError(f"config must be a dict of configuration keys, not {config!r}")
        check_keys("config", config or {})
        self._config = {name: as_text(value) for name, value in (config or {}).items()}
        self._in_process = process
        self._cluster_id = cluster_id
        self._lock = threading.Lock()
        self._run: _ThreadRun | _ProcessRun | None = None
        self._owner_pid = os.getpid()
        self._claimed_ports: list[int] = []

    def start(self) -> EmbeddedBroker:
        """Start the broker if it is stopped; returns the broker when it serves."""
        with self._lock:
            if self._run is None:
                if self._is_temporary:
                    self.directory = make_temporary_directory("tidelog-")
                try:
                    self._start()
                except BaseException:
                    if self._run is None:
                        self._clean_up()
                    raise
        return self

    def _start(self) -> None:
        check_log_directory(self.directory)
        options = {
            "listeners": "PLAINTEXT://127.0.0.1:0",
            "log.dirs": str(self.directory),
            "group.initial.rebalance.delay.ms": "0",
        } | self._config
        # The broker keeps its port over restarts. A number that the caller has chosen is the caller's to claim.
        options["listeners"] = _PORT_0.sub(lambda _: f":{self._claim_port()}", options["listeners"])
        config = NodeConfig(options)
        if self._cluster_id is not None:
            format_directory(config.log_dirs[0], config.node_id, self._cluster_id)
        run = _ProcessRun(config, options) if self._in_process else _ThreadRun(config)
        try:
            bootstrap_servers, process_id = run.await_ready(), os.getpid()
        except BaseException:
            run.stop()
            raise
        # Without a call: behind one an interrupt would leave a broker that runs without a way to stop it.
        self._run, self._owner_pid, self.bootstrap_servers = run, process_id, bootstrap_servers

    def _claim_port(self) -> int:
        self._claimed_ports.append(free_port())
        return self._claimed_ports[-1]

    def stop(self) -> None:
        """Stop the broker cleanly if it runs; acknowledged records are on disk. Raises
        TimeoutError; then, or after an interrupt, it can be tried again. A fork of the process that started the
        broker leaves it running.
        """
        if self._run is not None and self._owner_pid != os.getpid():
            return
        with self._lock:
            if self._run is not None:
                self._run.stop()
                self._clean_up()
                self._run = None
                self.bootstrap_servers = ""

    def restart(self) -> None:
        """Start the broker again on its data and its port, and stop it first when it still runs; a killed
        one begins with what the kill left. After an error it can be tried again.
        """
        with self._lock:
            self._running().restart()

    def kill(self) -> None:
        """SIGKILL to the process of the broker; `restart` starts it again. Needs `process`."""
        self._process().kill()

    def pause(self) -> None:
        """SIGSTOP: the broker hangs, its connections stay open and are not answered. Needs `process`."""
        self._process().pause()

    def resume(self) -> None:
        """SIGCONT after `pause`. Needs `process`."""
        self._process().resume()

    def output(self) -> bytes:
        """What the process of the broker has written so far. Empty without `process`: the test's logging has it."""
        run = self._running()
        return run.node.output_file.read_bytes() if isinstance(run, _ProcessRun) else b""

    def _running(self) -> _ThreadRun | _ProcessRun:
        if self._run is None:
            raise RuntimeError("the broker is stopped")
        return self._run

    def _process(self) -> ForkedNode:
        run = self._running()
        if not isinstance(run, _ProcessRun):
            raise RuntimeError("this broker is a thread of the test; use EmbeddedBroker(process=True)")
        return run.node

    def _clean_up(self) -> None:
        release_ports(self._claimed_ports)
        self._claimed_ports.clear()
        if self._is_temporary:
            delete_temporary_directory(self.directory)

    def __enter__(self) -> EmbeddedBroker:
        try:
            return self.start()
        except BaseException:  # an interrupt at its end: `__exit__` does not run after this
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


class _ProcessRun:
    """The node as a process."""

    def __init__(self, config: NodeConfig, options: Mapping[str, str]) -> None:
        address = config.advertised_listeners()[0]
        bound = next((each for each in config.listeners if each.name == address.name), address)
        self._bootstrap_servers = address_text(address.host, address.port)
        # Not in the log directory, where a node accepts no other files.
        self._output_directory = make_temporary_directory("tidelog-output-")
        self.node = ForkedNode(self._output_directory, bound.port, options)
        self.node.host = _LOOPBACK_OF_ANY.get(bound.host, bound.host)

    def await_ready(self) -> str:
        """Wait until the node serves; returns host:port. Raises ServerFailed."""
        self.node.start(START_TIMEOUT_S)
        return self._bootstrap_servers

    def restart(self) -> None:
        self.node.restart(START_TIMEOUT_S)

    def stop(self) -> None:
        self.node.stop(STOP_TIMEOUT_S)
        delete_temporary_directory(self._output_directory)


class _ThreadRun:
    """The node on a thread."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._thread = _NodeThread(config)

    def await_ready(self) -> str:
        """Wait until the node serves; returns host:port. Raises the error that prevents the start."""
        return self._thread.await_ready()

    def restart(self) -> None:
        self.stop()
        self._thread = _NodeThread(self._config)
        self.await_ready()

    def stop(self) -> None:
        self._thread.stop()


class _NodeThread:
    """One thread of the node, from its start to its end."""

    def __init__(self, config: NodeConfig) -> None:
        self._config = config
        self._state_changed = threading.Event()
        self._has_ended = threading.Event()
        """An interrupted `join` of Python 3.11 takes the thread for ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._bootstrap_servers = ""
        self._failure: BaseException | None = None
        self._is_stopping = self._is_cancelled = False
        self._thread = threading.Thread(target=self._main, name="tidelog-embedded", daemon=True)

    def await_ready(self) -> str:
        self._thread.start()
        if not self._state_changed.wait(START_TIMEOUT_S):
            raise TimeoutError(f"the embedded broker was not ready in {START_TIMEOUT_S:.0f} s")
        if self._failure is not None:
            raise self._failure
        return self._bootstrap_servers

    def stop(self) -> None:
        self._is_stopping = True  # set before `_task` is read: a task that begins later sees it
        if self._loop is not None and self._task is not None:
            try:
                self._loop.call_soon_threadsafe(self._cancel, self._task)
            except RuntimeError:
                pass  # the loop has ended by itself
        if self._thread.ident is None:
            return  # an interrupt came before its begin
        if not self._has_ended.wait(STOP_TIMEOUT_S):
            raise TimeoutError(f"the embedded broker did not stop in {STOP_TIMEOUT_S:.0f} s")
        self._thread.join(STOP_TIMEOUT_S)

    def _cancel(self, task: asyncio.Task[None]) -> None:
        """On the loop, once: a second `stop` must not break off what the first one has begun."""
        if not self._is_cancelled:
            self._is_cancelled = True
            task.cancel()

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
            if self._bootstrap_servers:
                logger.error("the embedded broker ended: %s", error)
        finally:
            self._state_changed.set()
            self._has_ended.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        if self._is_stopping:
            return
        node = Node(self._config, os_ports())
        try:
            await node.start()
            self._bootstrap_servers = next(iter(node.addresses().values()))
            self._state_changed.set()
            await node.failed()
        finally:
            await node.stop()
