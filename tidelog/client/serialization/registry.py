"""A client of a schema registry (Confluent's REST API, which Karapace and Apicurio serve too).

Blocking, with the standard library's HTTP client. Each schema is asked for once and kept: a registry never changes the
schema of an id. Redirects are not followed, so that credentials go to no other host.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlsplit

_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
_RESPONSE_BYTES_MAX = 4 * 1024 * 1024
_SCHEMAS_MAX = 10_000


class SchemaRegistryError(Exception):
    """A registry refused a request, or did not answer.

    `status` is that of HTTP, None without an answer; `code` is the registry's own error code, such as 40401.
    """

    def __init__(self, message: str, status: int | None = None, code: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True, slots=True)
class SchemaReference:
    """A schema that another one names: the type `name` stands in this version of `subject`."""

    name: str
    subject: str
    version: int


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema as the registry keeps it: its text, its format (AVRO, JSON, PROTOBUF) and the schemas that it names."""

    text: str
    type: str = "AVRO"
    references: tuple[SchemaReference, ...] = field(default=())


class SchemaRegistry:
    """A schema registry at `url`. It may be shared by threads.

    `username` and `password` are sent by HTTP's basic authentication; https verifies the certificate. `timeout_s`
    limits the wait for a connection, and then for the whole answer.

    >>> registry = SchemaRegistry("http://127.0.0.1:8081")
    """

    def __init__(
        self, url: str, *, username: str | None = None, password: str | None = None, timeout_s: float = 10
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
            raise ValueError("the url of a schema registry is http://host:port or https://host:port, without a user")
        self._parts = parts
        self._timeout_s = timeout_s
        self._headers = {"Accept": _CONTENT_TYPE, "Content-Type": _CONTENT_TYPE}
        if username is not None:
            credentials = base64.b64encode(f"{username}:{password or ''}".encode()).decode()
            self._headers["Authorization"] = f"Basic {credentials}"
        self._schemas: dict[int, RegisteredSchema] = {}
        self._lock = threading.RLock()  # a signal handler may decode, too

    def __repr__(self) -> str:
        return f"SchemaRegistry({self._parts.scheme}://{self._parts.netloc})"

    def schema(self, schema_id: int) -> RegisteredSchema:
        """The schema with this id. Raises SchemaRegistryError."""
        known = self._schemas.get(schema_id)
        if known is not None:
            return known
        schema = _registered(self._request("GET", f"/schemas/ids/{schema_id}"))
        with self._lock:
            if len(self._schemas) >= _SCHEMAS_MAX:
                self._schemas.clear()
            self._schemas[schema_id] = schema
        return schema

    def version(self, subject: str, version: int | str = "latest") -> RegisteredSchema:
        """A version of a subject. Raises SchemaRegistryError."""
        return _registered(self._request("GET", f"/subjects/{quote(subject, safe='')}/versions/{version}"))

    def register(self, subject: str, schema: RegisteredSchema) -> int:
        """The id of the schema under `subject`; a new one is registered.

        Raises SchemaRegistryError: the schema is not compatible with the subject's others, or is no schema.
        """
        return _id(self._request("POST", f"/subjects/{quote(subject, safe='')}/versions", _body(schema)))

    def look_up(self, subject: str, schema: RegisteredSchema) -> int:
        """The id of a schema that is registered under `subject`. Raises SchemaRegistryError."""
        return _id(self._request("POST", f"/subjects/{quote(subject, safe='')}", _body(schema)))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout_s)
        limit = _TimeLimit(self._timeout_s)
        try:
            connection.connect()
            limit.watch(connection.sock)
            text = None if body is None else json.dumps(body)
            connection.request(method, self._parts.path.rstrip("/") + path, text, self._headers)
            response = connection.getresponse()
            data = response.read(_RESPONSE_BYTES_MAX + 1)
        except (OSError, http.client.HTTPException) as error:
            reason = f"no whole answer in {self._timeout_s} s" if limit.is_over else f"{type(error).__name__}: {error}"
            raise SchemaRegistryError(f"{self!r} does not answer: {reason}") from error
        finally:
            limit.end()
            connection.close()
        if limit.is_over:  # an answer without a length ends where it is cut
            raise SchemaRegistryError(f"{self!r} does not answer: no whole answer in {self._timeout_s} s")
        if len(data) > _RESPONSE_BYTES_MAX:
            raise SchemaRegistryError(f"{self!r}: the answer is larger than {_RESPONSE_BYTES_MAX} bytes")
        return self._checked(response.status, data)

    def _checked(self, status: int, data: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise SchemaRegistryError(f"{self!r} answers HTTP {status} without a JSON object", status)
        if status != 200:
            message = " ".join(str(answer.get("message", "refused")).split())[:500]
            code = answer.get("error_code")
            raise SchemaRegistryError(
                f"{self!r}: {message} (HTTP {status})", status, code if type(code) is int else None
            )
        return answer


class _TimeLimit:
    """Cuts a connection when a request has taken its time: a timeout of a socket limits each read alone, and an answer
    that comes byte by byte would never end.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timer = threading.Timer(timeout_s, self._cut)
        self._timer.daemon = True
        self._socket: socket.socket | None = None
        self.is_over = False

    def watch(self, connected: socket.socket) -> None:
        """Begin with a connection that is open. The response may hold it beyond the life of the HTTP connection."""
        self._socket = connected
        self._timer.start()

    def _cut(self) -> None:
        self.is_over = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # also below TLS, whose state the reader uses

    def end(self) -> None:
        self._timer.cancel()
        if self._timer.is_alive():
            self._timer.join()
        self._socket = None


def _body(schema: RegisteredSchema) -> dict[str, Any]:
    body: dict[str, Any] = {"schema": schema.text}
    if schema.type != "AVRO":
        body["schemaType"] = schema.type
    if schema.references:
        body["references"] = [
            {"name": each.name, "subject": each.subject, "version": each.version} for each in schema.references
        ]
    return body


def _id(answer: Mapping[str, Any]) -> int:
    schema_id = answer.get("id")
    if type(schema_id) is not int or not 0 <= schema_id < 2**32:
        raise SchemaRegistryError("the registry's answer has no id of four bytes")
    return schema_id


def _registered(answer: Mapping[str, Any]) -> RegisteredSchema:
    try:
        references = tuple(
            SchemaReference(str(each["name"]), str(each["subject"]), int(each["version"]))
            for each in answer.get("references") or ()
        )
        return RegisteredSchema(str(answer["schema"]), str(answer.get("schemaType", "AVRO")), references)
    except (KeyError, TypeError, ValueError) as error:
        raise SchemaRegistryError("the registry's answer has no schema that can be read") from error
