"""The state machine of transactions under random programs, answers, lost answers and batches.

A model coordinator keeps what Kafka's keeps: the epoch, whether a transaction is open, and what its end was. Requests
are answered, refused, lost on the way, or their answers are; a lost one of version 1 may arrive at any later time. The
program begins, sends, commits, aborts and gives up as it likes. What must hold: a transaction that the machine calls
committed was committed by the coordinator, with each of its parts; one that it calls aborted was not; after an
abortable error no commit is sent for it; no transaction is ended by a request of an earlier one; and when the
coordinator answers at last, every call ends.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidelog.client.model import ConsumerGroupMetadata, OffsetAndMetadata, TopicPartition
from tidelog.client.producing.transaction_errors import TransactionError
from tidelog.client.producing.transaction_manager import (
    AddOffsets,
    AddPartitions,
    CommitOffsets,
    EndTxn,
    InitProducerId,
    Request,
    State,
    TransactionManager,
)
from tidelog.protocol.errors import ErrorCode, KafkaError

PARTITIONS = [TopicPartition("t", number) for number in range(3)]
GROUP = ConsumerGroupMetadata("g")
RETRIABLE = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.NOT_COORDINATOR
REFUSALS = ErrorCode.TRANSACTION_ABORTABLE, ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.INVALID_PRODUCER_ID_MAPPING
STEPS_TO_SETTLE = 60


class Coordinator:
    """One transactional id, as Kafka's coordinator; `number` of each part is that of the machine's transaction."""

    def __init__(self) -> None:
        self.epoch = -1
        self.is_open = False
        self.last_end: bool | None = None
        self.parts: list[tuple[int, object]] = []
        self.committed: list[tuple[int, object]] = []
        self.committed_numbers: set[int] = set()
        self.early_ends: list[tuple[int, int]] = []
        """(transaction that sent the end, transaction that it ended)."""

    def handle(self, request: Request, epoch: int, number: int, version_2: bool) -> tuple[ErrorCode, int]:
        """(error, the epoch from now on)."""
        if isinstance(request, InitProducerId):
            if request.producer_id >= 0 and request.producer_epoch not in (self.epoch, self.epoch - 1):
                return ErrorCode.PRODUCER_FENCED, -1
            if request.producer_id < 0 or request.producer_epoch == self.epoch:
                self._end(False)
                self.epoch += 1
                self.last_end = None
            return ErrorCode.NONE, self.epoch
        is_retried_end = isinstance(request, EndTxn) and version_2 and epoch == self.epoch - 1
        if is_retried_end and isinstance(request, EndTxn) and self.last_end is request.committed and not self.is_open:
            return ErrorCode.NONE, self.epoch
        if epoch != self.epoch:
            return ErrorCode.PRODUCER_FENCED, -1
        if not isinstance(request, EndTxn):
            self.add(number, request)
            return ErrorCode.NONE, -1
        if not self.is_open:
            if version_2 and not request.committed:
                self.epoch += 1
                self.last_end = False
                return ErrorCode.NONE, self.epoch
            return (ErrorCode.NONE if self.last_end is request.committed else ErrorCode.INVALID_TXN_STATE), -1
        self.early_ends += [(number, part) for part, _ in self.parts if part != number]
        if request.committed:
            self.committed_numbers.add(number)
        self._end(request.committed)
        self.last_end = request.committed
        if version_2:
            self.epoch += 1
        return ErrorCode.NONE, self.epoch if version_2 else -1

    def add(self, number: int, part: object) -> None:
        self.is_open = True
        self.parts.append((number, part))

    def _end(self, committed: bool) -> None:
        if committed:
            self.committed += self.parts
        self.parts, self.is_open = [], False


class World:
    """One producer's machine, its program, its batches, and the network before the coordinator."""

    def __init__(self, rng: Random, manager: TransactionManager) -> None:
        self.rng = rng
        self.manager = manager
        self.coordinator = Coordinator()
        self.finalized = rng.choice((1, 2))
        self.delayed: list[tuple[Request, int, int, bool]] = []
        self.waiting: list[TopicPartition] = []
        """Batches that were not sent, of the open transaction."""
        self.sent: list[TopicPartition] = []
        """Batches with a sequence that are not settled."""
        self.written: dict[int, int] = {}
        """By transaction how many batches the partitions have acknowledged."""
        self.broken: set[int] = set()
        """Transactions that had an abortable error."""
        self.outcomes: dict[int, bool] = {}
        self.commits_sent: set[int] = set()

    def step(self, friendly: bool) -> None:
        self._settle_batches(friendly)
        request = self.manager.next_request(bool(self.waiting or self.sent))
        self._note()
        if request is None:
            return
        if not self.manager.confirm_sending(request):
            raise AssertionError("nothing has changed between the choice and the sending")
        number, version_2 = self.manager.number, self.manager.uses_version_2
        if isinstance(request, EndTxn) and request.committed:
            assert number not in self.broken, "a commit after an abortable error"
            self.commits_sent.add(number)
        fate = 9 if friendly else self.rng.randrange(10)
        if fate == 0:  # lost on its way, or late
            if self.rng.random() < 0.7:
                self.delayed.append((request, self.manager.producer_epoch, number, version_2))
            self.manager.handle_unanswered(request)
        elif fate == 1 and not isinstance(request, InitProducerId):
            self._break()
            self.manager.handle_refusal(request, self.rng.choice(REFUSALS), "refused")
        elif fate != 2:  # 2: an answer that is to be retried
            code, epoch = self.coordinator.handle(request, self.manager.producer_epoch, number, version_2)
            if fate == 3:  # its answer is lost
                self.manager.handle_unanswered(request)
            elif code is ErrorCode.NONE:
                self._accept(request, epoch)
            else:
                self.manager.handle_refusal(request, code, "refused")
        self._note()

    def _accept(self, request: Request, epoch: int) -> None:
        if isinstance(request, InitProducerId):
            self.manager.handle_identity(1, epoch)
        elif isinstance(request, AddPartitions):
            self.manager.handle_partitions_added(request)
        elif isinstance(request, AddOffsets):
            self.manager.handle_group_added(request)
        elif isinstance(request, CommitOffsets):
            self.manager.handle_offsets_committed(request)
        else:
            self.manager.handle_ended(request, 1 if epoch >= 0 else -1, epoch)

    def _break(self) -> None:
        """A part of the open transaction has failed for good."""
        if self.manager.state in (State.IN_TRANSACTION, State.COMMITTING):
            self.broken.add(self.manager.number)

    def _note(self) -> None:
        """Take down errors and ends as they come, and drop unsent batches as the sender does."""
        manager = self.manager
        if manager.state is State.ABORTABLE_ERROR:
            self.broken.add(manager.number)
        if manager.state in (State.ABORTABLE_ERROR, State.ABORTING):
            self.waiting.clear()
        if manager.state is State.FATAL_ERROR:
            self.waiting.clear()
            self.sent.clear()
        if manager.ended_number and manager.ended_number not in self.outcomes:
            self.outcomes[manager.ended_number] = manager.ended_by_commit
            assert not self.sent, "an end before the batches were settled"

    def _settle_batches(self, friendly: bool) -> None:
        for partition in list(self.waiting):
            if self.manager.may_send(partition, is_resend=False):
                self.waiting.remove(partition)
                self.sent.append(partition)
                self.manager.note_batch_sent()
        for partition in list(self.sent):
            if not self.manager.may_send(partition, is_resend=True):
                continue
            fate = 9 if friendly else self.rng.randrange(10)
            if fate == 0:
                self.sent.remove(partition)
                self._break()
                error = KafkaError(self.rng.choice((ErrorCode.REQUEST_TIMED_OUT, ErrorCode.INVALID_RECORD)))
                self.manager.handle_batch_failure(error, had_sequence=True)
            elif fate > 4:
                self.sent.remove(partition)
                if self.manager.uses_version_2:
                    self.coordinator.add(self.manager.number, partition)
                self.written[self.manager.number] = self.written.get(self.manager.number, 0) + 1
            self._note()

    def act(self) -> None:
        """One call of the program, however silly."""
        manager = self.manager
        action = self.rng.randrange(8)
        try:
            if action == 0:
                manager.initialize()
            elif action == 1 and manager.state is State.READY:
                if self.rng.random() < 0.2:
                    self.finalized = self.rng.choice((1, 2))
                manager.begin(self.finalized == 2)
            elif action in (2, 3):
                partition = self.rng.choice(PARTITIONS)
                manager.add_partition(partition)
                self.waiting.append(partition)
            elif action == 4:
                manager.add_offsets(GROUP, {PARTITIONS[0]: OffsetAndMetadata(1)})
            elif action == 5:
                manager.commit()
            elif action == 6:
                manager.abort()
            elif self.rng.random() < 0.2:
                manager.handle_problem(ErrorCode.REQUEST_TIMED_OUT, "the program gave up an offset commit")
        except (RuntimeError, TransactionError):
            pass
        self._note()

    def deliver_late(self) -> None:
        """A request arrives that was given up. Of version 2 the batch rules are the leader's: not modelled."""
        if self.delayed and self.rng.random() < 0.3:
            request, epoch, number, version_2 = self.delayed.pop(self.rng.randrange(len(self.delayed)))
            if not isinstance(request, InitProducerId):
                self.coordinator.handle(request, epoch, number, version_2)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rng.choice((self.act, lambda: self.step(False), lambda: self.step(False), self.deliver_late))()

    def settle(self) -> None:
        """The program gives up, as `async with` and `close` do; the coordinator answers."""
        if self.manager.may_abort:
            self.manager.abort()
        for _ in range(STEPS_TO_SETTLE):
            self._note()
            self.step(True)
        assert self.manager.state in (State.UNINITIALIZED, State.READY, State.FATAL_ERROR), self.manager.state

    def check(self) -> None:
        coordinator = self.coordinator
        assert not coordinator.early_ends, "a transaction was ended by a request of another"
        for number, committed in self.outcomes.items():
            assert committed is (number in coordinator.committed_numbers) or not self._had_parts(number)
            if not committed:
                assert number not in {part for part, _ in coordinator.committed}
        assert self.broken.isdisjoint(coordinator.committed_numbers - self.commits_sent)

    def _had_parts(self, number: int) -> bool:
        return any(part == number for part, _ in self.coordinator.committed) or number in self.written


def play(seed: int, manager: TransactionManager, steps: int = 150) -> World:
    world = World(Random(seed), manager)
    world.run(steps)
    world.settle()
    world.check()
    return world


@given(st.integers(min_value=0, max_value=2**32))
def test_transactions_end_as_the_machine_says_and_every_call_ends(seed):
    play(seed, TransactionManager("tx"))


def test_the_histories_reach_every_state_and_both_ends():
    worlds = [play(seed, TransactionManager("tx")) for seed in range(200)]
    ends = [committed for world in worlds for committed in world.outcomes.values()]
    assert min(ends.count(True), ends.count(False)) > 50
    assert {world.manager.state for world in worlds} >= {State.READY, State.FATAL_ERROR}
    assert any(world.broken for world in worlds)


class CommitsAfterErrors(TransactionManager):
    """Forgets an abortable error."""

    def handle_problem(self, code: ErrorCode, message: str) -> None:
        pass


class KeepsItsEpoch(TransactionManager):
    """Does not mind a lost answer of version 1."""

    def handle_unanswered(self, request: Request) -> None:
        pass


class EndsTooEarly(TransactionManager):
    """Does not wait for the batches."""

    def next_request(self, has_incomplete_batches: bool) -> Request | None:
        return super().next_request(False)


@pytest.mark.parametrize("saboteur", [CommitsAfterErrors, KeepsItsEpoch, EndsTooEarly])
def test_the_model_notices_a_broken_rule(saboteur):
    def play_many() -> None:
        for seed in range(2_000):
            play(seed, saboteur("tx"))

    with pytest.raises(AssertionError):
        play_many()


def open_with_a_lost_commit() -> TransactionManager:
    """A transaction whose commit was sent and not answered."""
    manager = TransactionManager("tx")
    manager.initialize()
    manager.handle_identity(1, 0)
    manager.begin(True)
    manager.note_batch_sent()
    manager.commit()
    request = manager.next_request(False)
    assert request == EndTxn(True)
    assert manager.confirm_sending(request)
    manager.handle_unanswered(request)
    return manager


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_after_a_lost_commit_is_not_taken_for_an_abort(code):
    manager = open_with_a_lost_commit()
    manager.handle_refusal(EndTxn(True), code, "refused")
    assert manager.state is State.FATAL_ERROR
    assert "may have succeeded" in str(manager.error)


def test_a_problem_of_the_program_does_not_undo_a_commit_that_was_sent():
    manager = open_with_a_lost_commit()
    manager.handle_problem(ErrorCode.REQUEST_TIMED_OUT, "a record of another task was not sent")
    assert manager.state is State.COMMITTING
