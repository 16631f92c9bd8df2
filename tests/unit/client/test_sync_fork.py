"""A fork copies no thread: what the blocking clients of the parent do in the child."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.patience import PATIENCE_S, readable
from tests.unit.client.test_admin import served
from tests.unit.client.test_consumer import FAST
from tidelog.client import sync

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
IN_THE_CHILD = "RuntimeError: this client was started before a fork, and its thread is in the other process; make a"


def in_child(work: Callable[[], Any]) -> str:
    """What the work returned or raised in a child that must end: a hang is a failure, not a wait."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
        pid = os.fork()
    if pid == 0:
        try:
            outcome = repr(work())
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"
        os.write(writing, outcome.encode())
        os._exit(0)
    os.close(writing)
    try:
        assert readable(reading), "it hangs"
        return os.read(reading, 10_000).decode()
    finally:
        os.close(reading)
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.slow
def test_a_started_client_is_refused_in_the_child_and_goes_on_in_the_parent() -> None:
    with served(t=1) as cluster:
        options = {"bootstrap_servers": cluster.bootstrap}
        with (
            sync.Producer(**options, linger_ms=0) as producer,
            sync.Consumer("t", **options, **FAST) as consumer,
            sync.Admin(**options) as admin,
        ):
            sent = producer.send("t", b"of the parent", partition=0)
            calls: list[Callable[[], Any]] = [
                lambda: producer.send("t", b"of the child"),
                producer.flush,
                lambda: consumer.poll(10),
                lambda: consumer.commit_async(),
                admin.list_topics,
            ]
            for call in calls:
                assert in_child(call).startswith(IN_THE_CHILD)
            for client in (producer, consumer, admin):
                assert in_child(client.close) == "None"
            assert sent.result(PATIENCE_S).offset == 0
            assert producer.send_and_wait("t", b"more", partition=0).offset == 1
            assert "t" in admin.list_topics()
            while not consumer.poll(100):
                pass


def test_a_wait_for_a_record_of_the_parent_is_refused_in_the_child() -> None:
    with served(t=1) as cluster, sync.Producer(bootstrap_servers=cluster.bootstrap, linger_ms=60_000) as producer:
        sent = producer.send("t", b"x")
        assert in_child(sent.result).startswith(IN_THE_CHILD)


def test_a_record_that_has_not_ended_before_the_fork_is_refused_in_the_child_in_every_wait() -> None:
    as_completed, wait = concurrent.futures.as_completed, concurrent.futures.wait
    with served(t=1) as cluster, sync.Producer(bootstrap_servers=cluster.bootstrap, linger_ms=60_000) as producer:
        done = producer.send("t", b"x")
        producer.flush()
        sent = producer.send("t", b"x")
        begun = as_completed([done, sent])
        assert next(begun) is done
        calls: list[Callable[[], Any]] = [
            lambda: wait([done, sent]),
            lambda: wait([sent], 0.0),
            lambda: list(as_completed([sent])),
            lambda: sent.add_done_callback(print),
            lambda: next(begun),
        ]
        for call in calls:
            assert in_child(call).startswith(IN_THE_CHILD)
        assert in_child(lambda: [len(each) for each in wait([done])]) == "[1, 0]"
        assert in_child(lambda: next(as_completed([done])) is done) == "True"
        producer.flush()
        assert list(begun) == [sent]


def test_a_client_that_was_made_but_not_started_starts_in_the_child() -> None:
    with served(t=1) as cluster:
        admin = sync.Admin(bootstrap_servers=cluster.bootstrap)
        assert in_child(admin.list_topics) == "['t']"


def test_a_client_that_the_child_drops_goes_on_in_the_parent() -> None:
    with served(t=1) as cluster, sync.Producer(bootstrap_servers=cluster.bootstrap) as producer:
        producer.send_and_wait("t", b"1")
        held = [producer]
        del producer

        def drop() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                client = held.pop()
                finalizer = client._finalizer
                assert finalizer is not None
                assert not finalizer.alive
                del client
                gc.collect()

        assert in_child(drop) == "None"
        held[0].send_and_wait("t", b"2")
