"""The garbage collector of a task's process: Spark's daemon runs it after each task."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.patience import PATIENCE_S

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")

PREPARED = """
    import gc, sys
    from pyspark import TaskContext
    from tidelog.spark_ingest import task_process, writers

    if {in_task}:
        TaskContext.get = classmethod(lambda cls: cls())
"""


def run(code: str, *, in_task: bool = True) -> str:
    """Run in a process of its own: what is frozen stays so."""
    prepared = textwrap.dedent(PREPARED).format(in_task=in_task)
    done = subprocess.run(
        [sys.executable, "-c", prepared + textwrap.dedent(code)],
        check=False,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_after_a_task_the_collector_passes_over_what_is_imported():
    before, after, frozen = map(
        int,
        run("""
        before = len(gc.get_objects())
        writers._write(writers.SinkOptions({}, max_atomic_bytes=1), writers.TaskId("q", 0, -1), iter(()))
        print(before, len(gc.get_objects()), gc.get_freeze_count())
        """).split(),
    )
    assert before > 10_000
    assert after < before / 100
    assert frozen > before * 0.9


@pytest.mark.slow
def test_it_is_done_again_only_after_more_imports_and_garbage_does_not_stay():
    printed = run("""
        import weakref

        class Node:
            pass

        def garbage():
            node = Node()
            node.itself = node
            return weakref.ref(node)

        counts = []
        for extra in (None, None, "wave"):
            with task_process.task_process():
                found = garbage()
                if extra:
                    __import__(extra)
            counts.append((gc.get_freeze_count(), found() is None))
        assert counts[0][1] and counts[2][1], counts  # collected before the freeze
        print(counts[1][0] <= counts[0][0], counts[2][0] > counts[0][0])
    """)
    assert printed == "True True"


@pytest.mark.slow
def test_a_task_that_fails_freezes_too_and_raises():
    printed = run("""
        try:
            with task_process.task_process():
                raise ValueError("broken")
        except ValueError:
            print(gc.get_freeze_count() > 0)
    """)
    assert printed == "True"


@pytest.mark.slow
def test_the_process_of_a_program_is_left_alone():
    printed = run(
        """
        with task_process.task_process():
            pass
        print(gc.get_freeze_count())
        """,
        in_task=False,
    )
    assert printed == "0"
