"""Messages: a typed class with version ranges that can be built, compared, encoded and decoded.

    class MetadataRequest(Message, key=3, versions="0-13", flexible="9+"):
        topics: list[MetadataRequestTopic] | None = array(MetadataRequestTopic, nullable="1+")

Encoders and decoders are compiled on first use, one per (message, version); `decoding` and
`encoding` write their source. Invariant: for any bytes, decoding returns a message or raises
`MalformedMessage`, or UNSUPPORTED_VERSION for an undeclared version.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from struct import error as StructError
from typing import Any, ClassVar, Self, TypeVar, dataclass_transform

from tidelog.protocol.codec.decoding import Decoder, StepDecoder, compile_decoder, compile_step_decoder
from tidelog.protocol.codec.encoding import (
    Buffer,
    Encoder,
    PieceEncoder,
    StepEncoder,
    compile_encoder,
    compile_piece_encoder,
    compile_step_encoder,
)
from tidelog.protocol.codec.fields import (
    NEVER,
    NONE,
    Bytes,
    Field,
    array,
    boolean,
    byte_string,
    float64,
    int8,
    int16,
    int32,
    int64,
    parse_versions,
    record_batches,
    string,
    struct,
    uint16,
    uint32,
    uuid,
)
from tidelog.protocol.errors import ErrorCode, KafkaError, MalformedMessage

__all__ = [
    "Bytes",
    "Message",
    "array",
    "boolean",
    "byte_string",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "record_batches",
    "string",
    "struct",
    "uint16",
    "uint32",
    "uuid",
]

_UNDECODABLE = (StructError, IndexError, UnicodeDecodeError, OverflowError)
_UNENCODABLE = (StructError, AttributeError, TypeError, UnicodeEncodeError, OverflowError)


_Compiled = TypeVar("_Compiled")


class _ByVersion(dict[int, _Compiled]):
    """Version -> decoder or encoder of one message, compiled on first use."""

    def __init__(self, message: type[Message], compile_version: Callable[[type[Message], int], _Compiled]) -> None:
        self.message = message
        self.compile_version = compile_version

    def __missing__(self, version: int) -> _Compiled:
        _check_version(self.message, version)
        compiled = self[version] = self.compile_version(self.message, version)
        return compiled


def _compile_decoder(message: type[Message], version: int) -> Decoder:
    return compile_decoder(message, version, views=message.READS_IN_PLACE)


def _compile_step_decoder(message: type[Message], version: int) -> StepDecoder:
    return compile_step_decoder(message, version, views=message.READS_IN_PLACE)


def _check_version(message: type[Message], version: int) -> None:
    if version not in message.VERSIONS:
        raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"{message.__name__} has no version {version}")


@dataclass_transform(kw_only_default=True)
class MessageType(type):
    """Turns the declared fields into slots and stores them in `FIELDS`."""

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        *,
        key: int | None = None,
        versions: str = "none",
        flexible: str = "none",
        in_place: bool = False,
    ) -> MessageType:
        fields = tuple((attribute, value) for attribute, value in namespace.items() if isinstance(value, Field))
        for attribute, _ in fields:
            del namespace[attribute]
        namespace["__slots__"] = tuple(attribute for attribute, _ in fields)
        namespace["FIELDS"] = fields
        namespace["API_KEY"] = key
        namespace["VERSIONS"] = NONE
        namespace["FLEXIBLE_FROM"] = NEVER
        namespace["HAS_RECORDS"] = any(_has_records(value) for _, value in fields)
        namespace["READS_IN_PLACE"] = in_place or namespace["HAS_RECORDS"]
        if bases:
            namespace["__init__"] = _build_on_first_use
        message_class: Any = super().__new__(mcls, name, bases, namespace)
        message_class.DECODERS = _ByVersion(message_class, _compile_decoder)
        message_class.STEP_DECODERS = _ByVersion(message_class, _compile_step_decoder)
        message_class.ENCODERS = _ByVersion(message_class, compile_encoder)
        message_class.PIECE_ENCODERS = _ByVersion(message_class, compile_piece_encoder)
        message_class.STEP_ENCODERS = _ByVersion(message_class, compile_step_encoder)
        if versions != "none":
            _set_versions(message_class, parse_versions(versions), parse_versions(flexible))
        return message_class  # type: ignore[no-any-return]


def _has_records(field: Field) -> bool:
    return field.kind == "records" or (isinstance(field.element, type) and field.element.HAS_RECORDS)  # type: ignore[attr-defined]


def _set_versions(message: type[Message], versions: range, flexible: range) -> None:
    """Set the versions of a message and of the messages nested in it."""
    flexible_from = flexible.start if flexible else NEVER
    if message.VERSIONS:
        assert flexible_from == message.FLEXIBLE_FROM, f"{message.__name__} is shared by messages that differ"
        versions = range(min(versions.start, message.VERSIONS.start), max(versions.stop, message.VERSIONS.stop))
    message.VERSIONS = versions
    message.FLEXIBLE_FROM = flexible_from
    for _, field in message.FIELDS:
        if isinstance(field.element, type):
            _set_versions(field.element, versions, flexible)


def _build_on_first_use(self: Message, **values: Any) -> None:
    """The `__init__` of a class until its first message is created."""
    message_class = type(self)
    message_class.__init__ = _constructor(message_class)  # type: ignore[method-assign]
    message_class.__init__(self, **values)


def _constructor(message: type[Message]) -> Any:
    names: dict[str, Any] = {"default": object()}
    parameters = []
    body = []
    for name, field in message.FIELDS:
        if field.default is None or field.kind not in ("array", "struct"):
            parameters.append(f"{name}={field.default!r}")
            body.append(f"self.{name} = {name}")
        else:
            names[f"make_{name}"] = list if field.kind == "array" else field.element
            parameters.append(f"{name}=default")
            body.append(f"self.{name} = make_{name}() if {name} is default else {name}")
    star = "*, " if parameters else ""
    source = f"def __init__(self, {star}{', '.join(parameters)}):\n    " + "\n    ".join(body or ["pass"])
    exec(compile(source, f"<constructor of {message.__name__}>", "exec"), names)  # noqa: S102 - our own text
    return names["__init__"]


class Message(metaclass=MessageType):
    """The base of every message. The constructor takes fields by keyword; others get Kafka's
    defaults.

    `VERSIONS` are the declared versions. `FLEXIBLE_FROM` is the first version with compact types
    and tagged fields. A nested message has those of its outer messages. `API_KEY` is the key of the
    API, or of the record type in the metadata log.
    """

    FIELDS: ClassVar[tuple[tuple[str, Field], ...]]
    API_KEY: ClassVar[int | None]
    VERSIONS: ClassVar[range]
    FLEXIBLE_FROM: ClassVar[int]
    HAS_RECORDS: ClassVar[bool]
    READS_IN_PLACE: ClassVar[bool]
    DECODERS: ClassVar[_ByVersion[Decoder]]
    STEP_DECODERS: ClassVar[_ByVersion[StepDecoder]]
    ENCODERS: ClassVar[_ByVersion[Encoder]]
    PIECE_ENCODERS: ClassVar[_ByVersion[PieceEncoder]]
    STEP_ENCODERS: ClassVar[_ByVersion[StepEncoder]]

    @classmethod
    def decode(cls, buffer: Bytes, version: int) -> Self:
        """Decode a message that fills `buffer`.

        Raises MalformedMessage, KafkaError(UNSUPPORTED_VERSION).
        """
        message, position = cls.read(buffer, 0, version)
        if position != len(buffer):
            raise MalformedMessage(f"{len(buffer) - position} bytes follow {cls.__name__} version {version}")
        return message

    @classmethod
    def read(cls, buffer: Bytes, position: int, version: int) -> tuple[Self, int]:
        """Decode the message at `position` and return it with its end.

        Raises MalformedMessage, KafkaError(UNSUPPORTED_VERSION). Records remain views into
        `buffer`. A message type without records copies a buffer that is not bytes.
        """
        decoder = cls.DECODERS[version]
        if type(buffer) is not bytes and not cls.READS_IN_PLACE:
            buffer = bytes(buffer)
        try:
            message, end = decoder(buffer, position)
        except _UNDECODABLE as error:
            raise MalformedMessage(f"{cls.__name__} version {version}: {error}") from error
        if end > len(buffer):
            raise MalformedMessage(f"{cls.__name__} version {version} ends {end - len(buffer)} bytes early")
        return message, end

    @classmethod
    def read_in_steps(cls, buffer: bytes, position: int, version: int) -> Generator[None, None, tuple[Self, int]]:
        """As `read`; others may run at each yield. The generator returns what `read` does."""
        decoder = cls.STEP_DECODERS[version]
        try:
            message, end = yield from decoder(buffer, position)
        except _UNDECODABLE as error:
            raise MalformedMessage(f"{cls.__name__} version {version}: {error}") from error
        if end > len(buffer):
            raise MalformedMessage(f"{cls.__name__} version {version} ends {end - len(buffer)} bytes early")
        return message, end

    def encode(self, version: int) -> bytes:
        """Encode the message. Raises ValueError for a value out of range.

        Raises KafkaError(UNSUPPORTED_VERSION) when `version` cannot express it.
        """
        out = bytearray()
        self.write(out, version)
        return bytes(out)

    def write(self, out: bytearray, version: int) -> None:
        """Append the message to `out`.

        Raises as `encode`; part of the message may be in `out` then.
        """
        encoder = type(self).ENCODERS[version]
        try:
            encoder(self, out)
        except _UNENCODABLE as error:
            raise ValueError(f"{type(self).__name__} version {version} cannot be encoded: {error}") from error

    def write_in_steps(self, out: bytearray, version: int) -> Iterator[None]:
        """As `write`; others may run at each yield. The message must not change meanwhile."""
        encoder = type(self).STEP_ENCODERS[version]
        try:
            yield from encoder(self, out)
        except _UNENCODABLE as error:
            raise ValueError(f"{type(self).__name__} version {version} cannot be encoded: {error}") from error

    def write_pieces(self, out: bytearray, version: int) -> list[Buffer]:
        """`out` and the message behind it, as pieces in order: large records are pieces of their own, uncopied.

        Raises as `encode`.
        """
        encoder = type(self).PIECE_ENCODERS[version]
        pieces: list[Buffer] = []
        try:
            pieces.append(encoder(self, out, pieces))
        except _UNENCODABLE as error:
            raise ValueError(f"{type(self).__name__} version {version} cannot be encoded: {error}") from error
        return pieces

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name, _ in self.FIELDS)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={_format_value(getattr(self, name))}" for name, _ in self.FIELDS)
        return f"{type(self).__name__}({values})"


def _format_value(value: Any) -> str:
    return f"<{len(value)} bytes>" if isinstance(value, memoryview) else repr(value)
