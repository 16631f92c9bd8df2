"""The collector of the process that runs tests looks only at what tests leave, not at all that pytest has loaded."""

from __future__ import annotations

import gc


def test_what_is_loaded_before_the_first_test_is_not_looked_at():
    """It took a third of the CPU time of `make check`."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > 50_000
    assert len(gc.get_objects()) < gc.get_freeze_count() / 2
