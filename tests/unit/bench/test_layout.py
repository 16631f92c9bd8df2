"""Who is what in a cluster of processes, and that linked nodes know each other only by their own doors."""

from __future__ import annotations

import itertools

import pytest

from tidelog.testing.layout import cluster_layout


class Doors:
    """Gives every (source, destination, target) a port of its own."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[int, int, int]] = {}

    def port(self, source: int, destination: int, target_port: int) -> int:
        port = 50_000 + len(self.made)
        self.made[port] = (source, destination, target_port)
        return port


def ports() -> itertools.count[int]:
    return itertools.count(20_000)


@pytest.mark.parametrize(
    ("brokers", "controllers", "roles"),
    [
        (1, 0, ["broker,controller"]),
        (2, 0, ["broker,controller", "broker"]),
        (3, 0, ["broker,controller"] * 3),
        (5, 0, ["broker,controller"] * 3 + ["broker"] * 2),
        (2, 3, ["broker"] * 2 + ["controller"] * 3),
    ],
)
def test_roles(brokers: int, controllers: int, roles: list[str]) -> None:
    layout = cluster_layout(brokers, controllers, ports().__next__)
    assert list(layout) == list(range(1, len(roles) + 1))
    assert [each.options["process.roles"] for each in layout.values()] == roles
    assert len({each.options["controller.quorum.voters"] for each in layout.values()}) == 1
    voters = layout[1].options["controller.quorum.voters"].split(",")
    assert len(voters) == sum("controller" in role for role in roles)


def test_linked_nodes_reach_each_other_through_doors_alone() -> None:
    doors = Doors()
    layout = cluster_layout(2, 1, ports().__next__, doors)
    listens = {
        node: dict(entry.split("://") for entry in each.options["listeners"].split(","))
        for node, each in layout.items()
    }
    for source, each in layout.items():
        for voter in each.options["controller.quorum.voters"].split(","):
            node, _, address = voter.partition("@")
            port = int(address.rpartition(":")[2])
            if int(node) == source:
                assert listens[source]["CONTROLLER"].endswith(f":{port}")
            else:
                destination, target = doors.made[port][1:]
                assert doors.made[port][0] == source
                assert destination == int(node)
                assert listens[destination]["CONTROLLER"].endswith(f":{target}")
        inner = each.options["inter.broker.listener.name"]
        for broker in (1, 2):
            told = dict(entry.split("://") for entry in layout[broker].options["advertised.listeners"].split(","))
            port = int(told[inner].rpartition(":")[2])
            if broker != source:
                assert doors.made[port][:2] == (source, broker)
                assert listens[broker][inner].endswith(f":{doors.made[port][2]}")
