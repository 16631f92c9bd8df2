"""A cluster for tests: several nodes on loopback, each a process of its own, and a network that can be cut.

`kill`, `pause`, `restart` and `cut` are faults, and `restore` ends all of them. Invariant: the
processes, the proxies and the temporary directory end with the `with` block, and at the latest with
this interpreter.
"""

from __future__ import annotations

import signal
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tidelog.testing.layout import CLIENTS, NodeLayout, cluster_layout
from tidelog.testing.links import Links
from tidelog.testing.ports import free_port, release_ports
from tidelog.testing.processes import (
    ForkedNode,
    ServerFailed,
    ServerProcess,
    TidelogProcess,
    check_keys,
    check_log_directory,
    delete_temporary_directory,
    listed_brokers,
    make_temporary_directory,
    own_temporary_directory,
    random_uuid,
)

Scalar = str | int | float | bool
MakeNode = Callable[[NodeLayout, Path, Mapping[str, str]], ServerProcess]

_POLL_S = 0.005
_DEFAULTS = {"group.initial.rebalance.delay.ms": "0"}


def forked_node(layout: NodeLayout, directory: Path, options: Mapping[str, str]) -> ServerProcess:
    """A Tidelog node that is ready at once (`processes.py:ForkedNode`)."""
    return ForkedNode(directory, layout.port, options)


def tidelog_node(layout: NodeLayout, directory: Path, options: Mapping[str, str]) -> ServerProcess:
    """A Tidelog node as the command line starts it."""
    return TidelogProcess(directory, layout.port, options)


class EmbeddedCluster:
    """`with EmbeddedCluster(brokers=3) as cluster:`; clients connect to `cluster.bootstrap_servers`.

    Brokers have the ids from 1 on, `controllers` that many dedicated controllers the ids after them.
    `config`: Kafka's configuration keys for every node, `node_config` for one node by its id. Without
    a `directory` each start has a new, temporary one. `cuttable` puts a proxy into every connection,
    so that `cut` can hold it; then nodes are to be killed and started through the cluster.
    `make_node` makes another kind of node. Everything that waits raises ServerFailed after its
    `timeout_s`, with the end of the node's output.
    """

    def __init__(
        self,
        brokers: int = 3,
        directory: str | Path | None = None,
        *,
        controllers: int = 0,
        config: Mapping[str, Scalar] | None = None,
        node_config: Mapping[int, Mapping[str, Scalar]] | None = None,
        cuttable: bool = False,
        make_node: MakeNode = forked_node,
    ) -> None:
        for name, count in (("brokers", brokers), ("controllers", controllers)):
            if not isinstance(count, int):
                raise TypeError(f"{name} must be a whole number, not {count!r}")
        for name, mapping in (("config", config), ("node_config", node_config)):
            if mapping is not None and not isinstance(mapping, Mapping):
                raise TypeError(f"{name} must be a dict, not {mapping!r}")
        check_keys("config", config or {})
        for node, own_config in (node_config or {}).items():
            check_keys(f"node_config of node {node}", own_config)
        if brokers < 1:
            raise ValueError(f"a cluster has one broker or more, not {brokers}")
        self.links = Links() if cuttable else None
        """The network between the nodes and the clients (`links.py`), where it can be cut."""
        self._is_temporary = directory is None
        self.directory = Path(directory).resolve() if directory is not None else make_temporary_directory("tidelog-")
        if self._is_temporary:
            # At the exit of the interpreter, the nodes end first (`processes.py`).
            weakref.finalize(self, delete_temporary_directory, self.directory).atexit = False
        check_log_directory(self.directory)
        self._ports: list[int] = []
        weakref.finalize(self, release_ports, self._ports)
        self.layouts = cluster_layout(brokers, controllers, self._new_port, self.links)
        self.cluster_id = random_uuid()
        self.ready_s = 0.0
        """The seconds from the launch of the first node until every broker knew every other."""
        self.nodes: dict[int, ServerProcess] = {}
        """The nodes by id, the brokers first."""
        for node in node_config or {}:
            if node not in self.layouts:
                ids = ", ".join(map(str, self.layouts))
                raise ValueError(f"node_config: there is no node {node!r}; the nodes are {ids}")
        for node, layout in self.layouts.items():
            own = {
                key: _as_text(value) for key, value in {**(config or {}), **(node_config or {}).get(node, {})}.items()
            }
            server = make_node(layout, Path(self.directory, f"node-{node}"), {**_DEFAULTS, **layout.options, **own})
            if isinstance(server, TidelogProcess):
                server.cluster_id = self.cluster_id
            self.nodes[node] = server

    def _new_port(self) -> int:
        port = free_port()
        self._ports.append(port)
        return port

    @property
    def broker_ids(self) -> list[int]:
        return [node for node, layout in self.layouts.items() if "broker" in layout.roles]

    @property
    def controller_ids(self) -> list[int]:
        return [node for node, layout in self.layouts.items() if "controller" in layout.roles]

    @property
    def bootstrap_servers(self) -> str:
        """host:port of every broker, separated by commas."""
        return ",".join(f"127.0.0.1:{self.layouts[node].client_port}" for node in self.broker_ids)

    # Life

    def launch(self, node: int) -> None:
        """Start one node without waiting for it. RuntimeError when it runs."""
        self._check_ids((node,))
        if self._is_temporary:
            own_temporary_directory(self.directory)  # a cluster that was stopped starts in it again
        if self.links is not None:
            self.links.up(node)
        self.nodes[node].launch()

    def _launch_if_down(self, node: int) -> bool:
        server = self.nodes[node]
        with server.lock:
            if server.alive:
                return False
            self.launch(node)
            return True

    def start(self, timeout_s: float = 60.0) -> float:
        """Start every node that does not run; returns the seconds until every broker knows every other. A start
        that fails ends the nodes that it started.
        """
        _check_seconds(timeout_s)
        for server in self.nodes.values():
            with server.lock:
                server.prepare()
        start_s = time.monotonic()
        down = [node for node, server in self.nodes.items() if not server.alive]
        try:
            for node in down:
                self._launch_if_down(node)
            self.await_ready(timeout_s)
        except BaseException:
            self.kill(*down)
            if not any(server.alive for server in self.nodes.values()):
                self._clean_up()
            raise
        self.ready_s = time.monotonic() - start_s
        return self.ready_s

    def await_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until every node is ready and every broker lists all brokers."""
        _check_seconds(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        for server in self.nodes.values():
            server.await_ready(max(deadline_s - time.monotonic(), 0.0))
        brokers = self.broker_ids
        for node in brokers:
            while (listed := listed_brokers(self.nodes[node].port)) < len(brokers):
                if time.monotonic() > deadline_s:
                    raise ServerFailed(f"broker {node} lists {listed} of {len(brokers)} brokers after {timeout_s} s")
                time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 60.0) -> None:
        """SIGTERM to all brokers at once, because the last ones find no node to hand over to, then to the controllers,
        without which the brokers would wait for an answer; SIGKILL after `timeout_s`. A temporary directory is
        deleted. A fork of the process that started the cluster leaves it running.
        """
        _check_seconds(timeout_s)
        if not all(server.is_ours for server in self.nodes.values()):
            return
        for server in self.nodes.values():
            server.send_signal(signal.SIGCONT)
        deadline_s = time.monotonic() + timeout_s
        brokers = self.broker_ids
        for ids in (brokers, [node for node in self.nodes if node not in brokers]):
            for node in ids:
                self.nodes[node].send_signal(signal.SIGTERM)
            for node in ids:
                self.nodes[node].stop(max(deadline_s - time.monotonic(), 0.0))
        self._clean_up()

    def _clean_up(self) -> None:
        if self.links is not None:
            self.links.close()
        if self._is_temporary:
            delete_temporary_directory(self.directory)

    # Faults

    def kill(self, *nodes: int) -> None:
        """SIGKILL to all these nodes at one moment; a node that does not run stays so."""
        self._check_ids(nodes)
        for node in nodes:
            self.nodes[node].send_signal(signal.SIGKILL)
        for node in nodes:
            self.nodes[node].kill()
            if self.links is not None:
                self.links.down(node)

    def pause(self, *nodes: int) -> None:
        """SIGSTOP: these nodes hang. Their connections stay open and are not answered. RuntimeError when one
        does not run.
        """
        self._check_ids(nodes)
        for node in nodes:
            self.nodes[node].pause()

    def resume(self, *nodes: int) -> None:
        """SIGCONT to nodes that `pause` stopped."""
        self._check_ids(nodes)
        for node in nodes:
            self.nodes[node].resume()

    def restart(self, node: int, timeout_s: float = 60.0) -> float:
        """Start a node again on its data and its port, and stop it first when it runs; returns the
        seconds until it is ready.
        """
        _check_seconds(timeout_s)
        self._check_ids((node,))
        server = self.nodes[node]
        with server.lock:
            server.stop()
            start_s = time.monotonic()
            self.launch(node)
            server.await_ready(timeout_s)
        return time.monotonic() - start_s

    def cut(self, *nodes: int, clients: bool = True) -> None:
        """Let nothing pass between these nodes and all others, and the clients unless `clients` is False.
        Connections stay open, as when a cable is pulled. Needs `cuttable`.
        """
        self._check_ids(nodes)
        others = [node for node in self.nodes if node not in nodes]
        self._network().cut(nodes, [*others, CLIENTS] if clients else others)

    def heal(self) -> None:
        """Let everything pass again, held bytes first."""
        self._network().heal()

    def _check_ids(self, nodes: Iterable[int]) -> None:
        for node in nodes:
            if node not in self.nodes:
                raise ValueError(f"there is no node {node!r}; the nodes are {', '.join(map(str, self.nodes))}")

    def _network(self) -> Links:
        if self.links is None:
            raise RuntimeError("this network cannot be cut; use EmbeddedCluster(..., cuttable=True)")
        return self.links

    def restore(self, timeout_s: float = 60.0) -> None:
        """End every fault: heal the network, resume and restart nodes, wait until every broker knows every other."""
        if self.links is not None:
            self.links.heal()
        for node, server in self.nodes.items():
            if not self._launch_if_down(node):
                server.resume()
        self.await_ready(timeout_s)

    def __enter__(self) -> EmbeddedCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _check_seconds(timeout_s: float) -> None:
    """Before any node is started or stopped: a wrong argument would leave the work half done."""
    if not isinstance(timeout_s, (int, float)):
        raise TypeError(f"timeout_s must be a number of seconds, not {timeout_s!r}")


def _as_text(value: Any) -> str:
    """A value as a configuration file has it: `true`, `3`, lists separated by commas. As `node_config.as_text`, which
    `bench` may not import with this module.
    """
    if isinstance(value, list):
        return ",".join(map(_as_text, value))
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
