"""Damage cases by the hundred, one line each.

python -m tests.cluster.damage.run --cases 100 --seed 1       drawn cases 1 to 100
python -m tests.cluster.damage.run --only 17                  one of them
python -m tests.cluster.damage.run --only named               the cases that have names (or one of them by its name)
    --kafka        the same on Apache Kafka
    --dump N       let Kafka's DumpLogSegments read the segments at the end of every Nth case (Java)
    --keep DIR     keep the directories of what did not go well
    --verbose      every finding and note
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.cluster.damage.cases import NAMED, Case, drawn
from tests.cluster.damage.trial import CLASSES, Outcome, Trial


def chosen(options: argparse.Namespace) -> list[Case]:
    if options.only is None:
        return [drawn(seed) for seed in range(options.seed, options.seed + options.cases)]
    if options.only == "named":
        return list(NAMED.values())
    if options.only in NAMED:
        return [NAMED[options.only]]
    return [drawn(int(seed)) for seed in options.only.split(",")]


def run_one(case: Case, directory: Path, *, kafka: bool = False, dumps: bool = False) -> Outcome:
    trial = Trial(case, directory, kafka=kafka, dumps=dumps)
    try:
        return trial.run()
    except Exception as error:
        trial.find("stuck", f"the case could not go on: {error!r}")
        trial.note("".join(traceback.format_exception(error)))
        return trial.outcome


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only")
    parser.add_argument("--kafka", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--dump", type=int, default=0)
    options = parser.parse_args(arguments)
    totals: Counter[str] = Counter()
    began = time.monotonic()
    for case in chosen(options):
        directory = Path(tempfile.mkdtemp(prefix="tidelog-damage-"))
        try:
            dumps = options.dump > 0 and sum(totals.values()) % options.dump == 0
            outcome = run_one(case, directory, kafka=options.kafka, dumps=dumps)
            totals[outcome.name] += 1
            print(describe(outcome, verbose=options.verbose), flush=True)
            if options.keep is not None and outcome.name != "well":
                kept = options.keep / case.name.replace(" ", "-")
                shutil.rmtree(kept, ignore_errors=True)
                shutil.copytree(directory, kept)
                print(f"    kept in {kept}", flush=True)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    counts = ", ".join(f"{name} {totals[name]}" for name in reversed(CLASSES) if totals[name])
    print(f"{sum(totals.values())} cases in {time.monotonic() - began:.0f} s: {counts}")
    return 0 if set(totals) <= {"well"} else 1


def describe(outcome: Outcome, *, verbose: bool = True) -> str:
    """What a reader needs to know of one case; a line alone when all went well."""
    lines = [f"{outcome.case.name}: {outcome.name}: {outcome.case} ({outcome.seconds:.0f} s)"]
    if outcome.name != "well" or verbose:
        findings = sorted(outcome.findings, key=lambda one: CLASSES.index(one[0]))
        lines += [f"    damaged: {damage}" for damage in outcome.damage]
        lines += [f"    {name}: {message}" for name, message in (findings if verbose else findings[:6])]
        lines += [f"    note: {note}" for note in outcome.notes if verbose]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
