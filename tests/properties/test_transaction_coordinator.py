"""Random histories of the transaction coordinator, and mistakes planted in it, each of which must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any

import pytest

from tests.properties.transaction_history import History
from tidelog.broker.coordinators import loading, runtime
from tidelog.broker.coordinators.loading import replay_log
from tidelog.broker.coordinators.runtime import CoordinatorRuntime
from tidelog.broker.coordinators.transaction import coordinator, records, transitions
from tidelog.broker.coordinators.transaction.coordinator import TransactionalId, TransactionCoordinator
from tidelog.broker.coordinators.transaction.states import EXPIRABLE, TransactionState
from tidelog.broker.coordinators.transaction.transitions import TransactionMetadata
from tidelog.protocol.errors import ErrorCode

STEPS = 120
MOVES_IN_STEPS = 300
SEEDS_OF_A_MISTAKE = 60


def run_histories(seeds: range, version: int) -> None:
    for seed in seeds:
        History(seed, version).run(STEPS)


def run_in_steps(seeds: range, version: int) -> None:
    for seed in seeds:
        with pytest.MonkeyPatch.context() as monkeypatch:
            lower_the_constants(monkeypatch, Random(seed))
            History(seed, version, in_steps=True).run(MOVES_IN_STEPS)


def lower_the_constants(monkeypatch: pytest.MonkeyPatch, choice: Random) -> None:
    """Now and then one is left as it is."""
    for module, name in (
        (coordinator, "ABORTS_PER_TURN"),
        (coordinator, "DEADLINES_PER_TURN"),
        (coordinator, "IDS_CHECKED_PER_TURN"),
        (coordinator, "OPEN_CHECKED_PER_TURN"),
        (coordinator, "TOMBSTONE_BYTES_PER_WRITE"),
        (coordinator, "WAITING_ADDS_MAX"),
        (runtime, "IDLE_STEPS_MAX"),
        (runtime, "REPLAYED_PER_TURN"),
    ):
        monkeypatch.setattr(module, name, choice.choice((1, 1, 2, 3, getattr(module, name))))
    per_step = choice.choice((1, 2, 3, loading.RECORDS_PER_STEP))
    monkeypatch.setattr(runtime, "replay_log", partial(loading.replay_log, records_per_step=per_step))


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 2, 3))])
def test_what_must_hold_in_every_history(version: int, chunk: int):
    run_histories(range(chunk * 10, chunk * 10 + 10), version)


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("chunk", [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 2, 3))])
def test_what_must_hold_in_steps(version: int, chunk: int) -> None:
    run_in_steps(range(chunk * 20, chunk * 20 + 20), version)


def _adopt_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = TransactionCoordinator._begin

    def hasty(self: Any, transactional_id: str, metadata: TransactionMetadata, *others: Any) -> None:
        begin(self, transactional_id, metadata, *others)
        if transactional_id in self.ids and self.ids[transactional_id].metadata is not None:
            self.ids[transactional_id].metadata = metadata

    monkeypatch.setattr(TransactionCoordinator, "_begin", hasty)


def _complete_after_the_first_marker(monkeypatch: pytest.MonkeyPatch) -> None:
    on_marked = TransactionCoordinator.on_marked

    def careless(self: Any, transactional_id: str, producer: Any, partitions: Any, now: Any) -> Any:
        return on_marked(self, transactional_id, producer, frozenset([("t", 0), ("t", 1), ("u", 0)]), now)

    monkeypatch.setattr(TransactionCoordinator, "on_marked", careless)


def _allow_two_transitions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionalId, "is_busy", property(lambda self: False))


def _fence_without_a_new_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fence(current: TransactionMetadata, *others: Any) -> TransactionMetadata:
        return current._replace(state=TransactionState.PREPARE_ABORT, client_version=0)

    monkeypatch.setattr(transitions, "fence_and_abort", fence)


def _forget_prepared_transactions_in_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    on_loaded = TransactionCoordinator.on_loaded

    def forgetful(self: Any, now: Any) -> Any:
        self._to_mark.clear()
        return on_loaded(self, now)

    monkeypatch.setattr(TransactionCoordinator, "on_loaded", forgetful)


def _forget_late_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    def next_deadline_ms(self: Any) -> int | None:
        deadline_ms: int | None = self._timers.next_deadline_ms()
        return deadline_ms

    on_committed = TransactionCoordinator.on_committed
    on_failed = TransactionCoordinator.on_failed
    late: list[Any] = []

    def note_late(self: Any, context: Any, error: Any, in_log: bool, now: Any) -> Any:
        late.extend([context] * in_log)
        return on_failed(self, context, error, in_log, now)

    monkeypatch.setattr(TransactionCoordinator, "on_failed", note_late)
    monkeypatch.setattr(
        TransactionCoordinator,
        "on_committed",
        lambda self, context, now: None if any(each is context for each in late) else on_committed(self, context, now),
    )
    monkeypatch.setattr(TransactionCoordinator, "next_deadline_ms", next_deadline_ms)
    monkeypatch.setattr(TransactionCoordinator, "on_deadline", _without_markers(TransactionCoordinator.on_deadline))


def _without_markers(on_deadline: Callable[..., Any]) -> Callable[..., Any]:
    def careless(self: Any, now: Any) -> Any:
        kept, self._to_mark = self._to_mark, {}
        outcome = on_deadline(self, now)
        self._to_mark = kept
        return outcome

    return careless


def _give_up_a_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "COMPLETION_RETRY_MS", 10**12)


def _store_no_next_producer_id(monkeypatch: pytest.MonkeyPatch) -> None:
    encode = records.encode

    def lossy(record: Any, version: int) -> Any:
        metadata = record.metadata
        return encode(record._replace(metadata=metadata and metadata._replace(next_producer_id=-1)), version)

    monkeypatch.setattr(records, "encode", lossy)


def _take_the_epoch_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "EXHAUSTED_EPOCH", 32_767)


def _release_an_id_whose_record_may_be_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_failed = TransactionCoordinator.on_failed
    monkeypatch.setattr(
        TransactionCoordinator,
        "on_failed",
        lambda self, context, error, in_log, now: on_failed(self, context, error, False, now),
    )


def _begin_without_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = TransactionCoordinator._begin
    monkeypatch.setattr(TransactionCoordinator, "_begin", lambda self, *arguments: begin(self, *arguments[:5]))


def _forget_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionCoordinator, "_serve_waiting", lambda self, *_: None)


def _add_before_the_markers(monkeypatch: pytest.MonkeyPatch) -> None:
    add = TransactionCoordinator._add

    def impatient(self: Any, transactional_id: str, wanted: Any, waits: bool, outcome: Any) -> None:
        entry = self.ids.get(transactional_id)
        if entry is not None and waits and not entry.is_in_transition and entry.unmarked:
            entry.unmarked = frozenset()
            entry.waiting.append(wanted)
            self._waiting_count += 1
            self._complete_if_marked(transactional_id, entry, outcome)
            return
        add(self, transactional_id, wanted, waits, outcome)

    monkeypatch.setattr(TransactionCoordinator, "_add", impatient)


def _accept_any_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transitions, "_identity_error", lambda current, producer: ErrorCode.NONE)


MISTAKES = [
    _accept_any_epoch,
    _add_before_the_markers,
    _adopt_before_the_commit,
    _allow_two_transitions,
    _begin_without_the_completion,
    _complete_after_the_first_marker,
    _fence_without_a_new_epoch,
    _forget_late_commits,
    _forget_prepared_transactions_in_a_load,
    _forget_who_waits,
    _give_up_a_completion,
    _release_an_id_whose_record_may_be_committed,
    _store_no_next_producer_id,
    _take_the_epoch_beyond_the_limit,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", MISTAKES)
def test_a_planted_mistake_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        run_histories(range(SEEDS_OF_A_MISTAKE), 2)


def _expire_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "EXPIRABLE", EXPIRABLE | {TransactionState.ONGOING})


def _serve_before_the_log_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    load_step = CoordinatorRuntime._load_step

    def hasty(self: Any, *arguments: Any) -> bool:
        when_committed = self._ports.when_committed
        self._ports.when_committed = lambda partition, offset, callback: callback(None)
        try:
            return load_step(self, *arguments)
        finally:
            self._ports.when_committed = when_committed

    monkeypatch.setattr(CoordinatorRuntime, "_load_step", hasty)


def _skip_a_record_between_two_steps_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(coordinator: TransactionCoordinator, chunks: Any, records_per_step: int, **options: Any) -> Iterator[int]:
        remaining = records_per_step

        def replay(*arguments: Any) -> None:
            nonlocal remaining
            remaining = remaining - 1 if remaining else records_per_step
            if remaining:
                TransactionCoordinator.replay(coordinator, *arguments)

        monkeypatch.setattr(coordinator, "replay", replay)
        yield from replay_log(coordinator, chunks, records_per_step, **options)
        del coordinator.replay

    monkeypatch.setattr(loading, "replay_log", lossy)


def _forget_an_answer_when_the_partition_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    close = CoordinatorRuntime._close

    def careless(self: Any, shard: Any, state: Any) -> None:
        if len(shard.parked_requests) > 1:
            shard.parked_requests.popitem()
        close(self, shard, state)

    monkeypatch.setattr(CoordinatorRuntime, "_close", careless)


def _keep_the_memory_of_an_expired_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionCoordinator, "_forget", lambda self, name: self.ids.pop(name))


MISTAKES_IN_STEPS = [
    _expire_what_is_open,
    _forget_an_answer_when_the_partition_moves,
    _keep_the_memory_of_an_expired_id,
    _serve_before_the_log_is_committed,
    _skip_a_record_between_two_steps_of_a_load,
]


@pytest.mark.slow
@pytest.mark.parametrize("plant", MISTAKES_IN_STEPS)
def test_a_mistake_in_steps_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        run_in_steps(range(SEEDS_OF_A_MISTAKE), 2)
