"""Splits a request with very many elements into pieces, between which other requests are served.

Pure. For APIs that answer each element of one array independently; `IN_PIECES` of the API's module names the arrays.
`join` makes one response from the responses to the pieces. Invariant: every element is in exactly one piece, in the
order of the request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

# A request up to this size, with about a thousand elements, is served in one piece.
WHOLE_BYTES_MAX: Final = 16 * 1024
PIECE_ELEMENTS_MAX: Final = 500
# Produced batches in a piece, if their records are looked at. Each may take a millisecond.
INSPECTED_PIECE_MAX: Final = 10
# Their compressed bytes in a piece, beyond the first batch: a kilobyte of empty blocks takes up to 0.3 ms.
INSPECTED_PIECE_BYTES_MAX: Final = 64 * 1024
# Larger requests of these APIs wait for room before they are decoded (`FairScheduler.has_room`).
UNCOUNTED_BYTES_MAX: Final = 1024
# So many characters of an id cost as much as an element: its hash chooses the partition of its coordinator.
ID_CHARACTERS: Final = 100

Outer = TypeVar("Outer")
Inner = TypeVar("Inner")
Value = TypeVar("Value")


class Arrays(NamedTuple):
    """The field names of the array in the request and of the array in the response."""

    request: str
    response: str
    piece_elements: int = 0
    """The number of elements of a piece; 0 for PIECE_ELEMENTS_MAX."""
    whole_bytes_max: int = 0
    """The largest request that is served in one piece; 0 for WHOLE_BYTES_MAX."""
    response_elements: Callable[[Any], int] | None = None
    """The number of elements in a response to one element, if the request does not bound it. Then each piece has one
    element, and `large_answers` bounds the response."""


def flattened(nested: Mapping[Outer, Mapping[Inner, Value]]) -> Iterator[tuple[Outer, Inner, Value]]:
    """The values with their keys."""
    return ((outer, inner, value) for outer, values in nested.items() for inner, value in values.items())


def split(request: Any, arrays: Arrays) -> Iterator[Any]:
    """Copies of the request with the elements of one piece each; the request itself if it has no more."""
    elements = getattr(request, arrays.request)
    piece_elements = 1 if arrays.response_elements is not None else arrays.piece_elements or PIECE_ELEMENTS_MAX
    if len(elements) <= piece_elements:
        yield request
        return
    for start in range(0, len(elements), piece_elements):
        piece = copy.copy(request)
        setattr(piece, arrays.request, elements[start : start + piece_elements])
        yield piece


def is_large(request: Any, arrays: Arrays, size_bytes: int) -> bool:
    """Whether a request of this size is served in pieces."""
    if arrays.response_elements is not None and len(getattr(request, arrays.request)) > 1:
        return True
    return size_bytes > (arrays.whole_bytes_max or WHOLE_BYTES_MAX)


def join(responses: list[Any], arrays: Arrays) -> Any:
    """One response with the elements of all responses."""
    first, *others = responses
    for response in others:
        getattr(first, arrays.response).extend(getattr(response, arrays.response))
    return first
