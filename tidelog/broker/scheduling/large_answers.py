"""An answer whose size the request does not bound, made in pieces by a coroutine.

A request of a few bytes may ask for all topics, groups or producers of a node. `AnswerInPieces` counts the elements of
the answer. Other requests are served between its pieces, and only a few coroutines make large answers at a time. When
`is_full`, the handler refuses the rest of the request. The first element of an answer is served whatever its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from tidelog.broker.scheduling.fair_scheduler import FairScheduler
from tidelog.broker.scheduling.pieces import PIECE_ELEMENTS_MAX
from tidelog.protocol.errors import ErrorCode, KafkaError

# The bound of one answer. Encoding so many elements takes a tenth of a second of the loop.
ANSWER_ELEMENTS_MAX: Final = 50_000

Element = TypeVar("Element")
Source = TypeVar("Source")


class Client(Protocol):
    @property
    def is_gone(self) -> bool: ...


class AnswerInPieces:
    """A context manager that lasts until the answer is encoded. `client`: None for requests of the node itself."""

    def __init__(self, scheduler: FairScheduler, client: Client | None) -> None:
        self._scheduler = scheduler
        self._client = client
        self._count = 0
        self._in_piece = 0
        self._is_large = False

    @property
    def is_full(self) -> bool:
        return self._count >= ANSWER_ELEMENTS_MAX

    async def __aenter__(self) -> AnswerInPieces:
        """Raises KafkaError(NETWORK_EXCEPTION) if the client has disconnected before its turn."""
        await self._scheduler.begin()
        self._check_client()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_large:
            self._scheduler.end_large_answer()

    async def add_elements(self, elements: int) -> None:
        """Count added elements, and pause after each piece. A costly element counts for several.

        Raises KafkaError(NETWORK_EXCEPTION) if the client has disconnected.
        """
        self._count += elements
        self._in_piece += elements
        if self._in_piece < PIECE_ELEMENTS_MAX:
            return
        self._in_piece = 0
        if not self._is_large:
            await self._scheduler.begin_large_answer()
            self._is_large = True
        await self._scheduler.pause()
        self._check_client()

    def _check_client(self) -> None:
        if self._client is not None and self._client.is_gone:
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "the client has disconnected")


async def in_pieces(scheduler: FairScheduler, elements: Sequence[Element], handle: Callable[[Element], None]) -> None:
    """Handle each element of a large request; other requests are served before each PIECE_ELEMENTS_MAX of them."""
    for start in range(0, len(elements), PIECE_ELEMENTS_MAX):
        await scheduler.pause()
        for element in elements[start : start + PIECE_ELEMENTS_MAX]:
            handle(element)


def made(sources: Sequence[Source], make: Callable[[Source], Element]) -> list[Element]:
    """The elements of an array of a response. Those of a large array are made one by one while they are counted, and
    again while they are encoded. Both go on in steps; what they are made from must not change meanwhile.
    """
    if len(sources) <= PIECE_ELEMENTS_MAX:
        return [make(source) for source in sources]
    return cast("list[Element]", Made(sources, make))


class Made(Generic[Source, Element]):
    """A large array of a response: what counting and encoding need of a list."""

    __slots__ = ("_make", "sources")

    def __init__(self, sources: Sequence[Source], make: Callable[[Source], Element]) -> None:
        self.sources = sources
        self._make = make

    def __len__(self) -> int:
        return len(self.sources)

    def __iter__(self) -> Iterator[Element]:
        return map(self._make, self.sources)


async def in_steps(response: Any) -> Any:
    """The response, from a coroutine: what a coroutine of an API with large answers returns is encoded in steps."""
    return response
