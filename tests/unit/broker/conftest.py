from __future__ import annotations

import pytest

from tests.unit.broker.metadata_services import running_services


@pytest.fixture
async def services(tmp_path):
    async with running_services(tmp_path) as running:
        yield running
