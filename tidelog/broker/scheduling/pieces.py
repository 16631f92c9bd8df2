"""Requests that name very much, taken apart: one piece after the other is served, and others are served in between.

Pure. For APIs that answer each element of one array for itself; each says in `IN_PIECES` which arrays these are. The
answers to the pieces are put together again, so that a client sees one request and one answer. Invariant: every element
is in exactly one piece, in the order of the request.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

# A request below this size is served at once: it names a thousand things or so.
WHOLE_BYTES_MAX: Final = 16 * 1024
PIECE_ELEMENTS_MAX: Final = 500
# A larger request of those that take their turns begins when there is room for it (`FairScheduler.has_room`).
UNCOUNTED_BYTES_MAX: Final = 1024


class Arrays(NamedTuple):
    """Names of the request's and of the response's array."""

    asked: str
    answered: str
    at_once: int = 0
    """Elements of one piece; 0 for PIECE_ELEMENTS_MAX."""
    whole_bytes_max: int = 0
    """The largest request that is served at once; 0 for WHOLE_BYTES_MAX."""
    size: Callable[[Any], int] | None = None
    """How much a response to one element holds, if the request does not bound it: then each piece is one element, and
    a response has a bound (`large_answers`)."""


def split(request: Any, arrays: Arrays) -> Iterator[Any]:
    """The same request with the elements of one piece at most, as often as it takes; itself if it has no more."""
    elements = getattr(request, arrays.asked)
    at_once = 1 if arrays.size is not None else arrays.at_once or PIECE_ELEMENTS_MAX
    if len(elements) <= at_once:
        yield request
        return
    for start in range(0, len(elements), at_once):
        piece = copy.copy(request)
        setattr(piece, arrays.asked, elements[start : start + at_once])
        yield piece


def is_large(request: Any, arrays: Arrays, size_bytes: int) -> bool:
    """Whether a request of so many bytes is served in pieces."""
    if arrays.size is not None and len(getattr(request, arrays.asked)) > 1:
        return True
    return size_bytes > (arrays.whole_bytes_max or WHOLE_BYTES_MAX)


def join(responses: list[Any], arrays: Arrays) -> Any:
    """One response of all."""
    first, *others = responses
    for response in others:
        getattr(first, arrays.answered).extend(getattr(response, arrays.answered))
    return first
