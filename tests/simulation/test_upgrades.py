"""A cluster at the metadata.version of an older Kafka is upgraded while it runs."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from tests.simulation.cluster import COMBINED, Cluster
from tests.simulation.world import World, without_collector
from tidelog.broker.cluster.controller_channel import ControllerChannel
from tidelog.protocol.messages.controller_registration import ControllerRegistrationRequest
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from tidelog.replication.controller.decisions import activation
from tidelog.replication.controller.metadata.image import METADATA_VERSION
from tidelog.replication.controller.metadata.record_codec import (
    CONTROLLERS_VERSION,
    LATEST_METADATA_VERSION,
    LOWEST_METADATA_VERSION,
)


def answer_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of a controller's registration arrives when metadata.version has risen."""
    honest = ControllerChannel.call

    async def call(self: ControllerChannel, request: Any, version: int, **options: Any) -> Any:
        response = await honest(self, request, version, **options)
        if isinstance(request, ControllerRegistrationRequest) and response.error_code:
            await asyncio.sleep(4)
        return response

    monkeypatch.setattr(ControllerChannel, "call", call)


@pytest.mark.parametrize(
    ("level", "is_late"),
    [(LOWEST_METADATA_VERSION, False), (CONTROLLERS_VERSION - 1, False), (CONTROLLERS_VERSION - 1, True)],
)
def test_controllers_register_when_the_metadata_can_hold_it(
    level: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka does not start on a log that has their registrations at a lower level."""
    if is_late:
        answer_late(monkeypatch)
    monkeypatch.setattr(activation, "NEW_CLUSTER_FEATURES", {METADATA_VERSION: level})
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    with without_collector():
        world = World(1)
        cluster = Cluster(world, COMBINED)
        cluster.start()
        cluster.wait("all are up", 30, cluster.is_up)
        world.run_for(2)
        active: Any = cluster.controller()
        assert active.image.controllers == {}
        update = FeatureUpdateKey(feature=METADATA_VERSION, max_version_level=LATEST_METADATA_VERSION, upgrade_type=1)
        request = UpdateFeaturesRequest(feature_updates=[update])
        controller, loop = active.node._metadata.controller, active.host.loop
        loop.call_soon(lambda: loop.create_task(controller.update_features(request, 2)))
        loop.inject(lambda: None)
        cluster.wait("all are registered", 5, lambda: set(active.image.controllers) == {1, 2, 3})
        world.end()
