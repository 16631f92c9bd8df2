"""Starts and stops in a row leave no thread, descriptor, process, port or directory, and the memory does not grow."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doses import dose
from tidelog.client.sync import Producer
from tidelog.testing import ports
from tidelog.testing.cluster import EmbeddedCluster
from tidelog.testing.embedded import EmbeddedBroker
from tidelog.testing.usage import rss_bytes

# A start that kept its node would keep several times that: an idle node weighs 1 to 2 MB on top of the imports.
GROWTH_BYTES_PER_START = 150_000
WARM_UP_STARTS = 3


def held() -> tuple[int, int, set[str], set[int]]:
    """Threads, descriptors, temporary directories, claimed ports."""
    gc.collect()
    directories = {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("tidelog-")}
    return threading.active_count(), len(os.listdir("/proc/self/fd")), directories, set(ports._claimed)


def start_and_stop(make: Callable[[], Any]) -> None:
    with make() as server, Producer(bootstrap_servers=server.bootstrap_servers) as producer:
        producer.send_and_wait("t", b"x")


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        EmbeddedBroker,
        pytest.param(lambda: EmbeddedBroker(process=True), id="process"),
        pytest.param(lambda: EmbeddedCluster(1, cuttable=True), id="cluster"),
    ],
)
def test_nothing_is_left_of_starts_and_stops(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports.free_port()  # opens the file of claims that all processes share, before directories are made elsewhere
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(WARM_UP_STARTS):
        start_and_stop(make)
    before, before_bytes = held(), rss_bytes(os.getpid())
    starts = dose("TIDELOG_EMBEDDED_STARTS")
    for _ in range(starts):
        start_and_stop(make)
    assert held() == before
    growth_bytes = rss_bytes(os.getpid()) - before_bytes
    assert growth_bytes < max(starts, 40) * GROWTH_BYTES_PER_START, f"{growth_bytes / starts:.0f} bytes a start"


@pytest.mark.hunt
def test_nothing_is_left_of_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_nothing_is_left_of_starts_and_stops(lambda: EmbeddedCluster(3), tmp_path, monkeypatch)
