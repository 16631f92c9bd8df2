from __future__ import annotations

import asyncio
import errno

import pytest

from tests.patience import PATIENCE_S
from tests.unit.replication.quorum.quorum_nodes import RefusingDisk
from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.replication.quorum.files.vote_store import (
    CorruptQuorumState,
    QuorumState,
    VoteStore,
    decode_quorum_state,
    encode_quorum_state,
)
from tidelog.replication.quorum.files.vote_writer import VoteWriter
from tidelog.replication.quorum.raft.messages import ElectionState
from tidelog.replication.quorum.raft.voters import VoterHistory, VoterSet
from tidelog.storage.files.disk import OsDisk

# What Kafka 4.3.1 writes with static voters, and with dynamic ones.
STATIC = (
    b'{"clusterId":"","leaderId":1,"leaderEpoch":2,"votedId":-1,"appliedOffset":0,'
    b'"currentVoters":[{"voterId":1}],"data_version":0}'
)
DYNAMIC = b'{"leaderId":-1,"leaderEpoch":7,"votedId":3,"votedDirectoryId":"AAAAAAAAAAAAAAAAAAAAZQ","data_version":1}'


@pytest.mark.parametrize("content", [STATIC, DYNAMIC])
def test_kafkas_file_is_read_and_written_to_the_byte_with_a_checksum_behind(content):
    written = encode_quorum_state(decode_quorum_state(content))
    assert written == content[:-1] + b',"checksum":"%08x"}' % crc32c(content)
    assert decode_quorum_state(written) == decode_quorum_state(content)


@pytest.mark.parametrize("content", [STATIC, DYNAMIC])
def test_a_file_in_which_any_bit_is_another_says_the_same_or_nothing(content):
    state = decode_quorum_state(content)
    written = encode_quorum_state(state)
    for bit in range(8 * len(written)):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        try:
            assert decode_quorum_state(bytes(damaged)) == state, damaged
        except CorruptQuorumState:
            pass


def test_what_it_says():
    assert decode_quorum_state(STATIC) == QuorumState(leader_id=1, leader_epoch=2, voter_ids=(1,))
    dynamic = decode_quorum_state(DYNAMIC)
    assert (dynamic.leader_epoch, dynamic.voted_id, dynamic.voted_directory_id[-1]) == (7, 3, 0x65)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"data_version":2}', STATIC.replace(b"2", b'"x"'), DYNAMIC.replace(b"Q", b"")],
)
def test_anything_else_is_refused(content):
    with pytest.raises(CorruptQuorumState):
        decode_quorum_state(content)


@pytest.mark.parametrize("sync", [True, False])
def test_the_store_replaces_the_file(tmp_path, sync):
    store = VoteStore(OsDisk(), str(tmp_path))
    assert store.read() is None
    for epoch in (1, 2):
        store.write(QuorumState(leader_id=1, leader_epoch=epoch, voter_ids=(1,)), sync=sync)
    found = store.read()
    assert found is not None
    assert found.leader_epoch == 2
    assert [path.name for path in tmp_path.iterdir()] == ["quorum-state"]


async def test_no_request_waits_for_a_vote_that_is_never_written(tmp_path):
    """A fetch that was parked is answered when the node leaves the quorum, and waits for the vote only then."""
    loop = asyncio.get_running_loop()
    disk = RefusingDisk()
    disk.code = errno.EIO

    def tolerates(error):
        writer.give_up()
        return False

    writer = VoteWriter(
        VoteStore(disk, str(tmp_path)), VoterHistory(VoterSet([])), loop,
        lambda work: loop.run_in_executor(None, work), tolerates,
    )  # fmt: skip
    writer.write(ElectionState())
    for _ in ("before the write fails", "after that"):
        with pytest.raises(KafkaError) as refusal:
            async with asyncio.timeout(PATIENCE_S):
                await writer.written()
        assert refusal.value.code == ErrorCode.BROKER_NOT_AVAILABLE
    await writer.close()
