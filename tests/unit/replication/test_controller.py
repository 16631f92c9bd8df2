"""The controller over a quorum of one and a real directory: what survives a restart, what is synced together."""

from __future__ import annotations

import asyncio

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.nodes import Node
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.metadata_records import FeatureLevelRecord
from tidelog.replication.controller.decisions.state import CreatedTopic, NewTopic
from tidelog.replication.controller.metadata.image_records import image_records
from tidelog.replication.controller.metadata.record_codec import encode_record
from tidelog.replication.quorum.files.vote_store import QuorumState, VoteStore
from tidelog.replication.quorum.raft.metadata_retention import MetadataRetention
from tidelog.replication.quorum.raft.snapshot import SnapshotId, snapshot_name
from tidelog.storage.files.disk import OsDisk


@pytest.fixture
async def node(tmp_path):
    node = Node(tmp_path)
    await node.start()
    yield node
    await node.stop()


async def test_a_restart_brings_everything_back_in_a_new_epoch(tmp_path):
    node = Node(tmp_path)
    await node.start()
    await node.create("a", "b")
    await node.controller.delete_topics([node.controller.image.topics_by_name["a"].topic_id])
    await node.controller.allocate_producer_ids(1)
    before = node.controller.image
    await node.stop()

    again = Node(tmp_path)
    after = await again.start()
    assert after.topics_by_name == before.topics_by_name
    assert after.next_producer_id == 1000
    assert after.epoch == before.epoch + 1
    assert after.brokers[1].epoch > before.brokers[1].epoch
    # Whoever is told first is told everything, as one change from nothing.
    _, delta = again.told[0]
    assert {topic.name for topic in delta.created_topics.values()} == {"b"}
    await again.stop()


async def test_after_an_unclean_stop_leaders_start_new_epochs(tmp_path):
    node = Node(tmp_path)
    await node.start()
    await node.create("t")
    await node.stop()
    again = Node(tmp_path)
    image = await again.start(previous_epoch=-1)
    partition = image.topics_by_name["t"].partitions[0]
    assert (partition.leader, partition.isr) == (1, (1,))
    assert partition.leader_epoch > 0
    await again.stop()


async def test_nothing_is_told_or_answered_before_it_is_synced(node):
    node.gate.clear()
    told = len(node.told)
    creating = asyncio.create_task(node.create("t"))
    await asyncio.sleep(0.02)
    assert not creating.done()
    assert len(node.told) == told
    assert "t" not in node.controller.image.topics_by_name
    node.gate.set()
    assert isinstance((await creating)["t"], CreatedTopic)
    assert "t" in node.controller.image.topics_by_name
    assert len(node.told) == told + 1


async def test_commands_that_wait_share_syncs_and_are_told_in_order(node):
    node.gate.clear()
    syncs, told = node.syncs, len(node.told)
    creating = [asyncio.create_task(node.create(f"t{index}")) for index in range(20)]
    await asyncio.sleep(0.02)
    node.gate.set()
    await asyncio.gather(*creating)
    assert node.syncs <= syncs + 2
    offsets = [image.offset for image, _ in node.told[told:]]
    assert offsets == sorted(offsets)
    assert len(node.controller.image.topics_by_name) == 20


async def test_validating_only_writes_nothing(node):
    end = node.raft.end_offset
    outcome = await node.controller.create_topics([NewTopic("t", 1, 1)], validate_only=True)
    assert isinstance(outcome["t"], CreatedTopic)
    assert node.raft.end_offset == end


async def test_a_command_can_time_out_and_still_happen(node):
    node.gate.clear()
    with pytest.raises(KafkaError) as caught:
        await node.controller.create_topics([NewTopic("t", 1, 1)], timeout_ms=10)
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
    node.gate.set()
    await node.create("u")
    assert set(node.controller.image.topics_by_name) == {"t", "u"}


async def test_a_failed_sync_refuses_those_who_wait_and_all_who_come(node):
    node.failure = OSError("no space left on device")
    for _ in range(2):
        with pytest.raises(KafkaError) as caught:
            await node.create("t")
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
    assert "t" not in node.controller.image.topics_by_name


async def test_snapshots_are_taken_and_started_from(tmp_path):
    node = Node(tmp_path, snapshot_bytes_min=2000, retention=MetadataRetention(bytes_max=0))
    await node.start()
    for index in range(60):
        await node.create(f"t{index}")
    before = node.controller.image
    await node.stop()
    found = [path.name for path in (tmp_path / "__cluster_metadata-0").glob("*.checkpoint")]
    assert len(found) == 2

    again = Node(tmp_path)
    await again.start()
    assert len(again.told[0][1].created_topics) > 30  # from the snapshot
    assert again.controller.image.topics_by_name == before.topics_by_name
    await again.stop()


async def test_an_epoch_is_never_used_twice_whatever_is_lost(tmp_path):
    epochs = []
    for loss in (None, "quorum-state", None):
        node = Node(tmp_path)
        await node.start()
        epochs.append(node.raft.epoch)
        await node.stop()
        if loss:
            (tmp_path / "__cluster_metadata-0" / loss).unlink()
    assert epochs == sorted(set(epochs))


async def test_a_vote_file_ahead_of_the_log_counts(tmp_path):
    node = Node(tmp_path)
    store = VoteStore(OsDisk(), str(tmp_path / "__cluster_metadata-0"))
    store.write(QuorumState(leader_id=1, leader_epoch=41, voter_ids=(1,)), sync=True)
    await node.start()
    assert node.raft.epoch == 42
    await node.stop()


async def test_a_newer_metadata_version_stops_the_node_from_following(tmp_path):
    node = Node(tmp_path)
    await node.start()
    node.raft.append([encode_record(FeatureLevelRecord(name="metadata.version", feature_level=31), 31)], 0)
    await node.stop()
    again = Node(tmp_path)
    await again.raft.start()
    async with asyncio.timeout(PATIENCE_S):
        while again.tracker.failure is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "31" in str(again.tracker.failure)
    assert again.told == []
    await again.stop()


async def test_a_snapshot_ahead_of_the_log_is_where_the_log_goes_on(tmp_path):
    node = Node(tmp_path)
    await node.start()
    await node.create("t")
    image = node.controller.image
    identity = SnapshotId(1000, 3)
    node.raft.write_snapshot([encode_record(record, 30) for record in image_records(image)], identity, 5, 5)
    await node.stop()
    assert (tmp_path / "__cluster_metadata-0" / snapshot_name(identity)).exists()
    again = Node(tmp_path)
    after = await again.start()
    assert set(after.topics_by_name) == {"t"}
    assert again.raft.epoch >= 4
    await again.stop()
