"""What every test shares: hypothesis profiles and the fixtures that start real processes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.doses import dose

# One place decides how hard properties are tried: `make check` uses "fast", `make test` "full", a hunt "deep". The
# first two try the same examples each time, so that what fails is what was changed; `make properties` tries others.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fast", max_examples=30, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("full", max_examples=100, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("deep", max_examples=dose("TIDELOG_EXAMPLES"), deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.sharing import Scheduling

    return Scheduling(config, log)
