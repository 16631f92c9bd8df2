"""What a fuzz target is, and what is done with the first input that shows something: it is kept, once per kind.

A target is a function of bytes. What it raises is a finding, and so is an input that takes too long; one is kept per
place in the code that it came from, so that an hour's run ends with a list and not at the first of them.
"""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import NamedTuple

# CPU time of one input; instrumented code takes about three times as long as usual.
SLOW_S = 2.0
FRAMES_OF_KIND = 3


class Target(NamedTuple):
    """`mend` makes a mutated input plausible again in place, by sizes for instance; it is done to some of them."""

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]
    mend: Callable[[bytearray, Random], None] | None = None
    history: Callable[[], list[bytes]] | None = None
    """What the target was given before, where that matters to it, the last input included."""


class Findings:
    """`directory`/<target>-<kind>.bin and a .txt beside it; `kinds` are those seen by this process."""

    def __init__(self, target: Target, directory: Path) -> None:
        self._target = target
        self.directory = directory
        self.kinds: dict[str, int] = {}
        self.runs = 0

    def run(self, data: bytes) -> None:
        self.runs += 1
        began = time.process_time()
        try:
            self._target.run(data)
        except Exception as error:
            self._keep(kind_of(error), data, traceback.format_exc())
            return
        seconds = time.process_time() - began
        if seconds > SLOW_S:
            self._keep("slow", data, f"{seconds:.1f} s of CPU for {len(data)} bytes")

    def _keep(self, kind: str, data: bytes, text: str) -> None:
        seen = self.kinds.get(kind, 0)
        self.kinds[kind] = seen + 1
        name = f"{self._target.name}-{kind}"
        path = self.directory / f"{name}.bin"
        if seen and path.exists() and path.stat().st_size <= len(data):
            return  # the smallest is the best to look at
        self.directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        (self.directory / f"{name}.txt").write_text(text)
        if self._target.history is not None:
            lines = [each.hex() for each in self._target.history()]
            (self.directory / f"{name}.history").write_text("\n".join(lines))
        if not seen:
            print(f"FOUND {name}: {text.strip().splitlines()[-1][:200]}", flush=True)


def kind_of(error: BaseException) -> str:
    """The same for errors from the same place: what was raised, and the innermost frames it came through."""
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES_OF_KIND:]
    # Compiled decoders have a file name each: the message and version are told from the others by it.
    places = [f"{Path(frame.filename).name}:{frame.name}:{frame.line}" for frame in frames]
    digest = hashlib.sha1("\n".join([type(error).__name__, *places]).encode()).hexdigest()[:8]
    return f"{type(error).__name__}-{digest}"
