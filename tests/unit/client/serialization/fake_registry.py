"""A schema registry in memory behind a real HTTP server, with the answers of Confluent's REST API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from tests.patience import join


class FakeRegistry:
    def __init__(self) -> None:
        self.url = ""
        self.schemas: list[dict[str, Any]] = []
        self.versions: dict[str, list[int]] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.raw_answer: tuple[int, bytes] | None = None

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if method == "GET" and parts[:2] == ["schemas", "ids"]:
            number = int(parts[2])
            if not 1 <= number <= len(self.schemas):
                return 404, {"error_code": 40403, "message": "Schema not found"}
            return 200, self.schemas[number - 1]
        versions = self.versions.setdefault(parts[1], [])
        if method == "GET":
            index = -1 if parts[3] == "latest" else int(parts[3]) - 1
            return 200, {"subject": parts[1], **self.schemas[versions[index] - 1]}
        if "reject" in body["schema"]:
            return 409, {"error_code": 409, "message": "Schema being registered is\nincompatible"}
        for number in versions:
            if self.schemas[number - 1] == body:
                return 200, {"id": number}
        if len(parts) == 2:
            return 404, {"error_code": 40403, "message": "Schema not found"}
        self.schemas.append(body)
        versions.append(len(self.schemas))
        return 200, {"id": len(self.schemas)}


@contextmanager
def running() -> Iterator[FakeRegistry]:
    registry = FakeRegistry()

    class Handler(BaseHTTPRequestHandler):
        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            registry.requests.append((self.command, self.path, self.headers.get("Authorization")))
            if registry.raw_answer is not None:
                status, data = registry.raw_answer
            else:
                status, answer = registry.answer(self.command, self.path, json.loads(body) if body else {})
                data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _serve

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    registry.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield registry
    finally:
        server.shutdown()
        join(thread)
        server.server_close()
