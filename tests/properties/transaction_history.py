"""Random histories of a transaction coordinator, and what must hold in each of them.

Clients initialize, add, end, repeat what they have sent, and come too late; appends fail, commits come late, markers
are written in part and in any order, time passes, coordinators change at any point. Invariants: one id has one open
transaction; the epoch of a producer id never goes back, and an old producer id never returns; no two producers get the
same epoch; a producer whose place was taken adds nothing; a transaction is complete only when each of its partitions
has its marker, and all markers say what was decided; what was answered holds; each request is answered, at once by a
coordinator that moves away; a coordinator that loads the log equals the one that wrote it; at last every decided
transaction completes, and the memory that is held is that of the ids.

In steps, everything takes turns of the loop, one to three records each, and coordinators move between them, also during
their loads; ids expire soon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from tests.unit.broker.coordinators.fakes import Reply
from tests.unit.broker.coordinators.transaction_world import TransactionWorld
from tidelog.broker.coordinators.transaction import records
from tidelog.broker.coordinators.transaction.config import TransactionCoordinatorConfig
from tidelog.broker.coordinators.transaction.memory import id_size_bytes, partitions_size_bytes
from tidelog.broker.coordinators.transaction.records import TransactionRecord
from tidelog.broker.coordinators.transaction.states import (
    COMPLETED,
    PREPARED,
    VALID_PREVIOUS_STATES,
    TransactionState,
)
from tidelog.broker.coordinators.transaction.transitions import ProducerIdentity, TransactionMetadata
from tidelog.broker.coordinators.transaction_ports import MarkerToSend
from tidelog.protocol.batches.record_batch import iter_headers
from tidelog.protocol.batches.records import decode_batch, encode_batch
from tidelog.protocol.errors import ErrorCode, KafkaError

IDS = ("a", "b")
IDS_IN_STEPS = ("a", "b", "c")
PARTITIONS = [("t", 0), ("t", 1), ("u", 0)]
CONFIG = TransactionCoordinatorConfig(
    transactional_id_expiration_ms=3_000_000, write_timeout_ms=1_000, remove_expired_interval_ms=600_000
)
CONFIG_IN_STEPS = TransactionCoordinatorConfig(
    transactional_id_expiration_ms=100_000, write_timeout_ms=50, remove_expired_interval_ms=30_000
)


class _Id:
    """What the outside knows of one transactional id."""

    def __init__(self) -> None:
        self.identities: list[ProducerIdentity] = []  # in the order in which they were given to clients
        self.askers: dict[ProducerIdentity, object] = {}  # the producer that has got the identity, by what it had
        self.answered_ends: list[tuple[ProducerIdentity, bool, int]] = []  # producer, whether to commit, its version
        self.producer_ids: list[int] = []  # as the committed states had them
        self.epochs: dict[int, int] = {}
        self.decision: dict[ProducerIdentity, bool] = {}  # of each prepared identity: whether to commit
        self.unmarked: dict[ProducerIdentity, set[tuple[str, int]]] = {}
        self.ended: set[ProducerIdentity] = set()  # whose transactions clients have ended


class History:
    def __init__(self, seed: int, version: int, *, in_steps: bool = False) -> None:
        self.rng = Random(seed)
        self.in_steps = in_steps
        self.world = TransactionWorld(CONFIG_IN_STEPS if in_steps else CONFIG, version=version)
        self.names = IDS_IN_STEPS if in_steps else IDS
        self.ids = {name: _Id() for name in self.names}
        self._seen_markers = 0
        self._parked: list[tuple[Reply, Callable[[Any], None]]] = []
        for name in self.names:
            if self.rng.random() < 0.3:
                self._near_the_limit(name)
        self.world.ports.commits_at_once = self.rng.random() < 0.5

    def _near_the_limit(self, name: str) -> None:
        """A record of an older coordinator, with few epochs left."""
        self._given(name, object(), self.world.producer(name))
        metadata = self.world.state(name)._replace(producer_epoch=self.rng.randint(32_762, 32_766))
        record = self.world.coordinator().encode(TransactionRecord(name, metadata))
        self.world.ports.append(0, encode_batch([(0, *record, ())]))
        self.world.restart()

    def run(self, steps: int) -> None:
        moves = [self._init, self._add, self._add, self._end, self._end, self._markers, self._markers, self._commit,
                 self._time, self._fail, self._restart]  # fmt: skip
        for _ in range(steps):
            self._choice_in_steps()() if self.in_steps else self.rng.choice(moves)()
            self._check()
        self._heal()
        self._check()
        for name, entry in self.world.coordinator().ids.items():
            assert entry.metadata is not None, f"{name} was never stored"
            assert entry.metadata.state not in PREPARED, f"the transaction of {name} never ends"
        self.world.advance(CONFIG.write_timeout_ms)
        self._check()
        assert not self._parked, "requests that are never answered"
        self._check_log()
        self._check_memory()

    def _choice_in_steps(self) -> Callable[[], None]:
        """All goes well for the most part, otherwise no transaction gets far."""
        ports = self.world.ports
        has_uncommitted = ports.high_watermarks.get(0, 0) < ports.end_offsets.get(0, 0)
        weights = {
            self._init: 6, self._add: 12, self._end: 10, self._markers: 8, self._commit: 8, self._turn: 40,
            self._time: 2, self._restart: 0.5, self._resign: 0.4 + 2 * has_uncommitted, self._lose: 0.3,
            self._elect: 20 * (not self._is_active()),
            self._fail: 1 + 10 * (ports.refuse_appends is not None),
            self._allocate: 0.5 + 10 * (not self.world.has_producer_ids),
        }  # fmt: skip
        return self.rng.choices(list(weights), list(weights.values()))[0]

    # -- moves -------------------------------------------------------------------------------------------------------

    def _identity(self, name: str) -> ProducerIdentity:
        known = self.ids[name].identities
        if not known or self.rng.random() < 0.05:
            return ProducerIdentity(5, self.rng.choice([0, 32_766]))
        return known[-1] if self.rng.random() < 0.7 else self.rng.choice(known[-4:])

    def _init(self) -> None:
        name = self.rng.choice(self.names)
        expected = self._identity(name) if self.rng.random() < 0.4 else None
        asker = object() if expected is None else expected  # who comes anew is another producer
        timeout_ms = self.rng.choice([60_000, 600_000]) if self.in_steps else 60_000
        self._when_answered(
            self.world.init(name, expected, timeout_ms), lambda answer: self._given(name, asker, answer)
        )

    def _given(self, name: str, asker: object, answer: Any) -> None:
        if isinstance(answer, ProducerIdentity) and answer.producer_id >= 0:
            known = self.ids[name]
            if answer not in known.identities:
                known.identities.append(answer)
            assert known.askers.setdefault(answer, asker) == asker, f"two producers of {name} have {answer}"
            others = (each for each in self.ids.values() if each is not known)
            assert not any(answer in each.askers for each in others), f"two ids have {answer}"
            assert answer.epoch < 32_767, "a client never has the last epoch"

    def _add(self) -> None:
        name = self.rng.choice(self.names)
        producer = self._identity(name)
        partitions = self.rng.sample(PARTITIONS, self.rng.randint(1, 2))
        newest = self.ids[name].identities[-1:]

        def answered(errors: dict[Any, ErrorCode]) -> None:
            if set(errors.values()) == {ErrorCode.NONE}:
                assert [producer] == newest, f"{producer} of {name} added partitions, its place was taken by {newest}"

        version = self._client_version()
        self._when_answered(self.world.add(producer, *partitions, transactional_id=name, version=version), answered)

    def _end(self) -> None:
        name = self.rng.choice(self.names)
        producer, is_commit = self._identity(name), self.rng.random() < 0.5
        self.ids[name].ended.add(producer)
        version = self._client_version()

        def answered(answer: Any) -> None:
            if not isinstance(answer, KafkaError):
                self.ids[name].answered_ends.append((producer, is_commit, version))
                self._given(name, producer, answer)

        self._when_answered(self.world.end(producer, is_commit, transactional_id=name, version=version), answered)

    def _client_version(self) -> int:
        return 2 if self.world.version == 2 and self.rng.random() < 0.9 else 0

    def _when_answered(self, reply: Reply, then: Callable[[Any], None]) -> None:
        self._parked.append((reply, then))

    def _markers(self) -> None:
        """Some leaders of partitions have written what they were sent."""
        waiting, self.world.markers.waiting = self.world.markers.waiting, []
        for marker, on_done in waiting:
            done = frozenset(self.rng.sample(sorted(marker.partitions), self.rng.randint(0, len(marker.partitions))))
            self._written(marker, done)
            if done:
                self.world.ports.call_later(self.rng.randint(0, 20), partial(on_done, done))
            if left := marker.partitions - done:
                self.world.markers.waiting.append((marker._replace(partitions=left), on_done))
        self.world.advance(self.rng.choice([0, 5, 30]))

    def _commit(self) -> None:
        self.world.ports.commit(0)
        self.world.ports.commits_at_once = self.rng.random() < 0.5

    def _time(self) -> None:
        times_ms = (
            [30, 60, 60, 1_000, 30_000, 80_000] if self.in_steps else [1, 100, 1_000, 1_000, 30_000, 80_000, 700_000]
        )
        self.world.advance(self.rng.choice(times_ms))

    def _fail(self) -> None:
        error = self.rng.choice([ErrorCode.NOT_ENOUGH_REPLICAS, ErrorCode.REQUEST_TIMED_OUT])
        self.world.ports.refuse_appends = KafkaError(error) if self.rng.random() < 0.5 else None

    def _turn(self) -> None:
        self.world.ports.turn()
        self.world.ports.time_ms += 1

    def _resign(self) -> None:
        """The partition moves away, sometimes to a broker that has only what is committed."""
        self.world.service.on_partition_resigned(0)
        if self.rng.random() < 0.5:
            self.world.ports.truncate_uncommitted(0)
        self._check()
        assert not self._parked, "the coordinator moved away without an answer"

    def _lose(self) -> None:
        self.world.ports.lose(0, KafkaError(ErrorCode.NOT_LEADER_OR_FOLLOWER))

    def _elect(self) -> None:
        if not self._is_active():
            self.world.epoch += self.rng.random() < 0.7
            self.world.service.on_partition_elected(0, self.world.epoch)

    def _allocate(self) -> None:
        """No producer ids for a while."""
        self.world.has_producer_ids = not self.world.has_producer_ids

    def _is_active(self) -> bool:
        return bool(self.world.service._runtime.active_partitions())

    def _restart(self) -> None:
        """Another coordinator, with what is committed; sometimes all that was appended is by then."""
        world = self.world
        if not self._is_active():
            return
        if self.rng.random() < 0.5:
            world.ports.commit(0)
            self._check()
        if self.in_steps:
            world.advance(0)  # what is committed is replayed
            self._check()
        world.ports.truncate_uncommitted(0)
        written = {name: _as_stored(metadata, world.version) for name, metadata in _committed(world).items()}
        self._parked.clear()
        if self.rng.random() < 0.1 and world.version:
            world.version = self.rng.choice([1, 2])
        world.ports.commits_at_once = False  # the new coordinator may complete transactions at once
        world.restart()
        assert _committed(world) == written, "the coordinator that loads the log differs from the one that wrote it"

    def _heal(self) -> None:
        ports, markers = self.world.ports, self.world.markers
        ports.refuse_appends = None
        ports.commits_at_once = True
        self.world.has_producer_ids = True
        if not self._is_active():
            self.world.epoch += 1
            self.world.service.on_partition_elected(0, self.world.epoch)
        for _ in range(20):
            ports.commit(0)
            self.world.advance(200)
            self._check()
            for marker, _ in markers.waiting:
                self._written(marker, marker.partitions)
            self.world.write_markers()
            if not any(metadata.state in PREPARED for metadata in _committed(self.world).values()):
                break

    def _written(self, marker: MarkerToSend, partitions: frozenset[tuple[str, int]]) -> None:
        for known in self.ids.values():
            known.unmarked.get(ProducerIdentity(marker.producer_id, marker.producer_epoch), set()).difference_update(
                partitions
            )

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check(self) -> None:
        if self._is_active():
            self._check_state()
        parked, self._parked = self._parked, []
        for reply, then in parked:
            if reply.response is None:
                self._parked.append((reply, then))
            else:
                then(reply.response)

    def _check_state(self) -> None:
        for name, metadata in _committed(self.world).items():
            self._check_id(self.ids[name], name, metadata)
        for marker in self.world.markers.sent[self._seen_markers :]:
            self._check_marker(marker)
        self._seen_markers = len(self.world.markers.sent)

    def _check_id(self, known: _Id, name: str, metadata: TransactionMetadata) -> None:
        producer_id, epoch = metadata.identity
        if producer_id not in known.producer_ids:
            known.producer_ids.append(producer_id)
        assert known.producer_ids[-1] == producer_id, f"{name}: an old producer id returned"
        assert known.epochs.get(producer_id, -1) <= epoch, f"{name}: the epoch went back"
        is_next_epoch = epoch > known.epochs.get(producer_id, -1)
        known.epochs[producer_id] = epoch
        if metadata.state in PREPARED:
            if metadata.identity not in known.unmarked:  # newly prepared
                assert is_next_epoch or metadata.identity in known.ended, f"{name} is aborted, its producer not fenced"
                known.decision[metadata.identity] = metadata.is_commit
                known.unmarked[metadata.identity] = set(metadata.partitions)
            assert known.decision[metadata.identity] == metadata.is_commit, f"{name}: the decision changed"
        elif metadata.state in COMPLETED:
            last = ProducerIdentity(metadata.previous_producer_id, 32_767 if epoch == 0 else epoch)
            for identity in (metadata.identity, last):
                assert not known.unmarked.pop(identity, None), f"{name} is complete, and partitions have no marker"
        else:
            # Where the next transaction began in the batch of the completion, nobody saw the completed state.
            assert not any(known.unmarked.values()), f"{name} begins anew, and partitions have no marker"
            known.unmarked.clear()
        assert metadata.state is not TransactionState.EMPTY or not metadata.partitions

    def _check_log(self) -> None:
        """Each record follows from the one before it."""
        states: dict[str, TransactionState] = {}
        ends: set[tuple[str, ProducerIdentity, bool]] = set()
        for chunk in self.world.ports.read_log(0):
            for _, header in iter_headers(chunk):
                for record in decode_batch(chunk, 0, header):
                    assert record.key is not None
                    decoded = records.decode(record.key, record.value)
                    assert decoded is not None
                    name, metadata = decoded
                    before = states.pop(name, TransactionState.EMPTY)
                    after = TransactionState.DEAD if metadata is None else metadata.state
                    assert before in VALID_PREVIOUS_STATES[after], f"{name} goes from {before.name} to {after.name}"
                    if metadata is not None:
                        states[name] = after
                    if metadata is not None and after in PREPARED | COMPLETED:
                        ends.add((name, metadata.identity, metadata.is_commit))
        for name, known in self.ids.items():
            for (producer_id, epoch), is_commit, version in known.answered_ends:
                ended = ProducerIdentity(producer_id, epoch + (version >= 2))
                assert (name, ended, is_commit) in ends, f"{name}: an end was answered, and {ended} is not ended"

    def _check_memory(self) -> None:
        service = self.world.service
        assert (service._runtime._pending_bytes, service._runtime._parked_count) == (0, 0)
        held_bytes = sum(
            id_size_bytes(name) + partitions_size_bytes(metadata.partitions)
            for name, metadata in _committed(self.world).items()
        )
        assert service._memory.used_bytes == held_bytes
        assert not self.world.coordinator()._waiting_count
        service.close()
        assert not service._memory.used_bytes

    def _check_marker(self, marker: MarkerToSend) -> None:
        identity = ProducerIdentity(marker.producer_id, marker.producer_epoch)
        decisions = [known.decision[identity] for known in self.ids.values() if identity in known.decision]
        assert marker.is_commit in decisions, f"a marker says another thing than was decided: {marker}"


def _committed(world: TransactionWorld) -> dict[str, TransactionMetadata]:
    return dict(world.coordinator().transactions())


def _as_stored(metadata: TransactionMetadata, version: int) -> TransactionMetadata:
    """What a record of this transaction version holds of it."""
    if version == 0:
        metadata = metadata._replace(previous_producer_id=-1, next_producer_id=-1, client_version=0)
    return metadata._replace(last_producer_epoch=-1)
