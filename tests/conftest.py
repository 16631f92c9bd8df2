"""What every test shares: hypothesis profiles, and the event loop that ships."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.doses import dose

# One place decides how hard properties are tried: `make check` uses "fast", `make test` "full", a hunt "deep". The
# first two try the same examples each time, so that what fails is what was changed; `make properties` tries others.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fast", max_examples=10, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("full", max_examples=50, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("deep", max_examples=dose("TIDELOG_EXAMPLES"), deadline=None, suppress_health_check=_QUIET)
# Hypothesis also tries the constants of the modules that are loaded, which depend on the tests that ran before in the
# process. Without them the same examples are tried wherever a test runs.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

DESCRIPTORS_LEFT_MAX = 30
"""A file of tests may leave some: of a server of forks, of a session of Spark. Forgotten logs add up to thousands."""
_descriptors = len(os.listdir("/dev/fd"))


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Tests in the background of a script. The commands that they start and interrupt would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection(session: pytest.Session) -> None:
    gc.disable()


FAST_VARIANTS_MAX = 3
"""Of a test with more parameters than this, as many are for `make check`. The rest are for `make test`."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A checksum chooses them: the same each time, and not always the same value of one of two parameters."""
    variants = defaultdict(list)
    for item in items:
        if not any(item.iter_markers("slow")) and not any(item.iter_markers("hunt")):
            variants[item.nodeid.partition("[")[0]].append(item)
    for tests in variants.values():
        for item in sorted(tests, key=lambda item: crc32(item.nodeid.encode()))[FAST_VARIANTS_MAX:]:
            item.add_marker("slow")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """All modules and tests stay to the end: 700,000 objects that the collector need not look at again and again."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """The same for what a file leaves: modules that it imported, compiled codecs. What it has dropped is collected."""
    global _descriptors
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
        before, _descriptors = _descriptors, len(os.listdir("/dev/fd"))
        if _descriptors - before > DESCRIPTORS_LEFT_MAX:
            paths = [os.path.realpath(f"/dev/fd/{each}") for each in os.listdir("/dev/fd")]
            pytest.fail(f"{item.path} leaves {_descriptors - before} descriptors, the last: {paths[-5:]}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.sharing import Scheduling

    return Scheduling(config, log)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that nodes and clients run on (`cli/start.py`, `loop_thread.py`), where there is one."""
    try:
        import uvloop
    except ImportError:
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def quiet() -> Iterator[None]:
    """No log records: thousands of histories tell of the same failures."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
