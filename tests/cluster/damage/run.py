"""Damage cases by the hundred, one line each.

python -m tests.cluster.damage.run --cases 100 --seed 1       drawn cases 1 to 100
python -m tests.cluster.damage.run --only 17                  one of them
python -m tests.cluster.damage.run --only named               the cases that have names (or one of them by its name)
    --kafka        the same on Apache Kafka
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


def run_one(case: Case, directory: Path, *, kafka: bool) -> Outcome:
    trial = Trial(case, directory, kafka=kafka)
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
    options = parser.parse_args(arguments)
    totals: Counter[str] = Counter()
    began = time.monotonic()
    for case in chosen(options):
        directory = Path(tempfile.mkdtemp(prefix="tidelog-damage-"))
        try:
            outcome = run_one(case, directory, kafka=options.kafka)
            totals[outcome.name] += 1
            tell(outcome, verbose=options.verbose)
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


def tell(outcome: Outcome, *, verbose: bool) -> None:
    print(f"{outcome.case.name}: {outcome.name}: {outcome.case} ({outcome.seconds:.0f} s)", flush=True)
    if outcome.name == "well" and not verbose:
        return
    for damage in outcome.damage:
        print(f"    damaged: {damage}", flush=True)
    findings = outcome.findings if verbose else outcome.findings[:6]
    for name, message in sorted(findings, key=lambda one: CLASSES.index(one[0])):
        print(f"    {name}: {message}", flush=True)
    for note in outcome.notes if verbose else ():
        print(f"    note: {note}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
