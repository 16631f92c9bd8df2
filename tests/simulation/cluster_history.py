"""One history of a cluster: it comes up, clients work, things go wrong, all is healed, and everything is checked.

`ClusterHistory(seed).run()` raises Broken with the name of what does not hold; the same seed does the same again. The
faults can be given instead of drawn, which is how a failure is made smaller.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from random import Random
from typing import Any

from tests.simulation.cluster import Cluster, Layout
from tests.simulation.cluster_clients import Administrator, RecordingConsumer, RecordingProducer
from tests.simulation.cluster_faults import CACHE_ONLY, WEIGHTS, Fault, Faults, schedule
from tests.simulation.cluster_invariants import (
    END_INVARIANTS,
    STEP_INVARIANTS,
    Invariant,
    Knowledge,
    OneLeaderPerEpoch,
    check_step,
)
from tests.simulation.simulated_client import simulated_client
from tests.simulation.simulated_loop import SimulatedLoop
from tests.simulation.simulated_network import Weather
from tests.simulation.world import Broken, World, without_collector

UP_S = 30.0
HEALED_S = 90.0
LAYOUTS = (
    (10, (1, 2, 3), (1, 2, 3)),
    (3, (1, 2, 3), (1, 2, 3, 4)),
    (2, (1, 2, 3), (1, 2, 3, 4, 5)),
    (2, (1, 2, 3), (4, 5)),
    (2, (1,), (1, 2, 3)),
    (4, (1, 2, 3, 4), (1, 2, 3)),
)
DYNAMIC = (1, 2, 3, 4)
"""Controllers of which three are voters at first, and which come and go."""
TOPICS = {"t": 2, "u": 1}


class ClusterHistory:
    consumer = RecordingConsumer

    def __init__(self, seed: int, faults: list[Fault] | None = None, **options: Any) -> None:
        self.seed = seed
        self.options = options
        self.world = World(seed)
        self.rng = rng = Random(seed * 7919 + 1)
        self.syncs = options.get("syncs", rng.random() < 0.6)
        layout = options.get("layout") or self._layout(rng)
        self.weather = rng.choice((Weather(), Weather(1e-4, 4e-3), Weather(1e-4, 2e-2, 0.02, 0.3)))
        self.cluster = Cluster(self.world, layout, self.weather)
        self.knowledge = Knowledge()
        kinds: tuple[type[Invariant], ...] = (*STEP_INVARIANTS, *END_INVARIANTS)
        self.invariants = [kind(self.cluster, self.knowledge) for kind in kinds]
        self.steppers = [each for each in self.invariants if type(each) in STEP_INVARIANTS]
        self.world.on_step = self._check
        self.cluster.look = lambda node: check_step(node, self.steppers)
        for node in self.cluster.nodes.values():
            node.host.wall_offset_ms = rng.randint(-500, 500)
            node.host.rate = 1 + (rng.random() - 0.5) * 0.02
        self.administrator = Administrator(self.cluster, self.knowledge)
        self.faults = Faults(self.cluster, self.administrator, TOPICS, Random(seed * 104729 + 3))
        duration_s = options.get("duration_s", rng.choice((3.0, 5.0, 8.0)))
        weights = dict(options.get("weights") or WEIGHTS)
        if not self.syncs:
            for name in CACHE_ONLY:
                weights.pop(name, None)
        self.planned = schedule(rng, self.cluster, duration_s, weights) if faults is None else faults
        self.duration_s = duration_s
        self.producers: list[RecordingProducer] = []
        self.consumers: list[RecordingConsumer] = []

    def _layout(self, rng: Random) -> Layout:
        weights = [weight for weight, _, _ in LAYOUTS]
        _, controllers, brokers = rng.choices(LAYOUTS, weights)[0]
        config = {
            "log.segment.bytes": str(rng.choice((1 << 30, 1 << 20))),
            "default.replication.factor": str(min(3, len(brokers))),
            "min.insync.replicas": str(rng.choice((1, 2, 2))),
            "offsets.topic.replication.factor": str(min(3, len(brokers))),
        }
        if Random(self.seed * 31 + 17).random() < 0.25:
            config["replica.fetch.response.max.bytes"] = "400"  # not everything that is new has room in an answer
        if self.syncs:
            config["log.flush.interval.messages"] = "1"
        has_racks = Random(self.seed * 37 + 5).random() < 0.2
        first_voters = (1, 2, 3) if controllers == DYNAMIC else ()
        return Layout(controllers, brokers, config, first_voters, has_racks=has_racks)

    @property
    def elections(self) -> int:
        """How many leaders of partitions and of the quorum were seen."""
        return sum(len(each.leaders) for each in self.invariants if isinstance(each, OneLeaderPerEpoch))

    # Running

    def run(self) -> str:
        """The whole history; returns its trace. Raises Broken."""
        was_disabled = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        try:
            with without_collector(), simulated_client():
                self._run()
                return self.world.trace
        except (AssertionError, Exception) as error:
            error.add_note(self.report())
            raise
        finally:
            logging.disable(was_disabled)
            self.world.on_step = None
            self.world.end()

    def report(self) -> str:
        layout = self.cluster.layout
        planned = "; ".join(map(str, self.planned))
        return (
            f"seed {self.seed}: controllers {layout.controllers}, brokers {layout.brokers}, {dict(layout.config)}, "
            f"at {self.world.now - 1000:.3f}s after {self.world.events} events\nplanned: {planned}\n"
            f"done: {'; '.join(self.faults.steps)}"
        )

    def _run(self) -> None:
        world, cluster = self.world, self.cluster
        cluster.start()
        self._within(UP_S, "ClusterComesUp", cluster.is_up)
        self.administrator.start()
        self.administrator.create(TOPICS)
        self._within(UP_S, "TopicsAreCreated", lambda: self.administrator.idle)
        self._start_clients()
        world.run_for(0.5)
        self.faults.plan(self.planned)
        world.run_for(self.duration_s)
        self.faults.heal()
        self._within(HEALED_S, "ClusterHeals", cluster.is_up)
        self.administrator.stopping = True
        self.administrator.ask(_nothing)
        world.run_for(0.5)
        for producer in self.producers:
            producer.stopping = True
        self._within(HEALED_S, "ProducersFinish", lambda: all(each.done for each in self.producers))
        self._within(HEALED_S, "EveryReplicaReturns", lambda: cluster.all_in_sync(internal=False))
        self._within(HEALED_S, "ConsumersCatchUp", self._all_read)
        for consumer in self.consumers:
            consumer.stopping = True
        self._within(HEALED_S, "ConsumersFinish", lambda: all(each.done for each in self.consumers))
        self._within(HEALED_S, "EveryReplicaReturns", cluster.all_in_sync)
        self._at_rest()
        for invariant in self.invariants:
            invariant.at_end()

    def _at_rest(self) -> None:
        """Nothing is wrong any more and nobody sends; what is still to be waited for."""

    def _start_clients(self) -> None:
        cluster, knowledge = self.cluster, self.knowledge
        gap_s = self.rng.choice((0.04, 0.08, 0.15))
        self.producers = [RecordingProducer(cluster, knowledge, name, TOPICS, gap_s=gap_s) for name in ("a", "b")]
        if self.rng.random() < 0.3:
            self.producers.append(RecordingProducer(cluster, knowledge, "l", TOPICS, acks="1"))
        self.consumers = [self.consumer(cluster, knowledge, TOPICS)]
        if self.rng.random() < 0.25:
            self.consumers.append(self.consumer(cluster, knowledge, TOPICS, group="g"))
        for client in (*self.producers, *self.consumers):
            client.start()

    def _check(self, loop: SimulatedLoop) -> None:
        node = self.cluster.by_loop.get(loop)
        if node is not None and node.node is not None:
            check_step(node, self.steppers)

    def _within(self, seconds: float, name: str, done: Callable[[], bool]) -> None:
        if not done() and not self.world.run_for(seconds, _now_and_then(self.world, done)):
            raise Broken(f"{name}: not within {seconds:.0f} s; {self._state()}")

    def _all_read(self) -> bool:
        for topic, count in TOPICS.items():
            for index in range(count):
                end = self.knowledge.committed_end(topic, index)
                if any(each.positions.get((topic, index), 0) < end for each in self.consumers):
                    return False
        return True

    def _state(self) -> str:
        parts = []
        for node in self.cluster.nodes.values():
            raft = node.raft
            quorum = f"epoch {raft.epoch} leader {raft.leader_id} hw {raft.high_watermark}" if raft is not None else "-"
            replicas = ", ".join(
                f"{each!r} {each.high_watermark}/{each.log.log_end_offset}" for each in node.partitions()
            )
            parts.append(
                f"{node}: {'up' if node.ready else 'running' if node.running else 'down'}, {quorum}, {replicas}"
            )
        for topic, count in TOPICS.items():
            parts += [f"{topic}-{index}: {self.cluster.placed(topic, index)!r}" for index in range(count)]
        return "\n  ".join(parts)


async def _nothing(admin: Any) -> None:
    return


def _now_and_then(world: World, done: Callable[[], bool]) -> Callable[[], bool]:
    """Ask an expensive question only as time passes."""
    asked_at = [0.0]

    def check() -> bool:
        if world.now - asked_at[0] < 0.02:
            return False
        asked_at[0] = world.now
        return done()

    return check
