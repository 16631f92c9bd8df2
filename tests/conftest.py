"""What every test shares: hypothesis profiles and the fixtures that start real processes."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# One place decides how hard properties are tried: `make check` uses "fast", `make test` "full", a hunt "deep". The
# first two try the same examples each time, so that what fails is what was changed; a hunt (`make fuzz`) tries others.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("fast", max_examples=30, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("full", max_examples=100, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("deep", max_examples=5000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
