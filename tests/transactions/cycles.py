"""Cycles in a directed graph of numbers. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Set


def a_cycle(edges: Mapping[int, Set[int]]) -> list[int] | None:
    """The nodes of a shortest cycle through one node that lies on a cycle, in order; None where there is none."""
    remaining = _on_or_between_cycles(edges)
    for start in sorted(remaining):
        path = _way_back(start, edges, remaining)
        if path is not None:
            return path
    return None


def _on_or_between_cycles(edges: Mapping[int, Set[int]]) -> set[int]:
    """What is left when nodes that no other leads to are taken away, again and again."""
    incoming: dict[int, int] = {}
    for node, followers in edges.items():
        incoming.setdefault(node, 0)
        for follower in followers:
            incoming[follower] = incoming.get(follower, 0) + 1
    free = [node for node, count in incoming.items() if count == 0]
    while free:
        node = free.pop()
        del incoming[node]
        for follower in edges.get(node, ()):
            incoming[follower] -= 1
            if incoming[follower] == 0:
                free.append(follower)
    return set(incoming)


def _way_back(start: int, edges: Mapping[int, Set[int]], nodes: Set[int]) -> list[int] | None:
    came_from: dict[int, int] = {}
    pending = deque([start])
    while pending:
        node = pending.popleft()
        for follower in sorted(edges.get(node, ())):
            if follower == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if follower in nodes and follower not in came_from:
                came_from[follower] = node
                pending.append(follower)
    return None
