"""The limits of a server: those from the current configuration, and fixed bounds."""

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
"""The settings that may change at run time."""

# Bounds of all receive buffers, unless queued.max.request.bytes is set, and of all unread answers.
RECEIVE_BYTES_MAX: Final = 512 * 1024 * 1024
UNREAD_BYTES_MAX: Final = 512 * 1024 * 1024
# File descriptors that connections may not use: a tenth, within these bounds.
FREE_FILES_MIN: Final = 32
FREE_FILES_MAX: Final = 1024


def server_limits(settings: DynamicConfig, files: int = 0) -> ServerLimits:
    """`files`: the limit of this process's open file descriptors, 0 if unknown."""
    listeners = [listener.name for listener in settings.static.listeners]
    queued_bytes = settings.integer("queued.max.request.bytes")
    return ServerLimits(
        frame_bytes_max=settings.integer("socket.request.max.bytes"),
        idle_ms_max=settings.integer("connections.max.idle.ms"),
        receive_bytes_max=queued_bytes if queued_bytes > 0 else RECEIVE_BYTES_MAX,
        unread_bytes_max=UNREAD_BYTES_MAX,
        files_max=files - min(FREE_FILES_MAX, max(FREE_FILES_MIN, files // 10)) if files else 0,
        send_buffer_bytes=settings.integer("socket.send.buffer.bytes"),
        # Kafka's default is smaller than the system's own limit, and received bytes cost mainly the sender.
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
    values = {name: settings.of_listener(name, key) for name in listeners}
    return {name: UNLIMITED if value is None else int(value) for name, value in values.items() if value is not None}


def _overrides(text: str) -> dict[str, int]:
    """The limits by address. Raises ConfigError. `localhost` is the only name that works: it needs no DNS query."""
    try:
        limits = parse_overrides(text)
    except ValueError as error:
        raise ConfigError(f"max.connections.per.ip.overrides: {error}") from None
    if "localhost" in limits:
        limit = limits.pop("localhost")
        limits |= dict.fromkeys(("127.0.0.1", "::1"), limit)
    return limits
