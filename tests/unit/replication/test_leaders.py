from __future__ import annotations

from typing import Any

import pytest

from tests.unit.replication.clusters import broker_records, replay
from tidelog.protocol.messages.metadata_records import PartitionRecord, TopicRecord
from tidelog.replication.controller.image import MetadataImage
from tidelog.replication.controller.returning import elect_returning_broker

TOPIC_ID = b"t" * 16


def image_with(**partition):
    fields: dict[str, Any] = {"partition_id": 0, "topic_id": TOPIC_ID, "replicas": [1, 2], "isr": [1, 2], "leader": 1}
    records = [
        *broker_records(1),
        *broker_records(2),
        TopicRecord(name="t", topic_id=TOPIC_ID),
        PartitionRecord(**(fields | {"leader_epoch": 5, "partition_epoch": 9} | partition)),
    ]
    return replay(MetadataImage(), records)


def after_return(image, node_id, *, new_epochs=False):
    changed = replay(image, elect_returning_broker(image, node_id, new_epochs=new_epochs))
    return changed.topics_by_name["t"].partitions[0]


def test_a_broker_that_led_and_lost_nothing_just_leads_on():
    image = image_with()
    assert elect_returning_broker(image, 1, new_epochs=False) == []


def test_a_broker_that_may_have_lost_its_tail_leads_in_a_new_epoch():
    partition = after_return(image_with(), 1, new_epochs=True)
    assert (partition.leader, partition.leader_epoch, partition.partition_epoch) == (1, 6, 10)
    assert partition.isr == (1, 2)


def test_the_leader_of_others_is_left_alone():
    assert elect_returning_broker(image_with(leader=2), 1, new_epochs=True) == []


def test_an_in_sync_replica_takes_a_leaderless_partition():
    partition = after_return(image_with(leader=-1, isr=[2]), 2)
    assert (partition.leader, partition.leader_epoch, partition.isr) == (2, 6, (2,))


def test_a_replica_out_of_sync_does_not():
    assert elect_returning_broker(image_with(leader=-1, isr=[2]), 1, new_epochs=True) == []


def test_an_eligible_replica_of_a_former_kafka_node_leads_again():
    image = image_with(
        replicas=[1], leader=-1, isr=[], eligible_leader_replicas=[1], last_known_elr=[1], leader_recovery_state=1
    )
    partition = after_return(image, 1)
    assert (partition.leader, partition.isr, partition.elr, partition.last_known_elr) == (1, (1,), (), ())
    assert partition.leader_recovery_state == 0


@pytest.mark.parametrize(("last_known", "elected"), [([1], True), ([2], False), ([1, 2], False), ([], False)])
def test_the_last_known_leader_takes_what_nobody_else_could(last_known, elected):
    image = image_with(leader=-1, isr=[], last_known_elr=last_known)
    assert (after_return(image, 1).leader == 1) is elected
