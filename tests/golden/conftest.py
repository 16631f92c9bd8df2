"""`pytest tests/golden --rewrite` records transcripts anew: look at the difference before you commit it."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite", action="store_true", help="record golden transcripts anew instead of comparing")


@pytest.fixture
def rewrite(request: pytest.FixtureRequest) -> bool:
    """True when transcripts are to be recorded; False too where this file was loaded too late to add the option."""
    return bool(request.config.getoption("--rewrite", default=False))
