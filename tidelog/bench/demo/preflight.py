"""What the demo needs from the machine, asked before anything starts: one clear line each when it is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from tidelog.bench.demo import source

_OLDEST_JAVA = 17
_MODULES = ("matplotlib", "numba", "numpy", "pyarrow", "pyspark", "rich")


class NotReady(Exception):
    """Something is missing; the message says what and how to get it."""


def check(out: Path) -> None:
    """Raises NotReady."""
    missing = [name for name in _MODULES if importlib.util.find_spec(name) is None]
    if missing:
        raise NotReady(f"not installed: {', '.join(missing)}; run `make demo`, or pip install {' '.join(missing)}")
    try:
        source.data_directory()
    except source.SourceMissing as error:
        raise NotReady(str(error)) from None
    check_java()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise NotReady(f"cannot write the chart to {out}: {error.strerror}") from None


def check_java() -> None:
    """Spark runs on the JVM; nothing else here does."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    advice = f"Spark needs Java {_OLDEST_JAVA} or newer (on Debian or Ubuntu: apt install openjdk-17-jre-headless)"
    if java is None:
        raise NotReady(f"no java on the PATH and JAVA_HOME is not set; {advice}")
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False, timeout=60).stderr
    except OSError as error:
        raise NotReady(f"{java} does not run ({error.strerror}); {advice}") from None
    match = re.search(r'version "(\d+)(?:\.(\d+))?', shown)
    if match is None:
        raise NotReady(f"{java} does not say its version; {advice}")
    version = int(match[2] or 0) if match[1] == "1" else int(match[1])
    if version < _OLDEST_JAVA:
        raise NotReady(f"{java} is Java {version}; {advice}")
