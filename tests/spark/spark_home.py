"""A home for Spark whose Python processes import the installed package.

Spark puts its `pyspark.zip` first on their path. It holds no compiled modules, so each process compiles Spark's Python
again: three times the CPU of an import, and on a busy machine more than the ten seconds that Spark waits for a process.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path


def make_spark_home(directory: Path) -> Path:
    """Links to all of the installed Spark but that file. Without Spark an empty directory."""
    home = directory / "spark-home"
    home.mkdir(parents=True, exist_ok=True)
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return home
    for part in ("bin", "jars", "sbin"):
        link = home / part
        if not link.is_symlink():
            link.symlink_to(Path(spec.origin).parent / part)
    return home


def spark_environment(directory: Path) -> dict[str, str]:
    """What a process that starts Spark needs in its environment."""
    checkout = Path(__file__).resolve().parents[2]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH")))),
        "SPARK_HOME": str(make_spark_home(directory)),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
