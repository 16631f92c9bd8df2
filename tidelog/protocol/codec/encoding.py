"""Writes the source of one encoder: a function (message, out: bytearray) -> None, or one that leaves records uncopied.

One function per (message, version), with nested messages unrolled. One Struct packs adjacent fields
of fixed width, the length prefix after them and an empty section of tagged fields. Invariant
(Kafka's rule): a field that the version lacks must hold its default or be ignorable, else
UNSUPPORTED_VERSION.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct, pack
from typing import Any, NoReturn

from tidelog.protocol.codec.fields import FIXED_WIDTH, STRING_BYTES_MAX, Declaration, Field
from tidelog.protocol.codec.primitives import write_uvarint
from tidelog.protocol.errors import ErrorCode, KafkaError

Encoder = Callable[[Any, bytearray], None]
Buffer = bytes | bytearray | memoryview
PieceEncoder = Callable[[Any, bytearray, list[Buffer]], bytearray]
StepEncoder = Callable[[Any, bytearray], Iterator[None]]

CUT_BYTES = 4096
"""An encoder of pieces copies smaller records, since another piece costs more than the copy."""

STEP_ELEMENTS = 2_000
"""An encoder in steps pauses after so many messages in arrays, which take a millisecond or two."""
STEP_BYTES = 256 * 1024
"""And after so many bytes: a name may have 32 KB."""

PREPARED_COUNT = 17
"""Arrays with fewer integers than this are packed by a Struct made in advance."""
PREPARED = {width: [Struct(f">{count}{width}").pack for count in range(PREPARED_COUNT)] for width in "?bhHiIqd"}

_PAD = "x"  # one zero byte: an empty section of tagged fields


class EncoderSource:
    """Emits statements into `lines`; `names` are their globals.

    `run` holds the pending fixed-width values: (struct format, expression) pairs. `out` is the name
    of the output bytearray. A tagged field has its own output, because its size is written before
    it.
    """

    def __init__(
        self, message: type[Declaration], version: int, *, in_pieces: bool = False, in_steps: bool = False
    ) -> None:
        self.version = version
        self.in_pieces = in_pieces
        self.in_steps = in_steps
        self.flexible = version >= message.FLEXIBLE_FROM
        self.lines: list[str] = []
        self.depth = 1
        self.run: list[tuple[str, str]] = []
        self.out = "out"
        self.names: dict[str, Any] = {
            "uvarint": write_uvarint,
            "pack": pack,
            "too_long": _too_long,
            "unsupported": _unsupported,
            "version": version,
        }
        self.counter = 0
        self.is_request = message.__name__.endswith("Request")
        if in_steps:
            self.emit("elements = 0")
            self.emit(f"mark = len(out) + {STEP_BYTES}")
        self.message("m", message)
        self.flush()
        if in_pieces:
            self.emit("return out")
        if in_steps:
            self.emit("return")
            self.emit("yield")  # also without an array it is a generator
        arguments = "m, out, pieces" if in_pieces else "m, out"
        self.source = f"def encode({arguments}):\n" + "\n".join(self.lines or ["    pass"]) + "\n"

    # -- statements

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, stem: str) -> str:
        self.counter += 1
        return f"{stem}{self.counter}"

    def pack_statement(self, run: list[tuple[str, str]]) -> str:
        """The statement that packs a run."""
        if all(width == _PAD for width, _ in run):
            return f"{self.out} += {bytes(len(run))!r}"
        if len(run) == 1 and run[0][0] == "B":
            return f"{self.out}.append({run[0][1]})"
        pack_run = self.name("pack")
        self.names[pack_run] = Struct(">" + "".join(width for width, _ in run)).pack
        values = ", ".join(value for width, value in run if width != _PAD)
        return f"{self.out} += {pack_run}({values})"

    def flush(self) -> None:
        if self.run:
            self.emit(self.pack_statement(self.run))
            self.run.clear()

    def length(self, length: str, compact: bool, width: str, *, is_string: bool = False) -> None:
        """Emit a length prefix (one higher when compact) together with the run before it."""
        if not compact:
            self.run.append((width, length))
            self.flush()
            return
        self.emit(f"if {length} < 128: {self.pack_statement([*self.run, ('B', length)])}")
        self.emit("else:")
        self.depth += 1
        self.flush()
        if is_string and self.is_request:
            self.emit(f"if {length} > {STRING_BYTES_MAX + 1}: too_long({length} - 1)")
        self.emit(f"uvarint({self.out}, {length})")
        self.depth -= 1

    # -- values

    def message(self, variable: str, message: type[Declaration]) -> None:
        tagged: list[tuple[str, Field]] = []
        for name, field in message.FIELDS:
            value = f"{variable}.{name}"
            if self.version not in field.versions:
                if not field.ignorable:
                    self.emit(f"if {differs(value, field)}: unsupported({message.__name__!r}, {name!r}, version)")
            elif field.is_tagged(self.version):
                tagged.append((value, field))
            else:
                self.value(value, field)
        if self.flexible:
            if tagged:
                self.tagged_fields(tagged)
            else:
                self.run.append((_PAD, ""))

    def tagged_fields(self, fields: list[tuple[str, Field]]) -> None:
        """Emit the fields that differ from their default, in tag order."""
        present = [self.name("c") for _ in fields]
        for flag, (value, field) in zip(present, fields):
            self.emit(f"{flag} = {differs(value, field)}")
        count = self.name("t")
        self.emit(f"{count} = {' + '.join(present)}")
        self.run.append(("B", count))
        self.flush()
        self.emit(f"if {count}:")
        self.depth += 1
        for flag, (value, field) in sorted(zip(present, fields), key=lambda pair: pair[1][1].tag or 0):
            self.emit(f"if {flag}:")
            self.depth += 1
            outer, self.out = self.out, self.name("sub")
            self.emit(f"{self.out} = bytearray()")
            self.value(value, field)
            self.flush()
            self.emit(f"uvarint({outer}, {field.tag})")
            self.emit(f"uvarint({outer}, len({self.out}))")
            self.emit(f"{outer} += {self.out}")
            self.out = outer
            self.depth -= 1
        self.depth -= 1

    def value(self, value: str, field: Field) -> None:
        nullable = self.version in field.nullable
        compact = self.flexible and field.compact
        if field.kind in FIXED_WIDTH:
            self.run.append((FIXED_WIDTH[field.kind][0], value))
            return
        local = self.name("v")
        self.emit(f"{local} = {value}")
        if field.nullable and not nullable:
            owner, _, name = value.rpartition(".")
            self.emit(f"if {local} is None: unsupported(type({owner}).__name__, {name!r}, version)")
        if field.kind == "struct":
            self.struct(local, field.element, nullable)
        elif field.kind == "array":
            self.array(local, field.element, nullable, compact)
        else:
            self.sized(local, field.kind, nullable, compact)

    def struct(self, local: str, message: type[Declaration], nullable: bool) -> None:
        if not nullable:
            self.message(local, message)
            return
        self.flush()
        self.emit(f"if {local} is None: {self.out}.append(255)")
        self.emit("else:")
        self.depth += 1
        self.run.append(("B", "1"))
        self.message(local, message)
        self.flush()
        self.depth -= 1

    def sized(self, local: str, kind: str, nullable: bool, compact: bool) -> None:
        """Emit a string, a byte string or records."""
        length = self.name("n")
        one_more = " + 1" if compact else ""
        if nullable:
            self.emit(f"if {local} is None:")
            self.emit(f"    {local} = b''")
            self.emit(f"    {length} = {0 if compact else -1}")
            self.emit("else:")
            self.depth += 1
        if kind == "string":
            self.emit(f"{local} = {local}.encode()")
        self.emit(f"{length} = len({local}){one_more}")
        if nullable:
            self.depth -= 1
        self.length(length, compact, "h" if kind == "string" else "i", is_string=kind == "string")
        if kind == "records" and self.in_pieces:
            assert self.out == "out", "records are no tagged field"
            self.emit(f"if len({local}) < {CUT_BYTES}: out += {local}")
            self.emit(f"else: pieces += (out, {local}); out = bytearray()")
        else:
            self.emit(f"{self.out} += {local}")

    def array(self, local: str, element: Any, nullable: bool, compact: bool) -> None:
        count = self.name("n")
        one_more = " + 1" if compact else ""
        if nullable:
            self.emit(f"if {local} is None:")
            self.emit(f"    {local} = ()")
            self.emit(f"    {count} = {0 if compact else -1}")
            self.emit(f"else: {count} = len({local}){one_more}")
        else:
            self.emit(f"{count} = len({local}){one_more}")
        self.length(count, compact, "i")
        if element == "uuid":
            self.emit(f'if {local}: {self.out} += pack("16s" * len({local}), *{local})')
        elif element in FIXED_WIDTH:
            width = FIXED_WIDTH[element][0]
            prepared, size = self.name("prepared"), self.name("n")
            self.names[prepared] = PREPARED[width]
            self.emit(f"{size} = len({local})")
            self.emit(f"if {size} < {PREPARED_COUNT}: {self.out} += {prepared}[{size}](*{local})")
            self.emit(f'else: {self.out} += pack(f">{{{size}}}{width}", *{local})')
        else:
            item = self.name("i")
            self.emit(f"for {item} in {local}:")
            self.depth += 1
            if isinstance(element, type):
                self.message(item, element)
                self.flush()
                if self.in_steps:
                    self.emit("elements += 1")
                    self.emit(f"if not elements % {STEP_ELEMENTS} or len(out) > mark:")
                    self.emit(f"    mark = len(out) + {STEP_BYTES}")
                    self.emit("    yield")
            else:
                self.sized(item, element, False, compact)
            self.depth -= 1


def differs(value: str, field: Field) -> str:
    """The expression that is true when `value` differs from the field's default."""
    if field.default is None:
        return f"({value} is not None)"
    if field.kind == "array":
        return f"({value} != [])"
    if field.kind == "struct":
        inner = [differs(f"{value}.{name}", inner) for name, inner in field.element.FIELDS]
        return "(" + " or ".join(inner) + ")"
    return f"({value} != {field.default!r})"


def compile_encoder(message: type[Declaration], version: int) -> Encoder:
    encoder: Encoder = _compile(EncoderSource(message, version), message, version)
    return encoder


def compile_piece_encoder(message: type[Declaration], version: int) -> PieceEncoder:
    """An encoder that does not copy large records: (message, out, pieces) -> the output after the last piece.

    It adds the output so far and the records to `pieces`.
    """
    encoder: PieceEncoder = _compile(EncoderSource(message, version, in_pieces=True), message, version)
    return encoder


def compile_step_encoder(message: type[Declaration], version: int) -> StepEncoder:
    """An encoder that is a generator, and yields after each STEP_ELEMENTS."""
    encoder: StepEncoder = _compile(EncoderSource(message, version, in_steps=True), message, version)
    return encoder


def _compile(encoder_source: EncoderSource, message: type[Declaration], version: int) -> Any:
    code = compile(encoder_source.source, f"<encoder of {message.__name__} version {version}>", "exec")
    exec(code, encoder_source.names)  # noqa: S102 - our own text, made of declarations only
    return encoder_source.names["encode"]


def _too_long(size_bytes: int) -> NoReturn:
    raise OverflowError(f"it has a string of {size_bytes} bytes, more than {STRING_BYTES_MAX}")


def _unsupported(message: str, field: str, version: int) -> NoReturn:
    raise KafkaError(ErrorCode.UNSUPPORTED_VERSION, f"{message}.{field} cannot be expressed in version {version}")
