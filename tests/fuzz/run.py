"""Fuzz from the command line: python -m tests.fuzz.run -h.

With atheris, which follows what the code does with an input and keeps the inputs that reach something new; without it
(it is made for Linux and some versions of Python), seeds changed at random. Each target runs in a process of its own.
The corpus stays in .fuzz/, what was found in .fuzz/findings; a finding that is mended moves to tests/fuzz/regressions,
where `test_regressions.py` runs it from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import re
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.fuzz.target import Findings, Target

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / ".fuzz"
NAMES = ("frames", "messages", "by_hand", "batches", "records", "compressed", "node")
# The share of the time that a target gets: the node is where everything meets.
SHARES = {"node": 6, "messages": 2, "batches": 2, "records": 2}
INPUT_BYTES_MAX = {"node": 4096, "frames": 4096}
MEND_CHANCE = 0.5
RSS_MB = 1500
TIMEOUT_S = 60
GRACE_S = 600


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of decoders and of a whole node.")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all targets together, one after the other")
    parser.add_argument("--target", action="append", choices=NAMES, help="only this one; may be repeated")
    parser.add_argument("--directory", type=Path, default=FUZZ, help="where corpus and findings are kept")
    parser.add_argument("--worker", choices=NAMES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return work(arguments.worker, arguments.minutes * 60, arguments.directory)
    names = arguments.target or list(NAMES)
    shares = sum(SHARES.get(name, 1) for name in names)
    failed = []
    for name in names:
        minutes = arguments.minutes * SHARES.get(name, 1) / shares
        command = [sys.executable, "-m", "tests.fuzz.run", "--worker", name, "--minutes", f"{minutes:.4f}"]
        command += ["--directory", str(arguments.directory)]
        arguments.directory.mkdir(parents=True, exist_ok=True)
        with (arguments.directory / f"{name}.log").open("w") as told:  # libFuzzer's own
            try:
                code = subprocess.run(
                    command, cwd=ROOT, timeout=minutes * 60 + GRACE_S, stderr=told, check=False
                ).returncode
            except subprocess.TimeoutExpired:
                code = -1
        if code:
            failed.append(name)
        print(f"{name}: {statistics(arguments.directory / f'{name}.log')}", flush=True)
    findings = sorted((arguments.directory / "findings").glob("*.txt"))
    for path in findings:
        print(f"{path.with_suffix('.bin')}: {path.read_text().strip().splitlines()[-1][:150]}")
    print(f"{len(findings)} findings; targets that ended early: {', '.join(failed) or 'none'}")
    return 1 if findings or failed else 0


def statistics(log: Path) -> str:
    """What libFuzzer says at its end: inputs, inputs a second, those that reached something new."""
    found = re.findall(r"^stat::(\w+): +(\d+)", log.read_text(errors="replace"), re.MULTILINE)
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found) or "no statistics"


def work(name: str, seconds: float, directory: Path) -> int:
    """One target in this process."""
    try:
        import atheris
    except ImportError:
        atheris = None
    target, findings = load(atheris, name, directory / "findings")
    corpus = directory / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds():
        (corpus / hashlib.sha1(seed).hexdigest()).write_bytes(seed)
    logging.disable(logging.WARNING)
    if atheris is None:
        changed_at_random(target, findings, corpus, seconds)
        return 1 if findings.kinds else 0
    return guided(atheris, target, findings, corpus, seconds)


def load(atheris: Any, name: str, directory: Path) -> tuple[Target, Findings]:
    """The target, its code made to tell what it does: modules as they are imported, decoders as they are compiled."""
    if atheris is not None:
        with atheris.instrument_imports(include=["tidelog"], exclude=["tidelog.protocol.batches.columnar_kernel"]):
            return _targets(name, directory, atheris)
    return _targets(name, directory, None)


def _targets(name: str, directory: Path, atheris: Any) -> tuple[Target, Findings]:
    from tests.fuzz.target import Findings
    from tidelog.protocol.codec import schema

    if atheris is not None:
        compile_decoder = vars(schema)["compile_decoder"]

        def compile_and_instrument(*arguments: Any, **options: Any) -> Any:
            return atheris.instrument_func(compile_decoder(*arguments, **options))

        vars(schema)["compile_decoder"] = compile_and_instrument
    if name == "node":
        from tests.fuzz.dispatcher import TARGET as target
    else:
        from tests.fuzz.decoders import TARGETS

        target = next(each for each in TARGETS if each.name == name)
    return target, Findings(target, directory)


def guided(atheris: Any, target: Target, findings: Findings, corpus: Path, seconds: float) -> int:
    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        mutated = bytearray(atheris.Mutate(data, size_max))
        rng = Random(seed)
        if target.mend is not None and rng.random() < MEND_CHANCE:
            target.mend(mutated, rng)
        return bytes(mutated[:size_max])

    options = [
        sys.argv[0],
        f"-max_total_time={max(1, int(seconds))}",
        f"-max_len={INPUT_BYTES_MAX.get(target.name, 8192)}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={RSS_MB}",
        f"-artifact_prefix={findings.directory}/{target.name}-",
        "-print_final_stats=1",
        "-verbosity=0",
        str(corpus),
    ]
    findings.directory.mkdir(parents=True, exist_ok=True)

    atheris.Setup(options, findings.run, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


def changed_at_random(target: Target, findings: Findings, corpus: Path, seconds: float) -> None:
    rng = Random(time.time_ns())
    inputs = [path.read_bytes() for path in sorted(corpus.iterdir())]
    ends = time.monotonic() + seconds
    for seed in inputs:
        findings.run(seed)
    while time.monotonic() < ends:
        data = bytearray(rng.choice(inputs))
        for _ in range(rng.randint(1, 5)):
            change(data, rng, inputs)
        if target.mend is not None and rng.random() < MEND_CHANCE:
            target.mend(data, rng)
        findings.run(bytes(data))
    print(f"{target.name}: {findings.runs} inputs, {len(findings.kinds)} kinds of failures (without atheris)")


def change(data: bytearray, rng: Random, inputs: list[bytes]) -> None:
    place = rng.randrange(len(data) + 1)
    what = rng.randrange(5)
    if what == 0 and data:
        data[min(place, len(data) - 1)] ^= 1 << rng.randrange(8)
    elif what == 1 and data:
        data[min(place, len(data) - 1)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF])
    elif what == 2:
        del data[place : place + rng.choice([1, 2, 4, 30])]
    elif what == 3:
        data[place:place] = rng.randbytes(rng.choice([1, 2, 4, 8]))
    else:
        other = rng.choice(inputs)
        start = rng.randrange(len(other) + 1)
        data[place:place] = other[start : start + rng.choice([4, 16, 60])]


if __name__ == "__main__":
    sys.exit(main())
