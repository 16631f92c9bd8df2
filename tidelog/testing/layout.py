"""Who is what in a cluster of processes: node ids, roles, ports and the configuration that makes them one cluster.

Brokers are numbered from 1, controllers on their own follow them. Without controllers of their own, the first three
brokers (the first, of fewer than three) are controllers as well. With `links` every node knows every other by an
address of its own: as its inter-broker listener each takes one that the others advertise for it alone, and its list of
voters is its own too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

CONTROLLER = "CONTROLLER"


class LinkPorts(Protocol):
    """What of `links.Links` is needed here."""

    def port(self, source: int, destination: int, target_port: int) -> int: ...


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """`port` is the clients' for a broker, else the controller's. `options` are Kafka's keys."""

    node_id: int
    roles: tuple[str, ...]
    port: int
    options: Mapping[str, str]


def cluster_layout(
    brokers: int, controllers: int, free_port: Callable[[], int], links: LinkPorts | None = None
) -> dict[int, NodeLayout]:
    """The nodes of a cluster by their ids; every port from `free_port`."""
    assert brokers >= 1
    broker_ids = range(1, brokers + 1)
    if controllers:
        voter_ids = range(brokers + 1, brokers + controllers + 1)
    else:
        voter_ids = range(1, (3 if brokers >= 3 else 1) + 1)
    ids = sorted({*broker_ids, *voter_ids})
    client_ports = {node: free_port() for node in broker_ids}
    controller_ports = {node: free_port() for node in voter_ids}
    # (source, broker) -> where the broker listens for that source.
    inner_ports = {(source, broker): free_port() for source in ids for broker in broker_ids} if links else {}

    layouts = {}
    for node in ids:
        roles = tuple(role for role, having in (("broker", broker_ids), ("controller", voter_ids)) if node in having)
        voters = {
            voter: links.port(node, voter, port) if links is not None and voter != node else port
            for voter, port in controller_ports.items()
        }
        options = _common(brokers) | {
            "node.id": str(node),
            "process.roles": ",".join(roles),
            "controller.quorum.voters": ",".join(f"{voter}@127.0.0.1:{port}" for voter, port in voters.items()),
            "controller.listener.names": CONTROLLER,
        }
        served: dict[str, tuple[int, int]] = {}
        if "broker" in roles:
            served["PLAINTEXT"] = (client_ports[node], client_ports[node])
            for source in ids if links is not None else ():
                inner = inner_ports[source, node]
                outer = links.port(source, node, inner) if links is not None and source != node else inner
                served[_listener_for(source)] = (inner, outer)
        options |= _listeners(served, controller_ports.get(node), ids if links is not None else [])
        if links is not None:
            options["inter.broker.listener.name"] = _listener_for(node)
        port = client_ports[node] if "broker" in roles else controller_ports[node]
        layouts[node] = NodeLayout(node, roles, port, options)
    return layouts


def _common(brokers: int) -> dict[str, str]:
    """Internal topics with as many replicas as there can be."""
    replicas, in_sync = str(min(3, brokers)), str(min(2, brokers))
    return {
        "offsets.topic.replication.factor": replicas,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
    }


def _listeners(
    served: Mapping[str, tuple[int, int]], controller_port: int | None, sources: list[int]
) -> dict[str, str]:
    """`served`: listener -> (port bound, port advertised)."""
    bound = [f"{name}://127.0.0.1:{inner}" for name, (inner, _) in served.items()]
    told = [f"{name}://127.0.0.1:{outer}" for name, (_, outer) in served.items()]
    if controller_port is not None:
        bound.append(f"{CONTROLLER}://127.0.0.1:{controller_port}")
    if not told:
        told = [f"{CONTROLLER}://127.0.0.1:{controller_port}"]
    protocols = [f"{name}:PLAINTEXT" for name in ("PLAINTEXT", CONTROLLER, *map(_listener_for, sources))]
    return {
        "listeners": ",".join(bound),
        "advertised.listeners": ",".join(told),
        "listener.security.protocol.map": ",".join(protocols),
    }


def _listener_for(source: int) -> str:
    return f"FROM{source}"
