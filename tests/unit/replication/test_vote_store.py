from __future__ import annotations

import pytest

from tidelog.protocol.batches.crc import crc32c
from tidelog.replication.quorum.files.vote_store import (
    CorruptQuorumState,
    QuorumState,
    VoteStore,
    decode_quorum_state,
    encode_quorum_state,
)
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
