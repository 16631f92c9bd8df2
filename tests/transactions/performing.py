"""Performs plans on a client and writes down what came of it. Knows neither threads nor event loops.

Each function is a generator: it yields a `Call` of a method of the client, and is sent what the call returned or is
thrown the `ClientError` that the call raised. `drive` does that, whether the client's methods block or are awaited.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from tests.transactions.history import Attach, History, Isolation, Operation, Outcome, Poll, Record, Send
from tests.transactions.workload import ChainPlan, End, Plan, PlannedAttach, PlannedSend

Clock = Callable[[], float]
Performing = Generator["Call", Any, None]


class ClientError(Exception):
    """A client's word on a transaction that fails. `may_abort`: it is to be aborted; else only a new producer helps."""

    def __init__(self, message: str, *, may_abort: bool) -> None:
        super().__init__(message)
        self.may_abort = may_abort


class Call(NamedTuple):
    """A method of the client:

    open()                             a producer, initialised; what the one before left open is ended
    rival()                            opens a second producer of the same transactional id
    settle()                           after `rival`: the second one takes the first one's place
    begin(), commit(), abort(), flush()
    send(partition, value, done)       `done(offset or None)` is called when it is acknowledged
    send_plain(partition, value, done) as an idempotent producer without transactions does it
    attach({partition: offset})        assign
    poll(limit) -> list of Record
    rewind()                           a group's member: go back to the committed offsets
    assignment() -> {partition: None} | None   a group's member: the partitions, if they changed since the last call
    send_offsets({partition: offset})
    rest(seconds)
    """

    name: str
    arguments: tuple[Any, ...] = ()


class Performer:
    """One client of one history. `is_open`: its producer can go on; otherwise the next operation opens another."""

    def __init__(self, history: History, name: str, clock: Clock, isolation: Isolation) -> None:
        self.history, self.name, self._clock, self.isolation = history, name, clock, isolation
        self.is_open = False
        self.needs_rewind = False
        self._assignment: dict[int, int | None] | None = None
        """What a member of a group was assigned since its last operation, if that changed."""

    def _begin(self, outcome: Outcome) -> Operation:
        operations = self.history.operations
        operation = Operation(len(operations), self.name, self._clock(), outcome, isolation=self.isolation)
        operations.append(operation)
        return operation

    def open(self) -> Performing:
        self.is_open = False
        yield Call("open")
        self.is_open = True

    # Plain clients

    def perform(self, plan: Plan) -> Performing:
        if not self.is_open:
            yield from self.open()
        operation = self._begin(Outcome.PLAIN if plan.end is End.PLAIN else Outcome.UNKNOWN)
        try:
            if plan.end is not End.PLAIN:
                yield Call("begin")
            for step in plan.steps:
                if isinstance(step, PlannedSend):
                    yield self._send(operation, step, plain=plan.end is End.PLAIN)
                elif isinstance(step, PlannedAttach):
                    positions: dict[int, int | None] = dict.fromkeys(step.partitions, 0)
                    operation.steps.append(Attach(positions))
                    yield Call("attach", (positions,))
                else:
                    yield from self._poll(operation, step.limit)
            yield from self._end(operation, plan.end)
        except ClientError as error:
            yield from self._failed(operation, error)
        operation.ended_at = self._clock()
        if plan.rest_s:
            yield Call("rest", (plan.rest_s,))

    def _send(
        self, operation: Operation, planned: PlannedSend, source: tuple[int, int] | None = None, *, plain: bool = False
    ) -> Call:
        send = Send(planned.partition, planned.value, self._clock(), source=source)
        operation.steps.append(send)

        def done(offset: int | None) -> None:
            send.acknowledged_at = self._clock()
            send.offset = offset

        return Call("send_plain" if plain else "send", (planned.partition, planned.value, done))

    def _poll(self, operation: Operation, limit: int) -> Generator[Call, Any, list[Record]]:
        records: list[Record] = yield Call("poll", (limit,))
        operation.steps.append(Poll(self._clock(), records))
        return records

    def _end(self, operation: Operation, end: End) -> Performing:
        if end is End.PLAIN:
            yield Call("flush")
        elif end is End.ABORT:
            yield Call("abort")
            operation.outcome = Outcome.ABORTED
        elif end is End.ABANDON:
            self.is_open = False
        elif end is End.RIVAL:
            yield from self._commit_as_a_zombie(operation)
        else:
            operation.commit_invoked_at = self._clock()
            yield Call("commit")
            operation.outcome = Outcome.COMMITTED

    def _commit_as_a_zombie(self, operation: Operation) -> Performing:
        """The second producer is initialised before the first asks to commit, so the transaction is aborted already."""
        self.is_open = False
        yield Call("rival")
        invoked_at = self._clock()
        try:
            yield Call("commit")
        except ClientError as error:
            operation.error = str(error)
            operation.outcome = Outcome.ABORTED
        else:
            operation.commit_invoked_at = invoked_at
            operation.outcome = Outcome.COMMITTED
        yield Call("settle")
        self.is_open = True

    def _failed(self, operation: Operation, error: ClientError) -> Performing:
        operation.error = str(error)
        self.needs_rewind = True
        if operation.outcome in (Outcome.UNKNOWN, Outcome.PLAIN):
            self.is_open = False
        if operation.outcome is not Outcome.UNKNOWN or not error.may_abort:
            return
        try:
            yield Call("abort")
        except ClientError as refused:
            operation.error += f"; abort: {refused}"
        else:
            operation.outcome = Outcome.ABORTED
            self.is_open = True

    # Chain clients

    def perform_chain(self, plan: ChainPlan) -> Performing:
        """Poll the input; write what is made of it and the offset behind it in one transaction."""
        if not self.is_open:
            yield from self.open()
        if self.needs_rewind:
            yield Call("rewind")
            self.needs_rewind = False
        records: list[Record] = yield Call("poll", (plan.limit,))
        assignment = yield Call("assignment")
        if assignment is not None:
            self._assignment = assignment
        if not records:
            return
        operation = self._begin(Outcome.UNKNOWN)
        if self._assignment is not None:
            operation.steps.append(Attach(self._assignment))
            self._assignment = None
        operation.steps.append(Poll(self._clock(), records))
        try:
            yield Call("begin")
            for record, planned in zip(records, plan.outputs, strict=False):
                yield self._send(operation, planned, (record.partition, record.offset))
            for record in records:
                start, _ = operation.offsets.get(record.partition, (record.offset, 0))
                operation.offsets[record.partition] = start, record.offset + 1
            yield Call("send_offsets", ({at: end for at, (_, end) in operation.offsets.items()},))
            yield from self._end(operation, plan.end)
            self.needs_rewind = operation.outcome is not Outcome.COMMITTED
        except ClientError as error:
            yield from self._failed(operation, error)
        operation.ended_at = self._clock()


async def drive(performing: Performing, client: Any) -> None:
    """Raises ClientError where the performer does not deal with it: the producer could not be opened."""
    result: Any = None
    error: ClientError | None = None
    while True:
        try:
            call = performing.send(result) if error is None else performing.throw(error)
        except StopIteration:
            return
        result, error = None, None
        try:
            result = getattr(client, call.name)(*call.arguments)
            if inspect.isawaitable(result):
                result = await result
        except ClientError as raised:
            error = raised
