"""One frame in, one answer out: parses the request header, runs the API's handler, converts errors to responses.

Only this module converts a `KafkaError` to a response, and an unknown exception to UNKNOWN_SERVER_ERROR with a log
line. Produce and Fetch decode and encode by themselves; this module decodes and encodes all other APIs by their
compiled messages. A malformed frame raises MalformedMessage, which closes the connection, as in Kafka.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Generator, Iterable, Iterator, Sequence
from functools import partial
from struct import Struct
from struct import error as StructError
from types import ModuleType
from typing import Any, NamedTuple

from tidelog.broker.apis.delegated import CONTROLLER_ROWS, DelegatedApi
from tidelog.broker.apis.error_counts import count_errors, count_errors_in_steps
from tidelog.broker.apis.records import fetch, produce
from tidelog.broker.apis.services import Services
from tidelog.broker.cluster.controller_channel import forwarding_ms
from tidelog.broker.network.counters import SHORTEST_S, ApiCounters, RequestCounters
from tidelog.broker.network.order_of_requests import BEHIND, EXCLUSIVE
from tidelog.broker.network.request import NOT_YET, Answer, Deferred, Peer, RequestContext, completed
from tidelog.broker.scheduling.fair_scheduler import COSTLY_WAITS, LONG_TURN_S
from tidelog.broker.scheduling.host_queue import REQUEST_HOST
from tidelog.broker.scheduling.large_answers import AnswerInPieces
from tidelog.broker.scheduling.pieces import UNCOUNTED_BYTES_MAX, WHOLE_BYTES_MAX, Arrays, is_large, join, split
from tidelog.protocol.api import ApiKey, api_name, request_header_version, response_header_version
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage
from tidelog.protocol.hot import FETCH_FLEXIBLE_FROM, PRODUCE_FLEXIBLE_FROM, Buffer, decode_alike

logger = logging.getLogger("tidelog.dispatch")

_HEADER = Struct(">hhih")
_FRAME_HEAD = Struct(">ii")
_NO_HEADER = "request shorter than its header"

API_VERSIONS = 18
# The maximum of running tasks of cold APIs, over all connections. A host may have as many as are left: a single one
# leaves half of them to others, and the n-th one finds a share, too. More are refused with THROTTLING_QUOTA_EXCEEDED.
COLD_TASKS_MAX = 4096
# The same for requests between nodes at the controllers: clients cannot take the places of heartbeats and votes.
NODES_TASKS_MAX = 2 * COLD_TASKS_MAX
KEYS_OF_NODES = frozenset({ApiKey.BROKER_HEARTBEAT, *(row.REQUEST.API_KEY for row in CONTROLLER_ROWS)})
# Requests for the active controller up to this size begin at once. Only one larger one begins, or has its answer
# encoded, in a turn of the loop: very many may wait for the same commit.
AT_ONCE_BYTES_MAX = 256
# A larger request of an API other than Produce and Fetch, which is not one of nodes, is decoded in steps.
DECODED_AT_ONCE_BYTES_MAX = 32 * 1024
# Its decision and answer hold several times what other large requests do, and the garbage collector walks all of it.
CONTROLLER_WEIGHT = 4
# For what one answer has no room for: clients ask for it again.
_FULL = KafkaError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "the answer has no room for more")
# The request fields with the time that the client waits.
_PATIENCE_FIELDS = ("timeout_ms", "rebalance_timeout_ms", "session_timeout_ms", "max_wait_ms")


class Dispatcher:
    """`apis`: handler modules (see `services`) and rows of `delegated`; each has REQUEST, handle() and refuse().

    `forwarded`: the keys of APIs that only the active controller handles; other nodes forward them to it.
    """

    def __init__(
        self, services: Services, apis: Iterable[ModuleType | DelegatedApi[Any]], forwarded: Collection[int] = ()
    ) -> None:
        self._services = services
        self._produces = services.requests.produce
        self._scheduler = services.scheduler
        self._stopwatch = services.requests.stopwatch
        self._apis = {module.REQUEST.API_KEY: _Api(module, services.requests, forwarded) for module in apis}
        self._forwarded = frozenset(forwarded)
        self._tasks: dict[asyncio.Task[bool | None], int] = {}  # with the bytes of a large request, otherwise 0
        self._tasks_of_host: dict[str, int] = {}

    @property
    def supported_versions(self) -> dict[int, range]:
        """API key -> versions that have a handler."""
        hot = {
            produce.API_KEY: range(produce.VERSIONS.start, produce.VERSIONS.stop),
            fetch.API_KEY: range(fetch.VERSIONS.start, fetch.VERSIONS.stop),
        }
        return hot | {key: api.versions for key, api in self._apis.items()}

    def dispatch(self, frame: memoryview, connection: Peer) -> Answer:
        began = self._stopwatch()
        topic_at = connection.produce_topic_at
        alike = decode_alike(frame, topic_at) if topic_at else None
        if alike is not None:
            version, correlation_id, one = alike
            answer = produce.serve_one(self._services, one, version, correlation_id, connection)
            counters = self._produces
        else:
            try:
                key, version, correlation_id, client_id_bytes = _HEADER.unpack_from(frame)
            except StructError:
                raise MalformedMessage(_NO_HEADER) from None
            position = 10 + client_id_bytes if client_id_bytes > 0 else 10
            if key == produce.API_KEY and version in produce.VERSIONS:
                if version >= PRODUCE_FLEXIBLE_FROM:
                    # The tagged fields of the header, nearly always one byte for none.
                    if position < len(frame) and not frame[position]:
                        position += 1
                    else:
                        position = _skip_header_tags(frame, position)
                answer = produce.serve(self._services, frame, position, version, correlation_id, connection)
                counters = self._produces
            elif key == fetch.API_KEY and version in fetch.VERSIONS:
                if version >= FETCH_FLEXIBLE_FROM:
                    if position < len(frame) and not frame[position]:
                        position += 1
                    else:
                        position = _skip_header_tags(frame, position)
                answer, counters = fetch.serve(self._services, frame[position:], version, correlation_id, connection)
            else:
                return self._serve(frame, connection, key, version, correlation_id, client_id_bytes)
        counters.versions[version] += 1
        if type(answer) is not bytes and isinstance(answer, Deferred) and answer.response is None:
            answer.timing = (counters, began)
            return answer
        elapsed = self._stopwatch() - began
        if elapsed <= SHORTEST_S:  # the most frequent case, counted without a search for the bucket
            durations = counters.durations
            durations.counts[0] += 1
            durations.total += elapsed
        else:
            counters.durations.observe(elapsed)
            self._add_work(elapsed, connection)
        return answer

    def _add_work(self, elapsed: float, connection: Peer) -> None:
        if elapsed > LONG_TURN_S:
            connection.costly_waits = COSTLY_WAITS
        self._scheduler.add_work(elapsed)

    def dispatch_pipelined(self, frames: Sequence[memoryview], connection: Peer) -> list[Answer] | None:
        """The answers to the frames at the start that can be handled together; `dispatch` must take the others.

        None where the first one is of a kind that never can: no Produce, or one of a transaction.
        """
        began = self._stopwatch()
        frame = frames[0]
        try:
            key, version, _, client_id_bytes = _HEADER.unpack_from(frame)
        except StructError:
            return []
        position = 10 + client_id_bytes if client_id_bytes > 0 else 10
        if key != produce.API_KEY:
            return None
        is_flexible = PRODUCE_FLEXIBLE_FROM <= version < produce.VERSIONS.stop
        if not is_flexible or position + 1 >= len(frame) or frame[position]:
            return []
        if frame[position + 1]:
            return None  # the transactional id is there
        answers = produce.serve_pipelined(self._services, frames, position + 1, version, connection)
        if not answers:
            return answers
        counters = self._produces
        counters.versions[version] += len(answers)
        elapsed = self._stopwatch() - began
        answered_count = 0
        for answer in answers:
            if type(answer) is bytes:
                answered_count += 1
            elif isinstance(answer, Deferred):
                answer.timing = (counters, began)
        counters.durations.observe(elapsed, answered_count)
        if elapsed > SHORTEST_S:
            self._scheduler.add_work(elapsed)
        return answers

    def dispatch_cold(self, frame: memoryview, connection: Peer) -> Answer:
        """Handle a request for one of `apis`: all except Produce and Fetch of records."""
        return self._serve(frame, connection, *_head(frame))

    def _serve(
        self, frame: memoryview, connection: Peer, key: int, version: int, correlation_id: int, client_id_bytes: int
    ) -> Answer:
        api = self._apis.get(key)
        if api is None:
            # Versions of Produce and Fetch that are served do not come here.
            unserved = f"version {version} of " if key in (produce.API_KEY, fetch.API_KEY) else ""
            raise MalformedMessage(f"{unserved}{api_name(key)} is not served")
        if version not in api.versions:
            if key != API_VERSIONS:
                raise MalformedMessage(f"version {version} of {api.name} is not served")
            # The answer to an unknown version of ApiVersions has the form of version 0 (KIP-511).
            error = KafkaError(ErrorCode.UNSUPPORTED_VERSION)
            context = RequestContext(key, 0, correlation_id, None, connection.host, connection.listener_name)
            return _frame(api.refuse(None, error, 0), context)
        in_steps = len(frame) > DECODED_AT_ONCE_BYTES_MAX and not api.is_of_nodes
        if (in_steps or len(frame) > api.counted_above_bytes) and not self._scheduler.has_room:
            return NOT_YET
        began = api.counters.begun(version)
        if in_steps and self._has_place(api, connection.host):
            head = _Head(version, correlation_id, client_id_bytes)
            return _timed(self._decode_and_answer(bytes(frame), api, head, connection), api.counters, began)
        client_id, request = api.parse(frame, version, client_id_bytes)
        context = RequestContext(
            key, version, correlation_id, client_id, connection.host, connection.listener_name, connection
        )
        answer = self._answer(frame, api, context, request)
        self._add_work(self._stopwatch() - began, connection)
        return _timed(answer, api.counters, began)

    def _decode_and_answer(self, frame: bytes, api: _Api, head: _Head, connection: Peer) -> Deferred:
        """Decode a large request in steps, between which others are served, and answer it."""
        answer = _DeferredMessage(None, exclusive=True)
        answer.delays = BEHIND.get(api.key, ())

        async def run() -> bool:
            REQUEST_HOST.set(connection.host)
            await self._scheduler.begin()
            try:
                client_id, request = await self._decoded(frame, api, head.version, head.client_id_bytes)
            except MalformedMessage as error:
                answer.complete(error.with_traceback(None))  # whose frames may keep the answer
                return True
            answer.wait_as_stated(request)
            context = RequestContext(
                api.key, head.version, head.correlation_id, client_id, connection.host, connection.listener_name,
                connection,
            )  # fmt: skip
            answer.complete_as(self._answer(frame, api, context, request))
            self._end_large_request()  # its answer has begun another, in a task of its own
            return True

        task = self._start(run(), answer, len(frame) * api.weight, connection.host)

        def abandoned() -> None:
            task.cancel()

        answer.on_abandon = abandoned
        return answer

    async def _decoded(self, frame: bytes, api: _Api, version: int, client_id_bytes: int) -> tuple[str | None, Any]:
        """As `api.parse`, with a pause after each step."""
        steps = api.parse_in_steps(frame, version, client_id_bytes)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                client_id, request = end.value
                break
            await self._scheduler.pause()
        await self._scheduler.pause()
        return client_id, request

    def _has_place(self, api: _Api, host: str) -> bool:
        """Whether one more task of this host may begin."""
        left = api.tasks_max - len(self._tasks)
        return left > 0 and (api.is_of_nodes or self._tasks_of_host.get(host, 0) < left)

    def _answer(self, frame: Buffer, api: _Api, context: RequestContext, request: Any) -> Answer:
        if api.is_forwarded:
            return self._run(
                self._by_controller(bytes(frame), api, context, request), api, context, request, len(frame)
            )
        try:
            if api.in_pieces is not None and is_large(request, api.in_pieces, len(frame)):
                pieces = self._piece_by_piece(api.in_pieces, api, context, request)
                return self._run(pieces, api, context, request, len(frame))
            result = api.handle(self._services, context, request)
            if inspect.iscoroutine(result):
                return self._run(result, api, context, request, len(frame))
        except Exception as error:
            result = _as_kafka_error(error, api.name)
        in_steps = api.answers_in_steps(len(frame))
        if isinstance(result, Deferred):
            if result.response is None:
                later = partial(self._frame_later, api, context, request) if in_steps else None
                answer = _EncodedAnswer(result, context, request, api, later)
                # It keeps its request: of one connection, one large request waits at a time.
                answer.exclusive |= len(frame) > WHOLE_BYTES_MAX and not api.is_of_nodes
                answer.exclusive |= api.key in EXCLUSIVE
                answer.delays = BEHIND.get(api.key, ())
                return answer
            result = result.response
        if in_steps:
            return self._run(_made(result), api, context, request, len(frame))
        return api.framed(result, context, request)

    def _frame_later(self, api: _Api, context: RequestContext, request: Any, response: Any, answer: Deferred) -> None:
        """Complete `answer` with the frame of a large response."""

        async def run() -> None:
            REQUEST_HOST.set(context.client_host)
            answer.complete(await self._framed_in_steps(api, response, context, request))

        self._start(run(), answer, 0, context.client_host)

    def _run(
        self, coroutine: Coroutine[Any, Any, Any], api: _Api, context: RequestContext, request: Any, size_bytes: int
    ) -> Deferred:
        """Run a cold handler as a task. The connection's next request waits for it, as in Kafka."""
        answer = _DeferredMessage(request, exclusive=True)
        large_bytes = size_bytes if size_bytes > api.counted_above_bytes else 0
        takes_turns = api.takes_turns and size_bytes > AT_ONCE_BYTES_MAX
        large_bytes *= api.weight
        if not self._has_place(api, context.client_host):
            coroutine.close()
            error = KafkaError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "too many requests are under way")
            answer.response = api.framed(error, context, request)
            return answer

        async def run() -> None:
            REQUEST_HOST.set(context.client_host)
            try:
                if takes_turns:
                    await self._scheduler.begin()
                response = await coroutine
                if isinstance(response, Deferred):
                    response = await self._completed(response, answer)
            except Exception as error:
                response = _as_kafka_error(error, api.name)
            in_steps = takes_turns or api.answers_may_be_large or api.answers_in_steps(size_bytes)
            if in_steps and type(response) is not bytes:
                response = await self._framed_in_steps(api, response, context, request)
            is_framed = type(response) in (bytes, bytearray)
            answer.complete(response if is_framed else api.framed(response, context, request))

        self._start(run(), answer, large_bytes, context.client_host, coroutine)
        return answer

    async def _completed(self, response: Deferred, answer: Deferred) -> Any:
        """As `completed`, in the task of a request. While it waits for others it takes no room from large requests."""
        task = self._end_large_request()
        abandon = response.on_abandon
        if abandon is not None:

            def abandoned() -> None:
                abandon()
                task.cancel()  # nothing completes the response any more

            answer.on_abandon = abandoned
        try:
            return await completed(response)
        finally:
            answer.on_abandon = None

    def _end_large_request(self) -> asyncio.Task[Any]:
        """The task that runs, whose request takes no room from large ones any more."""
        task = asyncio.current_task()
        assert task is not None
        self._scheduler.end_request(self._tasks[task])
        self._tasks[task] = 0
        return task

    def _start(
        self,
        steps: Coroutine[Any, Any, bool | None],
        answer: Deferred,
        large_bytes: int,
        host: str,
        handling: Coroutine[Any, Any, Any] | None = None,
    ) -> asyncio.Task[bool | None]:
        """Start the task that completes the answer, or returns True where another one will. `handling`: a coroutine
        that it awaits.
        """
        of_host = self._tasks_of_host

        def ended(done: asyncio.Task[bool | None]) -> None:
            if of_host[host] == 1:
                del of_host[host]
            else:
                of_host[host] -= 1
            self._scheduler.end_request(self._tasks.pop(done, 0))
            if handling is not None:
                handling.close()  # prevents the warning about a coroutine cancelled before its first step
            if answer.response is not None:
                return
            error = None if done.cancelled() else done.exception()
            if error is None:
                if not done.cancelled() and done.result():
                    return
                answer.complete(None)  # for instance, the node is stopping
            else:
                answer.failed(error)

        task = asyncio.get_running_loop().create_task(steps)
        self._tasks[task] = large_bytes
        of_host[host] = of_host.get(host, 0) + 1
        self._scheduler.begin_request(large_bytes)
        task.add_done_callback(ended)
        return task

    async def _piece_by_piece(self, arrays: Arrays, api: _Api, context: RequestContext, request: Any) -> Any:
        """Handle a large request in pieces, with pauses in which other requests run."""
        api.check(request)
        answered = []
        async with AnswerInPieces(self._scheduler, context.connection) as answer:
            for piece in split(request, arrays):
                if answer.is_full:
                    answered.append(api.refuse(piece, _FULL, context.api_version))
                    continue
                if arrays.response_elements is None:
                    await self._scheduler.pause()
                result = api.handle(self._services, context, piece)
                if inspect.iscoroutine(result):
                    result = await result
                response = await completed(result) if isinstance(result, Deferred) else result
                answered.append(response)
                if arrays.response_elements is not None:
                    await answer.add_elements(1 + arrays.response_elements(response))
        return join(answered, arrays)

    async def _by_controller(self, frame: bytes, api: _Api, context: RequestContext, request: Any) -> Any:
        """The active controller's answer: a message of this node's controller, or a frame of another node. A request
        during which this node loses the lead is forwarded.
        """
        channel = self._services.controller_channel
        if channel.is_local():
            here = await self._outcome(api, context, request)
            if not await self._lost_the_lead(here):
                return here
        response = await channel.forward(frame, context.client_host, forwarding_ms(request))
        return len(response).to_bytes(4, "big") + response

    # -------------------------------------------------------------------- requests of this node and in envelopes

    async def call(self, request: Any, version: int) -> Any:
        """Handle a request of this node itself, without forwarding. Returns the response message."""
        api = self._apis[request.API_KEY]
        return await self._outcome(api, RequestContext(request.API_KEY, version, 0, None, "127.0.0.1", ""), request)

    async def embedded(self, frame: bytes, client_host: str) -> bytes:
        """The response, with its header, to a request in an envelope. Raises KafkaError, MalformedMessage.

        Raises NOT_CONTROLLER also if this node has lost the lead during the request: the forwarding broker then retries
        at the next controller, as in Kafka. As an error inside the response it would reach the client, and few clients
        retry then.
        """
        view = memoryview(frame)
        key, version, correlation_id, client_id_bytes = _head(view)
        api = self._apis.get(key)
        if api is None or version not in api.versions:
            # Kafka's broker then closes its client's connection, so that the client learns what this controller serves.
            raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"version {version} of API key {key} is not served here")
        if key not in self._forwarded:
            raise KafkaError(ErrorCode.INVALID_REQUEST, f"API key {key} cannot be forwarded")
        began = api.counters.begun(version)
        REQUEST_HOST.set(client_host)
        if len(frame) > DECODED_AT_ONCE_BYTES_MAX:
            client_id, request = await self._decoded(frame, api, version, client_id_bytes)
        else:
            client_id, request = api.parse(view, version, client_id_bytes)
        context = RequestContext(key, version, correlation_id, client_id, client_host, "")
        response = await self._outcome(api, context, request)
        if await self._lost_the_lead(response):
            raise KafkaError(ErrorCode.NOT_CONTROLLER)
        if len(frame) > AT_ONCE_BYTES_MAX:
            framed = await self._framed_in_steps(api, response, context, request)
        else:
            framed = api.framed(response, context, request)
        api.counters.answered(began)
        return bytes(memoryview(framed)[4:])

    async def _framed_in_steps(self, api: _Api, response: Any, context: RequestContext, request: Any) -> bytearray:
        """As `api.framed`. Very many may have waited for the same commit: each step is in a turn of its own."""
        await self._scheduler.begin()
        frame = bytearray()
        for _ in api.framed_in_steps(frame, response, context, request):
            await self._scheduler.pause()
        return frame

    async def _outcome(self, api: _Api, context: RequestContext, request: Any) -> Any:
        try:
            result = api.handle(self._services, context, request)
            if inspect.iscoroutine(result):
                result = await result
            return await completed(result) if isinstance(result, Deferred) else result
        except Exception as error:
            return api.refuse(request, _as_kafka_error(error, api.name), context.api_version)

    async def _lost_the_lead(self, response: Any) -> bool:
        errors: dict[int, int] = {}
        for _ in count_errors_in_steps(response, errors):
            await self._scheduler.pause()
        return ErrorCode.NOT_CONTROLLER in errors

    @property
    def tasks_under_way(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel the running cold handlers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Head(NamedTuple):
    version: int
    correlation_id: int
    client_id_bytes: int


class _Api:
    __slots__ = (
        "answers_may_be_large",
        "check",
        "counted_above_bytes",
        "counters",
        "handle",
        "in_pieces",
        "is_forwarded",
        "is_of_nodes",
        "key",
        "name",
        "read",
        "read_in_steps",
        "refuse",
        "takes_turns",
        "tasks_max",
        "versions",
        "weight",
    )

    def __init__(
        self, module: ModuleType | DelegatedApi[Any], requests: RequestCounters, forwarded: Collection[int]
    ) -> None:
        request = module.REQUEST
        self.key: int = request.API_KEY
        # Forward the frame unchanged. An API with FORWARDS_ITSELF checks the request first and forwards the rest.
        self.is_forwarded = self.key in forwarded and not getattr(module, "FORWARDS_ITSELF", False)
        self.takes_turns = self.key in forwarded or self.key == ApiKey.ENVELOPE
        self.weight = CONTROLLER_WEIGHT if self.takes_turns else 1
        """How often the bytes of a large request count."""
        self.is_of_nodes = self.key in KEYS_OF_NODES
        self.tasks_max = NODES_TASKS_MAX if self.is_of_nodes else COLD_TASKS_MAX
        self.name: str = request.__name__.removesuffix("Request")
        self.counters = requests.of(self.name, request.VERSIONS)
        self.versions: range = request.VERSIONS
        self.read: Callable[[memoryview, int, int], tuple[Any, int]] = request.read
        self.read_in_steps: Callable[[bytes, int, int], Generator[None, None, tuple[Any, int]]] = request.read_in_steps
        self.handle: Callable[[Services, RequestContext, Any], Any] = module.handle
        self.refuse: Callable[[Any, KafkaError, int], Any] = module.refuse
        self.in_pieces: Arrays | None = getattr(module, "IN_PIECES", None)
        # The answers that its coroutines make are encoded in steps, whatever the size of the request.
        self.answers_may_be_large: bool = getattr(module, "ANSWERS_MAY_BE_LARGE", False) or (
            self.in_pieces is not None and self.in_pieces.response_elements is not None
        )
        # Requests with many elements take their turns: the bytes under way have a bound. Not those of nodes, and with
        # COUNTED_ABOVE_BYTES, once they are decoded, not those that wait for large requests of other nodes.
        above_bytes = UNCOUNTED_BYTES_MAX if self.in_pieces is not None or self.takes_turns else WHOLE_BYTES_MAX
        if self.is_of_nodes:
            above_bytes = sys.maxsize
        self.counted_above_bytes: int = getattr(module, "COUNTED_ABOVE_BYTES", above_bytes)
        self.check: Callable[[Any], None] = getattr(module, "check", lambda request: None)

    def answers_in_steps(self, size_bytes: int) -> bool:
        """Whether the answer to a request of this size is encoded in steps. Only for what is counted: it waits."""
        return size_bytes > WHOLE_BYTES_MAX and size_bytes > self.counted_above_bytes

    def parse(self, frame: memoryview, version: int, client_id_bytes: int) -> tuple[str | None, Any]:
        """The client id and the request of a frame whose first fields are known. Raises MalformedMessage."""
        client_id, position = self._parse_head(frame, version, client_id_bytes)
        # As in Kafka, bytes after the request are ignored, because librdkafka sends some.
        request, _ = self.read(frame, position, version)
        return client_id, request

    def parse_in_steps(
        self, frame: bytes, version: int, client_id_bytes: int
    ) -> Generator[None, None, tuple[str | None, Any]]:
        """As `parse`; others may run at each yield."""
        client_id, position = self._parse_head(memoryview(frame), version, client_id_bytes)
        request, _ = yield from self.read_in_steps(frame, position, version)
        return client_id, request

    def _parse_head(self, frame: memoryview, version: int, client_id_bytes: int) -> tuple[str | None, int]:
        """The client id, and where the request begins."""
        end = 10 + max(client_id_bytes, 0)
        if end > len(frame):
            raise MalformedMessage("client id runs past the request")
        # As in Kafka, a client id in another encoding does not refuse the request.
        client_id = str(frame[10:end], "utf-8", "replace") if client_id_bytes >= 0 else None
        return client_id, _skip_header_tags(frame, end) if request_header_version(self.key, version) == 2 else end

    def framed(self, response: Any, context: RequestContext, request: Any) -> bytearray:
        """The frame of a response or KafkaError. If this version cannot encode the response, the frame has an error."""
        response = self._counted(response, context, request)
        try:
            return _frame(response, context)
        except Exception as error:
            return _frame(self._not_encoded(error, context, request), context)

    def framed_in_steps(self, frame: bytearray, response: Any, context: RequestContext, request: Any) -> Iterator[None]:
        """Fill `frame` as `framed`; others may run at each yield."""
        if isinstance(response, KafkaError):
            response = self.refuse(request, response, context.api_version)
            yield
        try:
            yield from count_errors_in_steps(response, self.counters.errors)
            yield from _steps_of_frame(frame, response, context)
        except Exception as error:
            frame[:] = _frame(self._not_encoded(error, context, request), context)

    def _counted(self, response: Any, context: RequestContext, request: Any) -> Any:
        if isinstance(response, KafkaError):
            response = self.refuse(request, response, context.api_version)
        count_errors(response, self.counters.errors)
        return response

    def _not_encoded(self, error: Exception, context: RequestContext, request: Any) -> Any:
        refused = KafkaError(_as_kafka_error(error, self.name).code)  # its message may not fit
        return self.refuse(request, refused, context.api_version)


class _DeferredMessage(Deferred):
    """A later answer to a request that may state how long its client waits."""

    __slots__ = ("_patience_s", "delays")

    def __init__(self, request: Any, exclusive: bool = False) -> None:
        super().__init__(exclusive)
        self.delays: Collection[int] = ()
        self._patience_s = 0.0
        self.wait_as_stated(request)

    def wait_as_stated(self, request: Any) -> None:
        self._patience_s = max(getattr(request, name, 0) for name in _PATIENCE_FIELDS) / 1000

    def overdue_s(self, waited_s: float, loop_time_s: float) -> float:
        return waited_s - self._patience_s


class _EncodedAnswer(_DeferredMessage):
    """A Deferred frame for the connection, from a handler's Deferred message."""

    __slots__ = ()

    def __init__(
        self,
        inner: Deferred,
        context: RequestContext,
        request: Any,
        api: _Api,
        later: Callable[[Any, Deferred], None] | None = None,
    ) -> None:
        super().__init__(request, inner.exclusive)

        def encode(response: Any) -> None:
            if response is None:
                self.complete(None)
                return
            if later is not None:
                self.on_abandon = None  # nothing waits any more
                later(response, self)
                return
            try:
                frame = api.framed(response, context, request)
            except Exception as error:
                self.failed(error)
            else:
                self.complete(frame)

        inner.on_complete(encode)
        self.on_abandon = inner.on_abandon


async def _made(result: Any) -> Any:
    return result


def _head(frame: memoryview) -> tuple[int, int, int, int]:
    """API key, version, correlation id, bytes of the client id (-1 for none)."""
    try:
        return _HEADER.unpack_from(frame)
    except StructError:
        raise MalformedMessage(_NO_HEADER) from None


def _timed(answer: Answer, counters: ApiCounters, began: float) -> Answer:
    """Count the duration of the request, now or when its answer is complete."""
    if isinstance(answer, Deferred) and answer.response is None:
        answer.timing = (counters, began)
    else:
        counters.answered(began)
    return answer


def _frame(response: Any, context: RequestContext) -> bytearray:
    out = _frame_head(context)
    response.write(out, context.api_version)
    _FRAME_HEAD.pack_into(out, 0, len(out) - 4, context.correlation_id)
    return out


def _steps_of_frame(out: bytearray, response: Any, context: RequestContext) -> Iterator[None]:
    out += _frame_head(context)
    yield from response.write_in_steps(out, context.api_version)
    _FRAME_HEAD.pack_into(out, 0, len(out) - 4, context.correlation_id)


def _frame_head(context: RequestContext) -> bytearray:
    return bytearray(9 if response_header_version(context.api_key, context.api_version) == 1 else 8)


def _skip_header_tags(frame: memoryview, position: int) -> int:
    try:
        if frame[position] == 0:
            return position + 1
        count = frame[position]
        position += 1
        if count >= 0x80:
            raise MalformedMessage("too many tagged fields in the request header")
        for _ in range(count):
            if frame[position] >= 0x80 or frame[position + 1] >= 0x80:
                raise MalformedMessage("tagged field of the request header is too large")
            position += 2 + frame[position + 1]
        return position
    except IndexError:
        raise MalformedMessage("request shorter than its header") from None


def _as_kafka_error(error: Exception, name: str) -> KafkaError:
    if isinstance(error, KafkaError):
        return error.with_traceback(None)  # a frame of it may keep the error, and with it the request and connection
    logger.error("%s failed", name, exc_info=error)
    return KafkaError(ErrorCode.UNKNOWN_SERVER_ERROR, "the broker failed; its log says why")
