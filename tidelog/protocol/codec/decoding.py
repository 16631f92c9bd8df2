"""Writes the source of one decoder: a function (buffer, position) -> (message, next position).

One function per (message, version), with nested messages unrolled. Adjacent fields of fixed width
are read by one Struct, together with the length prefix after them. Invariant: a truncated message
raises IndexError or struct.error, or ends with a position beyond the buffer, which `schema.Message`
checks once. So no field has its own bounds check: lengths are never negative, and an element count
is checked against the remaining bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from struct import Struct, unpack_from
from typing import Any, NoReturn

from tidelog.protocol.codec.fields import FIXED_WIDTH, STRING_BYTES_MAX, Declaration, Field
from tidelog.protocol.codec.primitives import continue_uvarint, read_uvarint, skip_tagged_fields
from tidelog.protocol.errors import MalformedMessage

Decoder = Callable[[Any, int], tuple[Any, int]]
StepDecoder = Callable[[Any, int], Generator[None, None, tuple[Any, int]]]

PREPARED_COUNT = 17
"""Arrays with fewer integers than this are read by a Struct made in advance."""
BUDGET = 8_000_000
"""The maximum total cost of the array elements of one message.

A number costs 1, a partition index INDEX_COST; a string, message or tagged field ELEMENT_COST. The
budget allows a million topics in a response, and prevents that a frame of 100 MB of empty names
becomes gigabytes of objects.
"""
REQUEST_BUDGET = 400_000
"""A twentieth for a request: the broker spends some microseconds on each element."""
ELEMENT_COST = 8
INDEX_COST = 4
ELEMENTS_MAX = 1_000_000
"""The maximum number of elements of one array, at any cost."""
TAGGED_FIELDS_MAX = 10_000
"""The maximum number of tagged fields in one section."""
STEP_BYTES = 8 * 1024
"""A decoder in steps pauses before the next element of an array when it has read so many bytes, which take some
milliseconds at most: the smallest elements take three or four bytes, and a microsecond each."""
PREPARED = {width: [Struct(f">{count}{width}").unpack_from for count in range(PREPARED_COUNT)] for width in "?bhHiIqd"}


def element_cost(array: str, element: Any) -> int:
    """What an element of this array takes of the budget.

    The broker answers each partition index with a message. The ids of a replica list are only numbers.
    """
    if element not in FIXED_WIDTH or element == "uuid":
        return ELEMENT_COST
    return INDEX_COST if "partition" in array else 1


def minimum_size(message: type[Declaration], version: int) -> int:
    """The size of the shortest encoding, which bounds the element count of an array."""
    flexible = version >= message.FLEXIBLE_FROM
    size = 1 if flexible else 0
    for _, field in message.FIELDS:
        if version in field.versions and not field.is_tagged(version):
            size += _minimum_field_size(field, version, flexible and field.compact)
    return size


def _minimum_field_size(field: Field, version: int, compact: bool) -> int:
    if field.kind in FIXED_WIDTH:
        return FIXED_WIDTH[field.kind][1]
    if field.kind == "struct":
        return 1 if version in field.nullable else minimum_size(field.element, version)
    return 1 if compact else 2 if field.kind == "string" else 4


class DecoderSource:
    """Emits statements into `lines`; `names` are their globals.

    `run` holds the pending fixed-width values: (struct format, assignment target) pairs.
    """

    def __init__(self, message: type[Declaration], version: int, *, views: bool, in_steps: bool = False) -> None:
        self.version = version
        self.in_steps = in_steps
        self.flexible = version >= message.FLEXIBLE_FROM
        self.views = views  # True: the buffer may be a memoryview; False: it is bytes
        self.lines: list[str] = []
        self.depth = 1
        self.run: list[tuple[str, str]] = []
        self.names: dict[str, Any] = {
            "new": object.__new__,
            "long": continue_uvarint,
            "uvarint": read_uvarint,
            "skip": skip_tagged_fields,
            "unpack_from": unpack_from,
            "null": _null,
            "too_many": _too_many,
            "bad_size": _bad_size,
            "too_long": _too_long,
        }
        self.counter = 0
        self.is_request = message.__name__.endswith("Request")
        self.emit("end = len(b)")
        self.emit(f"left = {REQUEST_BUDGET if self.is_request else BUDGET}")
        if in_steps:
            self.emit(f"mark = p + {STEP_BYTES}")
        if message.HAS_RECORDS:
            self.emit("view = memoryview(b)")
        root = self.message(message)
        self.flush()
        self.emit(f"return {root}, p")
        if in_steps:
            self.emit("yield")  # also without an array it is a generator
        self.source = "def decode(b, p):\n" + "\n".join(self.lines) + "\n"

    # -- statements

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, stem: str) -> str:
        self.counter += 1
        return f"{stem}{self.counter}"

    def constant(self, stem: str, value: Any) -> str:
        name = self.name(stem)
        self.names[name] = value
        return name

    def flush(self) -> None:
        """Read the pending run of fixed-width values."""
        if not self.run:
            return
        if len(self.run) == 1 and self.run[0][0] == "B":
            self.emit(f"{self.run[0][1]} = b[p]")
            self.emit("p += 1")
        else:
            layout = Struct(">" + "".join(width for width, _ in self.run))
            targets = ", ".join(target for _, target in self.run)
            comma = "," if len(self.run) == 1 else ""
            self.emit(f"{targets}{comma} = {self.constant('unpack', layout.unpack_from)}(b, p)")
            self.emit(f"p += {layout.size}")
        self.run.clear()

    # -- values

    def message(self, message: type[Declaration]) -> str:
        """Emit the decoding of a message into a new local variable and return its name."""
        variable = self.name("m")
        self.emit(f"{variable} = new({self.constant(message.__name__ + '_', message)})")
        tagged: list[tuple[str, Field]] = []
        for name, field in message.FIELDS:
            target = f"{variable}.{name}"
            if field.is_tagged(self.version):
                tagged.append((target, field))
            elif self.version in field.versions:
                self.value(target, field)
            else:
                self.default(target, field)
        if self.flexible:
            self.tagged_fields(tagged)
        return variable

    def default(self, target: str, field: Field) -> None:
        if field.kind == "array" and field.default is not None:
            self.emit(f"{target} = []")
        elif field.kind == "struct" and field.default is not None:
            self.emit(f"{target} = {self.constant('default_', field.element)}()")
        else:
            self.emit(f"{target} = {field.default!r}")

    def tagged_fields(self, fields: list[tuple[str, Field]]) -> None:
        count = self.name("t")
        self.run.append(("B", count))
        for target, field in fields:
            self.default(target, field)
        self.flush()
        self.emit(f"if {count}:")
        self.depth += 1
        self.emit(f"if {count} > 127: {count}, p = long(b, p, {count})")
        self.emit(
            f"if {count} > {TAGGED_FIELDS_MAX} or {count} * 2 > end - p"
            f" or (left := left - {count} * {ELEMENT_COST}) < 0: too_many({count})"
        )
        if not fields:
            self.emit(f"p = skip(b, p, {count})")
            self.depth -= 1
            return
        tag, stop = self.name("g"), self.name("z")
        self.emit(f"while {count}:")
        self.depth += 1
        self.emit(f"{count} -= 1")
        self.emit(f"{tag}, p = uvarint(b, p)")
        self.emit(f"{stop}, p = uvarint(b, p)")
        self.emit(f"{stop} += p")
        keyword = "if"
        for target, field in fields:
            self.emit(f"{keyword} {tag} == {field.tag}:")
            self.depth += 1
            self.value(target, field)
            self.flush()
            self.emit(f"if p != {stop}: bad_size({tag})")
            self.depth -= 1
            keyword = "elif"
        self.emit(f"else: p = {stop}")
        self.depth -= 2

    def value(self, target: str, field: Field) -> None:
        nullable = self.version in field.nullable
        compact = self.flexible and field.compact
        if field.kind in FIXED_WIDTH:
            self.run.append((FIXED_WIDTH[field.kind][0], target))
        elif field.kind == "struct":
            self.struct(target, field.element, nullable)
        elif field.kind == "array":
            self.array(target, field.element, nullable, compact)
        else:
            self.sized(target, field.kind, nullable, compact)

    def struct(self, target: str, message: type[Declaration], nullable: bool) -> None:
        if nullable:
            present = self.name("n")
            self.run.append(("b", present))
            self.flush()
            self.emit(f"if {present} < 0: {target} = None")
            self.emit("else:")
            self.depth += 1
        variable = self.message(message)
        self.emit(f"{target} = {variable}")
        if nullable:
            self.flush()
            self.depth -= 1

    def length(self, compact: bool, width: str, *, is_string: bool = False) -> str:
        """Emit the read of a length prefix.

        Null is 0 when compact (lengths are one higher), else negative.
        """
        length = self.name("n")
        self.run.append(("B" if compact else width, length))
        self.flush()
        if compact:
            self.emit(f"if {length} > 127:")
            self.emit(f"    {length}, p = long(b, p, {length})")
            if is_string and self.is_request:
                self.emit(f"    if {length} > {STRING_BYTES_MAX + 1}: too_long({length} - 1)")
        return length

    def null(self, target: str, nullable: bool) -> None:
        if nullable:
            self.emit(f"else: {target} = None")
        else:
            self.emit(f"else: null({target!r})")

    def sized(self, target: str, kind: str, nullable: bool, compact: bool) -> None:
        """A string, a byte string or records."""
        length = self.length(compact, "h" if kind == "string" else "i", is_string=kind == "string")
        self.emit(f"if {length}:" if compact else f"if {length} >= 0:")
        self.depth += 1
        stop = self.name("q")
        self.emit(f"{stop} = p + {length}{' - 1' if compact else ''}")
        self.emit(f"{target} = {self.slice(kind, 'p', stop)}")
        self.emit(f"p = {stop}")
        self.depth -= 1
        self.null(target, nullable)

    def slice(self, kind: str, start: str, stop: str) -> str:
        if kind == "records":
            return f"view[{start}:{stop}]"
        if kind == "string":
            return f'str(b[{start}:{stop}], "utf-8")' if self.views else f"b[{start}:{stop}].decode()"
        return f"bytes(b[{start}:{stop}])" if self.views else f"b[{start}:{stop}]"

    def array(self, target: str, element: Any, nullable: bool, compact: bool) -> None:
        count = self.length(compact, "i")
        if compact:
            self.emit(f"{count} -= 1")
        self.emit(f"if {count} > 0:")
        self.depth += 1
        self.elements(target, element, count, compact)
        self.depth -= 1
        self.emit(f"elif {count} == 0: {target} = []")
        self.null(target, nullable)

    def elements(self, target: str, element: Any, count: str, compact: bool) -> None:
        each = element_cost(target.partition(".")[2], element)
        cost = f"{count} * {each}" if each > 1 else count
        self.emit(f"if {count} > {ELEMENTS_MAX} or (left := left - {cost}) < 0: too_many({count})")
        if element == "uuid":
            self.emit(f"if {count} * 16 > end - p: too_many({count})")
            self.emit(f"{target} = [{self.slice('uuid', 'i', 'i + 16')} for i in range(p, p + {count} * 16, 16)]")
            self.emit(f"p += {count} * 16")
        elif element in FIXED_WIDTH:
            width, size = FIXED_WIDTH[element]
            prepared = self.constant("prepared", PREPARED[width])
            self.emit(f"if {count} < {PREPARED_COUNT}: {target} = list({prepared}[{count}](b, p))")
            self.emit(f"elif {count} * {size} > end - p: too_many({count})")
            self.emit(f'else: {target} = list(unpack_from(f">{{{count}}}{width}", b, p))')
            self.emit(f"p += {count} * {size}")
        else:
            least = (1 if compact else 2) if element == "string" else 1 if compact else 4
            if isinstance(element, type):
                least = minimum_size(element, self.version)
            assert least > 0, f"elements of {target} are empty in version {self.version}"
            items, append = self.name("l"), self.name("append")
            self.emit(f"if {count} * {least} > end - p: too_many({count})")
            self.emit(f"{target} = {items} = []")
            self.emit(f"{append} = {items}.append")
            self.emit(f"for _ in range({count}):")
            self.depth += 1
            if self.in_steps:
                self.emit("if p > mark:")
                self.emit(f"    mark = p + {STEP_BYTES}")
                self.emit("    yield")
            if isinstance(element, type):
                item = self.message(element)
            else:
                item = self.name("s")
                self.sized(item, element, False, compact)
            self.flush()
            self.emit(f"{append}({item})")
            self.depth -= 1


def compile_decoder(message: type[Declaration], version: int, *, views: bool) -> Decoder:
    decoder: Decoder = _compile(DecoderSource(message, version, views=views), message, version)
    return decoder


def compile_step_decoder(message: type[Declaration], version: int, *, views: bool) -> StepDecoder:
    """A decoder that is a generator, and yields after each STEP_BYTES."""
    decoder: StepDecoder = _compile(DecoderSource(message, version, views=views, in_steps=True), message, version)
    return decoder


def _compile(decoder_source: DecoderSource, message: type[Declaration], version: int) -> Any:
    code = compile(decoder_source.source, f"<decoder of {message.__name__} version {version}>", "exec")
    exec(code, decoder_source.names)  # noqa: S102 - our own text, made of declarations only
    return decoder_source.names["decode"]


def _null(target: str) -> NoReturn:
    raise MalformedMessage(f"null where there must be a value: {target.partition('.')[2] or 'an element'}")


def _too_many(count: int) -> NoReturn:
    raise MalformedMessage(
        f"an array or section claims {count} elements, more than the message can hold or than is sensible"
    )


def _too_long(size_bytes: int) -> NoReturn:
    raise MalformedMessage(f"a string of {size_bytes} bytes: a request may have {STRING_BYTES_MAX} in one")


def _bad_size(tag: int) -> NoReturn:
    raise MalformedMessage(f"tagged field {tag} is not of the size it claims")
