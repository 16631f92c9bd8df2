"""Where only PySpark is installed: one line says what is missing, to the driver and to a task."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in {missing!r} else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
_DRIVER = """
from pyspark_tidelog import DefaultSource
assert DefaultSource.name() == "tidelog"  # Spark finds the format; else it would say that there is none
DefaultSource({"kafka.bootstrap.servers": "localhost:1", "subscribe": "t"})
"""
_READ = """
from tidelog.spark_ingest import source
from tidelog.spark_ingest.options import SourceOptions
from tidelog.spark_ingest.planning import OffsetRange
options = SourceOptions.parse({"kafka.bootstrap.servers": "localhost:1", "subscribe": "t"})
partition = source.RangePartition([(OffsetRange("t", 0, 0, 1), bytes(16))])
list(source.TidelogReader(options, ("value",)).read(partition))
"""
_WRITE = """
from tidelog.spark_ingest import writers
from tidelog.spark_ingest.sink import TaskId
from tidelog.spark_ingest.sink_options import SinkOptions
options = SinkOptions.parse({"kafka.bootstrap.servers": "localhost:1", "topic": "t"})
writers._write(options, TaskId("q", 0, -1), iter(()))
"""


@pytest.mark.parametrize("process", [_DRIVER, _READ, _WRITE], ids=["driver", "read", "write"])
@pytest.mark.parametrize("missing", [("numpy",), ("numpy", "pyarrow", "numba")], ids=",".join)
def test_the_error_names_what_to_install(process, missing):
    pytest.importorskip("pyspark.sql.datasource")
    code = _WITHOUT.format(missing=missing) + process
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    libraries = " and ".join(missing[:2])
    assert ended.stderr.splitlines()[-1] == (
        f'ImportError: format("tidelog") needs {libraries} in {sys.executable}: '
        "pip install 'tidelog[spark]' for the Python of the driver and of the executors"
    )
