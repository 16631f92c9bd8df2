"""Fixtures of the storage tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.storage.batches import Logs
from tidelog.storage.segments.log_config import LogConfig


@pytest.fixture
def logs(tmp_path: Path) -> Callable[..., Logs]:
    """logs(segment_bytes=...) -> a directory with one empty log."""

    def make(**settings: Any) -> Logs:
        return Logs(tmp_path / "data", LogConfig(**settings))

    return make
