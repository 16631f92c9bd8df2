"""What is in force when the cluster sets configs at run time, and who is told."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pytest

from tidelog.broker.config.definition_types import base_name
from tidelog.broker.config.dynamic_config import DynamicConfig
from tidelog.broker.config.node_config import NodeConfig
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE, MetadataDelta, MetadataImage


class Cluster:
    """Publishes images to one node's settings."""

    def __init__(self, **static: str) -> None:
        self.settings = DynamicConfig(
            NodeConfig({"node.id": "7", **{k.replace("_", "."): v for k, v in static.items()}})
        )

    def set(self, own: Mapping[str, str] | None = None, cluster: Mapping[str, str] | None = None) -> None:
        configs = {(BROKER_RESOURCE, "7"): dict(own or {}), (BROKER_RESOURCE, ""): dict(cluster or {})}
        image = MetadataImage(configs={key: value for key, value in configs.items() if value})
        self.settings.on_image(image, MetadataDelta(changed_configs=set(configs)))


def test_the_nodes_own_value_is_stronger_than_the_clusters_and_that_than_the_files() -> None:
    cluster = Cluster(max_connections="5")
    settings = cluster.settings
    assert settings.integer("max.connections") == 5
    cluster.set(cluster={"max.connections": "6"})
    assert settings.integer("max.connections") == 6
    cluster.set(own={"max.connections": "7"}, cluster={"max.connections": "6"})
    assert settings.integer("max.connections") == 7
    assert settings.raw("max.connections") == "7"
    cluster.set()
    assert settings.integer("max.connections") == 5
    assert not settings.is_set("leader.replication.throttled.rate")


def test_every_type_is_read_as_what_it_is() -> None:
    cluster = Cluster()
    cluster.set(
        cluster={
            "log.cleaner.io.buffer.load.factor": "0.5",
            "unclean.leader.election.enable": "true",
            "log.cleanup.policy": "compact,delete",
            "leader.replication.throttled.rate": "12",
        }
    )
    settings = cluster.settings
    assert settings.number("log.cleaner.io.buffer.load.factor") == 0.5
    assert settings.flag("unclean.leader.election.enable")
    assert settings.items("log.cleanup.policy") == ["compact", "delete"]
    assert settings.integer("leader.replication.throttled.rate") == 12
    assert settings.text("log.retention.ms") == ""


def test_who_subscribed_to_a_key_is_told_once_when_its_value_is_another() -> None:
    cluster = Cluster()
    told: list[int] = []
    settings = cluster.settings
    settings.subscribe(["max.connections", "num.io.threads"], lambda: told.append(settings.integer("max.connections")))
    cluster.set(cluster={"max.connections": "6", "num.io.threads": "4"})
    cluster.set(cluster={"max.connections": "6", "num.io.threads": "4", "background.threads": "3"})
    cluster.set(own={"max.connections": "6"}, cluster={"max.connections": "9", "num.io.threads": "4"})
    assert told == [6]
    cluster.set()
    assert told == [6, 2147483647]


def test_a_change_of_topics_tells_nobody() -> None:
    cluster = Cluster()
    cluster.set(cluster={"max.connections": "6"})
    image = MetadataImage()
    cluster.settings.on_image(image, MetadataDelta(changed_configs={(TOPIC_RESOURCE, "a")}))
    assert cluster.settings.integer("max.connections") == 6


@pytest.mark.parametrize(("name", "text"), [("num.io.threads", "none"), ("num.io.threads", "0"), ("node.id", "3")])
def test_a_value_that_cannot_be_used_is_left_out_and_told_once(
    name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    before = cluster.settings.integer(name)
    with caplog.at_level(logging.ERROR, "tidelog.config"):
        cluster.set(cluster={name: text})
        cluster.set(cluster={name: text, "background.threads": "3"})
    assert cluster.settings.integer(name) == before
    assert len(caplog.records) == 1
    assert name in caplog.text


def test_a_listeners_key_stands_beside_the_nodes() -> None:
    cluster = Cluster()
    told: list[object] = []
    settings = cluster.settings
    settings.subscribe(["max.connections"], lambda: told.append(settings.of_listener("OUTSIDE", "max.connections")))
    assert settings.of_listener("OUTSIDE", "max.connections") is None
    cluster.set(own={"listener.name.outside.max.connections": "3"})
    assert told == [3]
    assert settings.integer("max.connections") == 2147483647
    assert base_name("listener.name.outside.max.connections") == "max.connections"


def test_topics_fall_back_to_what_the_cluster_sets_now() -> None:
    cluster = Cluster(log_retention_hours="2")
    settings = cluster.settings
    assert settings.log_config({}).retention_ms == 2 * 3_600_000
    cluster.set(cluster={"log.retention.ms": "1000", "message.max.bytes": "77"})
    assert settings.log_config({}).retention_ms == 1000
    assert settings.log_config({"max.message.bytes": "5"}).max_message_bytes == 5
    assert settings.topic_default("max.message.bytes") == "77"
