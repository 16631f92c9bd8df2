"""What the configuration allows the clients of a server at this moment, and the bounds of our own beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidelog.broker.network.connection_quotas import UNLIMITED, ConnectionLimits, parse_overrides
from tidelog.broker.network.server import ServerLimits
from tidelog.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tidelog.broker.config.dynamic_config import DynamicConfig

LIMIT_KEYS: Final = (
    "max.connections",
    "max.connections.per.ip",
    "max.connections.per.ip.overrides",
    "max.connection.creation.rate",
)
"""Those that may change at run time."""

# Receive buffers of all connections together, where queued.max.request.bytes says nothing; and answers not read.
RECEIVE_BYTES_MAX: Final = 512 * 1024 * 1024
UNREAD_BYTES_MAX: Final = 512 * 1024 * 1024
# Descriptors kept free of connections: a tenth, within these.
FREE_FILES_MIN: Final = 32
FREE_FILES_MAX: Final = 1024


def server_limits(settings: DynamicConfig, files: int = 0) -> ServerLimits:
    """`files`: how many descriptors this process may have open, 0 where nobody knows."""
    listeners = [listener.name for listener in settings.static.listeners]
    queued_bytes = settings.integer("queued.max.request.bytes")
    return ServerLimits(
        frame_bytes_max=settings.integer("socket.request.max.bytes"),
        idle_ms_max=settings.integer("connections.max.idle.ms"),
        receive_bytes_max=queued_bytes if queued_bytes > 0 else RECEIVE_BYTES_MAX,
        unread_bytes_max=UNREAD_BYTES_MAX,
        files_max=files - min(FREE_FILES_MAX, max(FREE_FILES_MIN, files // 10)) if files else 0,
        send_buffer_bytes=settings.integer("socket.send.buffer.bytes"),
        # Kafka's default is smaller than what the system grows it to, and what arrives costs the sender, not us.
        receive_buffer_bytes=_if_set(settings, "socket.receive.buffer.bytes"),
        connections=ConnectionLimits(
            total=settings.integer("max.connections"),
            per_address=settings.integer("max.connections.per.ip"),
            of_address=_overrides(settings.text("max.connections.per.ip.overrides")),
            of_listener=_of_listeners(settings, listeners, "max.connections"),
            rate=settings.integer("max.connection.creation.rate"),
            rate_of_listener=_of_listeners(settings, listeners, "max.connection.creation.rate"),
        ),
    )


def _if_set(settings: DynamicConfig, key: str) -> int:
    return settings.integer(key) if settings.is_set(key) else -1


def _of_listeners(settings: DynamicConfig, listeners: list[str], key: str) -> dict[str, int]:
    found = {name: settings.of_listener(name, key) for name in listeners}
    return {name: UNLIMITED if value is None else int(value) for name, value in found.items() if value is not None}


def _overrides(text: str) -> dict[str, int]:
    """By address, raises ConfigError; `localhost` is the one name that needs nobody to be asked."""
    try:
        found = parse_overrides(text)
    except ValueError as error:
        raise ConfigError(f"max.connections.per.ip.overrides: {error}") from None
    if "localhost" in found:
        limit = found.pop("localhost")
        found |= dict.fromkeys(("127.0.0.1", "::1"), limit)
    return found
