"""Faults for a running cluster, chosen by chance: what can happen to processes and to the network between them.

A fault begins, lasts, and is mended; several may overlap. What is done is written into `history`, so that a failure can
be read. `Chaos` knows nothing of records: it only breaks and mends.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable

from tidelog.testing.cluster import EmbeddedCluster

Mend = Callable[[], None]


class Chaos:
    """`strike` begins a fault and returns; `mend_some` and `mend_all` end what has begun."""

    def __init__(self, cluster: EmbeddedCluster, choice: random.Random) -> None:
        assert cluster.links is not None
        self._cluster, self._links, self._choice = cluster, cluster.links, choice
        self._began = time.monotonic()
        self.history: list[str] = []
        self.struck: Counter[str] = Counter()
        self._dead: set[int] = set()
        self._frozen: set[int] = set()
        self._kinds: list[tuple[int, Callable[[], str | None]]] = [
            (30, self._kill_broker),
            (8, self._kill_controller),
            (6, self._kill_many),
            (2, self._kill_all),
            (18, self._freeze),
            (14, self._isolate),
            (10, self._cut_pair),
            (6, self._split),
            (6, self._hush),
        ]

    def strike(self) -> str:
        """One fault of some kind that is possible now; what it is."""
        while True:
            kind = self._choice.choices([kind for _, kind in self._kinds], [weight for weight, _ in self._kinds])[0]
            what = kind()
            if what is not None:
                self.struck[what.split()[0]] += 1
                self._note(what)
                return what

    @property
    def open_faults(self) -> int:
        return len(self._dead) + len(self._frozen) + bool(self._links.silent)

    def mend_some(self) -> None:
        """One thing that is broken works again."""
        ways: list[Mend] = []
        if self._dead:
            ways.append(lambda: self._revive(self._choice.choice(sorted(self._dead))))
        if self._frozen:
            ways.append(lambda: self._thaw(self._choice.choice(sorted(self._frozen))))
        if self._links.silent:
            ways.append(self._heal)
        if ways:
            self._choice.choice(ways)()

    def mend_all(self) -> None:
        """Everything works again; processes that were started may not be ready yet."""
        if self._links.silent:
            self._heal()
        for node in sorted(self._frozen):
            self._thaw(node)
        dead = sorted(self._dead)
        self._choice.shuffle(dead)
        for node in dead:
            self._revive(node)

    def _note(self, what: str) -> None:
        self.history.append(f"{time.monotonic() - self._began:7.2f} s  {what}")

    # Processes

    def _kill(self, nodes: list[int]) -> str | None:
        nodes = [node for node in nodes if node not in self._dead]
        if not nodes:
            return None
        self._cluster.kill(*nodes)
        self._dead.update(nodes)
        self._frozen.difference_update(nodes)
        return f"kill {nodes}"

    def _kill_broker(self) -> str | None:
        return self._kill([self._choice.choice(self._cluster.broker_ids)])

    def _kill_controller(self) -> str | None:
        return self._kill([self._choice.choice(self._cluster.controller_ids)])

    def _kill_many(self) -> str | None:
        nodes = list(self._cluster.nodes)
        return self._kill(self._choice.sample(nodes, self._choice.randrange(2, len(nodes))))

    def _kill_all(self) -> str | None:
        return self._kill(list(self._cluster.nodes))

    def _revive(self, node: int) -> None:
        self._cluster.launch(node)
        self._dead.discard(node)
        self._note(f"start {node}")

    def _freeze(self) -> str | None:
        standing = [node for node in self._cluster.nodes if node not in self._dead | self._frozen]
        if not standing:
            return None
        node = self._choice.choice(standing)
        self._cluster.nodes[node].pause()
        self._frozen.add(node)
        return f"freeze {node}"

    def _thaw(self, node: int) -> None:
        self._cluster.nodes[node].resume()
        self._frozen.discard(node)
        self._note(f"thaw {node}")

    # The network

    def _isolate(self) -> str:
        node = self._choice.choice(list(self._cluster.nodes))
        self._links.cut([node], self._cluster.nodes)
        return f"cut {node} from all"

    def _cut_pair(self) -> str:
        one, other = self._choice.sample(list(self._cluster.nodes), 2)
        self._links.cut([one], [other])
        return f"cut {one} from {other}"

    def _split(self) -> str:
        nodes = list(self._cluster.nodes)
        ones = self._choice.sample(nodes, self._choice.randrange(2, len(nodes) - 1))
        others = [node for node in nodes if node not in ones]
        self._links.cut(ones, others)
        return f"split {sorted(ones)} from {others}"

    def _hush(self) -> str:
        one, other = self._choice.sample(list(self._cluster.nodes), 2)
        self._links.hush([one], [other])
        return f"hush what {one} sends to {other}"

    def _heal(self) -> None:
        reset = self._choice.random() < 0.4
        self._links.heal(reset=reset)
        self._note("heal the network" + (" and reset what was held" if reset else ""))
