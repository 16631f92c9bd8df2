"""The Python process of a task, which Spark uses for many tasks, one after the other.

Spark's daemon collects garbage after each task. That takes 6 ms in a process of PySpark alone, and 50 ms where Arrow,
numba and the client are imported: most of the time of a task with few rows.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import TaskContext

_frozen_module_count = 0


@contextmanager
def task_process() -> Iterator[None]:
    """The work of one task. After it the collector no longer looks at what the process has imported.

    It does this again only where a task has imported more. In a process that is none of a task, nothing is done.
    """
    try:
        yield
    finally:
        _freeze_imports()


def _freeze_imports() -> None:
    global _frozen_module_count
    if TaskContext.get() is None or len(sys.modules) == _frozen_module_count:
        return
    _frozen_module_count = len(sys.modules)
    gc.collect()  # frozen garbage would stay
    gc.freeze()
