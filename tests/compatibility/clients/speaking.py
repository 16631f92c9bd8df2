"""The other end of `client.Client`: an adapter's main loop, one JSON request a line in, one JSON answer a line out.

An adapter shows one stock client to the tests in words all of them share; what it can do are the methods of its class,
named as the requests are. Bytes travel as base64. What a client cannot do its adapter does not have (`lacks` in
`known.py` says so too, so that nothing is left out by mistake).
"""

from __future__ import annotations

import base64
import json
import sys
import traceback
from typing import Any

Offsets = dict[int, int]


def to_bytes(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def to_text(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def record_out(
    partition: int,
    offset: int,
    timestamp: int,
    key: bytes | None,
    value: bytes | None,
    headers: list[tuple[str, bytes | None]],
) -> dict[str, Any]:
    """A record that was read, as every adapter tells of it."""
    return {
        "partition": partition,
        "offset": offset,
        "timestamp": timestamp,
        "key": to_text(key),
        "value": to_text(value),
        "headers": [[name, to_text(data)] for name, data in headers],
    }


def headers_in(record: dict[str, Any]) -> list[tuple[str, bytes | None]]:
    """The headers of a record to be written."""
    return [(name, to_bytes(data)) for name, data in record["headers"]]


def serve(adapter: Any) -> None:
    """Answer requests until there are none."""
    # What a client prints must not get between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"ok": getattr(adapter, request.pop("do"))(**request)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    getattr(adapter, "close", lambda: None)()
