"""`make clients`: what the stock clients need that are not Python's, each from its own registry, each in bounded time.

A client that cannot be had here is no error: the line says why, and its tests are skipped with that reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tidelog.bench import peers

HERE = Path(__file__).resolve().parents[1]
QUIET = {
    **os.environ,
    "DEBIAN_FRONTEND": "noninteractive",
    "GOFLAGS": "-buildvcs=false",
    "npm_config_loglevel": "error",
}


class Failed(Exception):
    """Why a client cannot be had."""


def run(directory: Path, timeout_s: float, *command: str) -> None:
    if shutil.which(command[0]) is None:
        raise Failed(f"no `{command[0]}` on the path")
    try:
        done = subprocess.run(
            command, cwd=directory, env=QUIET, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"`{' '.join(command)}` takes longer than {timeout_s:.0f} s") from None
    if done.returncode != 0:
        raise Failed(f"`{' '.join(command)}`: {(done.stdout + done.stderr).strip()[-300:]}")


def newer(target: Path, sources: Sequence[Path]) -> bool:
    """Whether there is nothing to do."""
    return target.exists() and all(source.stat().st_mtime <= target.stat().st_mtime for source in sources)


def kafkajs() -> None:
    folder = HERE / "kafkajs"
    if not newer(folder / "node_modules" / ".package-lock.json", [folder / "package-lock.json"]):
        run(folder, 240, "npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts")


def franz_go() -> None:
    folder = HERE / "franz_go"
    if not newer(folder / "adapter", [*folder.glob("*.go"), folder / "go.sum"]):
        run(folder, 480, "go", "build", "-o", "adapter", ".")


def java() -> None:
    folder = HERE / "java"
    if (reason := peers.bring_kafka()) is not None:
        raise Failed(reason)
    sources = sorted(folder.glob("*.java"))
    if not newer(folder / "classes" / "Adapter.class", sources):
        run(
            folder, 120, "javac", "-nowarn", "-d", "classes", "-cp", f"{peers.jars()}/*", *(one.name for one in sources)
        )


def debian() -> None:
    """kcat, and the browser that opens the benchmark report."""
    missing = [name for name in ("kcat", "chromium") if shutil.which(name) is None]
    if not missing:
        return
    if os.geteuid() != 0:
        raise Failed(f"not installed, and only root may (apt install {' '.join(missing)})")
    run(HERE, 120, "apt-get", "-q", "update")
    run(HERE, 300, "apt-get", "-q", "-y", "--no-install-recommends", "install", *missing)


def install(work: Callable[[], None]) -> bool:
    """Whether it is there now."""
    name, began = work.__name__.replace("_", "-"), time.monotonic()
    try:
        work()
    except Failed as failed:
        print(f"{name:9} skipped: {failed}", flush=True)
        return False
    print(f"{name:9} after {time.monotonic() - began:.0f} s", flush=True)
    return True


def main() -> None:
    with ThreadPoolExecutor() as pool:
        ready = list(pool.map(install, (kafkajs, franz_go, java, debian)))
    print(f"clients ready: {sum(ready)} of {len(ready)}, beside those in Python")


if __name__ == "__main__":
    main()
