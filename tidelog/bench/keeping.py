"""Ends a benchmark in good order, and keeps what it has measured.

SIGTERM and SIGHUP do what Ctrl-C does: KeyboardInterrupt runs through the command, its `with` blocks end the processes
that it has started and remove its temporary directories, and it shows the figures that it has. SIGKILL cannot be
caught: for that case a `ResultFile` is written anew after each row.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import click
from rich.console import Console

from tidelog.bench.figures import one_line
from tidelog.cli.common import CommandGroup
from tidelog.testing.processes import ServerFailed

INTERRUPTED = 130
"""The exit status after an interrupt."""


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP do inside the block what Ctrl-C does there.

    Only the first one does: a second one would interrupt the clean-up. A signal that the caller ignores, as nohup
    ignores SIGHUP, stays ignored. Without effect outside the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}

    def interrupt(_: int, frame: FrameType | None) -> None:
        for number in before:
            signal.signal(number, lambda *_: None)
        on_ctrl_c = signal.getsignal(signal.SIGINT)  # asyncio.run has one of its own
        if callable(on_ctrl_c):
            on_ctrl_c(signal.SIGINT, frame)
        else:
            raise KeyboardInterrupt

    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class InterruptibleGroup(CommandGroup):
    """A group whose commands end with `INTERRUPTED` on Ctrl-C, SIGTERM and SIGHUP.

    A node that does not start is one line.
    """

    def invoke(self, ctx: click.Context) -> object:
        try:
            with signals_as_interrupt():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("tidelog: interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        except ServerFailed as error:
            raise click.ClickException(one_line(error)) from error


@contextmanager
def shown_at_the_end(show: Callable[[], None], errors: Console) -> Iterator[None]:
    """Call `show` after the block, also after an interrupt, which then ends the command with `INTERRUPTED`."""
    try:
        yield
    except KeyboardInterrupt:
        errors.print("interrupted: what was measured is kept", style="yellow")
        show()
        raise SystemExit(INTERRUPTED) from None
    show()


save_option = click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the JSON to this file too, anew after each row: a run that is cut off keeps it.",
)


class ResultFile:
    """A file with the figures so far, None for no file; `as_text` makes its content.

    A reader finds the old text or the new one, never a part.
    """

    def __init__(self, file: Path | None, as_text: Callable[[], str], errors: Console) -> None:
        """Write it, without figures yet. Raises ClickException when that fails, before anything is measured."""
        self._file, self._as_text, self._errors = file, as_text, errors
        try:
            self._replace()
        except OSError as error:
            raise click.ClickException(f"cannot write {file}: {error.strerror or error}") from None

    def note(self, measurement: str, style: str | None = None) -> None:
        """Write the figures with this measurement, and print its line on standard error."""
        self.write()
        self._errors.print(measurement, highlight=False, markup=False, soft_wrap=True, style=style)

    def write(self) -> None:
        """Replace the text. A failure is a line on standard error, because it must not end the measurement."""
        try:
            self._replace()
        except OSError as error:
            self._errors.print(f"cannot write {self._file}: {error.strerror or error}", style="red", markup=False)

    def _replace(self) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_name(f"{self._file.name}.part")
        part.write_text(self._as_text() + "\n", encoding="utf-8")
        os.replace(part, self._file)
