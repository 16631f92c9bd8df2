"""The functions that declare the fields of messages: one function per wire type.

A declaration is `name: str | None = string("0+", nullable="10+")`. The functions return a `Field`,
but their declared type is that of the attribute's value, so that a type checker compares
declaration and annotation. Versions are written as in Kafka's schemas: "3+", "0-7", "4", "none". By
default a field is in every version of its message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, cast

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview

NEVER = 1 << 15  # versions are int16: a lower bound that no version reaches
ALL = range(NEVER)
NONE = range(0)

STRING_BYTES_MAX = 32_767
"""The maximum size of a string in a request of any version. The code that Kafka generates has this rule."""

# Struct format and size of each fixed-width type.
FIXED_WIDTH = {
    "bool": ("?", 1),
    "int8": ("b", 1),
    "int16": ("h", 2),
    "uint16": ("H", 2),
    "int32": ("i", 4),
    "uint32": ("I", 4),
    "int64": ("q", 8),
    "float64": ("d", 8),
    "uuid": ("16s", 16),
}


def parse_versions(text: str) -> range:
    """ "3+" -> range(3, NEVER), "2-5" -> range(2, 6), "4" -> range(4, 5), "none" -> an empty range."""
    if text == "none":
        return NONE
    if text.endswith("+"):
        return range(int(text[:-1]), NEVER)
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One declared field.

    `kind` is Kafka's type name, "struct" or "array". `element` is the class of a struct, or the
    element type of an array (the name of a kind, or a class). `tag` is None for a field that is
    never tagged.
    """

    kind: str
    element: Any
    versions: range
    nullable: range
    default: Any
    ignorable: bool
    tag: int | None
    tagged: range
    compact: bool  # False: keeps the old length prefix in flexible versions too (only the header's client id)

    def is_tagged(self, version: int) -> bool:
        return self.tag is not None and version in self.tagged


class Declaration(Protocol):
    """The input of the encoder and decoder compilers: the class of a message (`schema.Message`)."""

    FIELDS: ClassVar[tuple[tuple[str, Field], ...]]
    FLEXIBLE_FROM: ClassVar[int]
    HAS_RECORDS: ClassVar[bool]


def _field(
    kind: str,
    default: Any,
    versions: str,
    ignorable: bool,
    tag: int | None = None,
    *,
    nullable: str = "none",
    element: Any = None,
    compact: bool = True,
) -> Any:
    in_versions = parse_versions(versions)
    return Field(
        kind=kind,
        element=element,
        versions=in_versions,
        nullable=parse_versions(nullable),
        default=default,
        ignorable=ignorable,
        tag=tag,
        tagged=NONE if tag is None else in_versions,
        compact=compact,
    )


def boolean(versions: str = "0+", *, default: bool = False, ignorable: bool = False, tag: int | None = None) -> bool:
    return cast(bool, _field("bool", default, versions, ignorable, tag))


def int8(versions: str = "0+", *, default: int = 0, ignorable: bool = False, tag: int | None = None) -> int:
    return cast(int, _field("int8", default, versions, ignorable, tag))


def int16(versions: str = "0+", *, default: int = 0, ignorable: bool = False, tag: int | None = None) -> int:
    return cast(int, _field("int16", default, versions, ignorable, tag))


def uint16(versions: str = "0+", *, default: int = 0, ignorable: bool = False, tag: int | None = None) -> int:
    return cast(int, _field("uint16", default, versions, ignorable, tag))


def int32(versions: str = "0+", *, default: int = 0, ignorable: bool = False, tag: int | None = None) -> int:
    return cast(int, _field("int32", default, versions, ignorable, tag))


def uint32(versions: str = "0+", *, default: int = 0, ignorable: bool = False, tag: int | None = None) -> int:
    return cast(int, _field("uint32", default, versions, ignorable, tag))


def int64(versions: str = "0+", *, default: int = 0, ignorable: bool = False, tag: int | None = None) -> int:
    return cast(int, _field("int64", default, versions, ignorable, tag))


def float64(versions: str = "0+", *, default: float = 0.0, ignorable: bool = False, tag: int | None = None) -> float:
    return cast(float, _field("float64", default, versions, ignorable, tag))


def uuid(versions: str = "0+", *, default: bytes = bytes(16), ignorable: bool = False, tag: int | None = None) -> bytes:
    """16 raw bytes; all zero means no value."""
    return cast(bytes, _field("uuid", default, versions, ignorable, tag))


def string(
    versions: str = "0+",
    *,
    nullable: str = "none",
    default: str | None = "",
    ignorable: bool = False,
    tag: int | None = None,
    compact: bool = True,
) -> str:
    """UTF-8; at most STRING_BYTES_MAX in a request, and in versions that are not flexible."""
    return cast(str, _field("string", default, versions, ignorable, tag, nullable=nullable, compact=compact))


def byte_string(
    versions: str = "0+",
    *,
    nullable: str = "none",
    default: bytes | None = b"",
    ignorable: bool = False,
    tag: int | None = None,
) -> bytes:
    return cast(bytes, _field("bytes", default, versions, ignorable, tag, nullable=nullable))


def record_batches(
    versions: str = "0+", *, nullable: str = "none", ignorable: bool = False, tag: int | None = None
) -> Bytes | None:
    """Record batches: decoded as a view into the buffer, encoded from any bytes-like value.

    Default None.
    """
    return cast("Bytes | None", _field("records", None, versions, ignorable, tag, nullable=nullable))


def struct(
    of: Callable[..., T],
    versions: str = "0+",
    *,
    nullable: str = "none",
    default: str | None = "",
    ignorable: bool = False,
    tag: int | None = None,
) -> T:
    """One nested message.

    Its default is a message with default fields, or None with `default=None`.
    """
    return cast(T, _field("struct", default, versions, ignorable, tag, nullable=nullable, element=of))


def array(
    of: Callable[..., T],
    versions: str = "0+",
    *,
    nullable: str = "none",
    default: tuple[()] | None = (),
    ignorable: bool = False,
    tag: int | None = None,
) -> list[T]:
    """A list of nested messages (`of` is their class) or of primitives (`of` is their function
    above).
    """
    element = of if isinstance(of, type) else _PRIMITIVES[of]
    return cast("list[T]", _field("array", default, versions, ignorable, tag, nullable=nullable, element=element))


_PRIMITIVES: dict[Callable[..., Any], str] = {
    boolean: "bool",
    int8: "int8",
    int16: "int16",
    uint16: "uint16",
    int32: "int32",
    uint32: "uint32",
    int64: "int64",
    float64: "float64",
    uuid: "uuid",
    string: "string",
    byte_string: "bytes",
}
