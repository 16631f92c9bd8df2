"""A cluster at the metadata.version of an older Kafka is upgraded while it runs."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.simulation.cluster import COMBINED, Cluster
from tests.simulation.world import World, without_collector
from tidelog.protocol.messages.update_features import FeatureUpdateKey, UpdateFeaturesRequest
from tidelog.replication.controller.decisions import activation
from tidelog.replication.controller.metadata.image import METADATA_VERSION
from tidelog.replication.controller.metadata.record_codec import (
    CONTROLLERS_VERSION,
    LATEST_METADATA_VERSION,
    LOWEST_METADATA_VERSION,
)


@pytest.mark.parametrize("level", [LOWEST_METADATA_VERSION, CONTROLLERS_VERSION - 1])
def test_controllers_register_when_the_metadata_can_hold_it(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka does not start on a log that has their registrations at a lower level."""
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
