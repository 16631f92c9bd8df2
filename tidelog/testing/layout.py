"""The layout of a cluster of processes: node ids, roles, ports and configuration.

Brokers have the ids from 1 on, dedicated controllers the ids after them. Without dedicated
controllers, the first three brokers (of fewer than three only the first) are controllers too. With
`links` every node has addresses of its own for all other nodes: the others advertise a listener for
this node alone, which is its inter-broker listener, and its list of voters is its own. Clients have
addresses of their own too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

CONTROLLER = "CONTROLLER"
CLIENTS = 0
"""The clients of the cluster, as a source of links; node ids begin at 1."""


class LinkPorts(Protocol):
    """The part of `links.Links` that a layout uses."""

    def port(self, source: int, destination: int, target_port: int) -> int: ...


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """`port`: the client listener's for a broker, else the controller's; `client_port`: the port to which
    clients connect, which differs with links. `options`: Kafka's keys.
    """

    node_id: int
    roles: tuple[str, ...]
    port: int
    client_port: int
    options: Mapping[str, str]


def cluster_layout(
    brokers: int, controllers: int, free_port: Callable[[], int], links: LinkPorts | None = None
) -> dict[int, NodeLayout]:
    """The nodes of a cluster by id; `free_port` allocates the ports."""
    assert brokers >= 1
    broker_ids = range(1, brokers + 1)
    if controllers:
        voter_ids = range(brokers + 1, brokers + controllers + 1)
    else:
        voter_ids = range(1, (3 if brokers >= 3 else 1) + 1)
    ids = sorted({*broker_ids, *voter_ids})
    client_ports = {node: free_port() for node in broker_ids}
    controller_ports = {node: free_port() for node in voter_ids}
    # (source, broker) -> the port on which the broker listens for that source.
    inner_ports = {(source, broker): free_port() for source in ids for broker in broker_ids} if links else {}

    layouts = {}
    for node in ids:
        roles = tuple(
            role for role, node_ids in (("broker", broker_ids), ("controller", voter_ids)) if node in node_ids
        )
        voters = {
            voter: links.port(node, voter, port) if links is not None and voter != node else port
            for voter, port in controller_ports.items()
        }
        port = client_port = controller_ports.get(node, 0)
        options = _common(brokers) | {
            "node.id": str(node),
            "process.roles": ",".join(roles),
            "controller.quorum.voters": ",".join(f"{voter}@127.0.0.1:{port}" for voter, port in voters.items()),
            "controller.listener.names": CONTROLLER,
        }
        listeners: dict[str, tuple[int, int]] = {}
        if "broker" in roles:
            port = client_port = client_ports[node]
            if links is not None:
                client_port = links.port(CLIENTS, node, port)
            listeners["PLAINTEXT"] = (port, client_port)
            for source in ids if links is not None else ():
                bound_port = inner_ports[source, node]
                advertised_port = (
                    links.port(source, node, bound_port) if links is not None and source != node else bound_port
                )
                listeners[_listener_for(source)] = (bound_port, advertised_port)
        options |= _listeners(listeners, controller_ports.get(node), ids if links is not None else [])
        if links is not None:
            options["inter.broker.listener.name"] = _listener_for(node)
        layouts[node] = NodeLayout(node, roles, port, client_port, options)
    return layouts


def _common(brokers: int) -> dict[str, str]:
    """Internal topics with three replicas, or as many as there are brokers."""
    replicas, in_sync = str(min(3, brokers)), str(min(2, brokers))
    return {
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def _listeners(
    listeners: Mapping[str, tuple[int, int]], controller_port: int | None, sources: list[int]
) -> dict[str, str]:
    """`listeners`: listener -> (bound port, advertised port)."""
    bound = [f"{name}://127.0.0.1:{bound_port}" for name, (bound_port, _) in listeners.items()]
    advertised = [f"{name}://127.0.0.1:{advertised_port}" for name, (_, advertised_port) in listeners.items()]
    if controller_port is not None:
        bound.append(f"{CONTROLLER}://127.0.0.1:{controller_port}")
    if not advertised:
        advertised = [f"{CONTROLLER}://127.0.0.1:{controller_port}"]
    protocols = [f"{name}:PLAINTEXT" for name in ("PLAINTEXT", CONTROLLER, *map(_listener_for, sources))]
    return {
        "listeners": ",".join(bound),
        "advertised.listeners": ",".join(advertised),
        "listener.security.protocol.map": ",".join(protocols),
    }


def _listener_for(source: int) -> str:
    return f"FROM{source}"
