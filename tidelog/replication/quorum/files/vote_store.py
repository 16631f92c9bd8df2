"""The `quorum-state` file: which epoch this voter has seen, whom it follows and for whom it voted, in Kafka's JSON.

The format is `QuorumStateData` of Kafka's raft module, version 0 while kraft.version is 0 (static voters), version 1
from then on. Written beside and renamed, so that a reader sees the old state or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidelog.protocol.uuids import ZERO_UUID, uuid_from_text, uuid_to_text
from tidelog.replication.quorum.raft.messages import ElectionState
from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterHistory
from tidelog.storage.files.disk import Disk

FILE_NAME = "quorum-state"


class InconsistentVoters(Exception):
    """The configured voters are not those that the vote file was written with."""


class CorruptQuorumState(Exception):
    """The file is there but does not say what it must."""


@dataclass(frozen=True, slots=True)
class QuorumState:
    """-1 stands for nobody."""

    leader_id: int = -1
    leader_epoch: int = 0
    voted_id: int = -1
    voted_directory_id: bytes = ZERO_UUID
    voter_ids: Sequence[int] = ()
    data_version: int = 0


def encode_quorum_state(state: QuorumState) -> bytes:
    fields: dict[str, Any]
    if state.data_version == 0:
        fields = {
            "clusterId": "",
            "leaderId": state.leader_id,
            "leaderEpoch": state.leader_epoch,
            "votedId": state.voted_id,
            "appliedOffset": 0,
            "currentVoters": [{"voterId": voter} for voter in state.voter_ids],
        }
    else:
        fields = {
            "leaderId": state.leader_id,
            "leaderEpoch": state.leader_epoch,
            "votedId": state.voted_id,
            "votedDirectoryId": uuid_to_text(state.voted_directory_id),
        }
    fields["data_version"] = state.data_version
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_quorum_state(content: bytes) -> QuorumState:
    """Raises `CorruptQuorumState`."""
    try:
        fields = json.loads(content)
        version = fields["data_version"]
        if version not in (0, 1):
            raise CorruptQuorumState(f"quorum-state of unknown version {version}")
        return QuorumState(
            leader_id=int(fields["leaderId"]),
            leader_epoch=int(fields["leaderEpoch"]),
            voted_id=int(fields["votedId"]),
            voted_directory_id=uuid_from_text(fields["votedDirectoryId"]) if version else ZERO_UUID,
            voter_ids=() if version else tuple(int(voter["voterId"]) for voter in fields.get("currentVoters") or ()),
            data_version=version,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptQuorumState(f"quorum-state cannot be read: {error}") from None


def election_in(state: QuorumState | None, voters: VoterHistory, can_vote: bool) -> ElectionState:
    """What the file says of the last election. Raises `InconsistentVoters`."""
    if state is None:
        return ElectionState()
    if state.voter_ids and voters.kraft_version == 0 and can_vote:
        expected = voters.static.ids
        if sorted(state.voter_ids) != expected:
            raise InconsistentVoters(
                f"controller.quorum.voters names {expected}, this directory's {FILE_NAME} {sorted(state.voter_ids)}: "
                "configure the same voters as before; `tidelog format` makes a quorum whose voters can change"
            )
    voted = ReplicaKey(state.voted_id, state.voted_directory_id) if state.voted_id >= 0 else None
    return ElectionState(state.leader_epoch, state.leader_id, voted)


def state_of(election: ElectionState, voters: VoterHistory) -> QuorumState:
    """What the file is to say of it."""
    is_dynamic = voters.kraft_version > 0
    voted = election.voted or ReplicaKey(-1)
    return QuorumState(
        leader_id=election.leader_id,
        leader_epoch=election.epoch,
        voted_id=voted.id,
        voted_directory_id=voted.directory_id,
        voter_ids=() if is_dynamic else voters.static.ids,
        data_version=1 if is_dynamic else 0,
    )


class VoteStore:
    """`quorum-state` in the metadata log's directory."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{FILE_NAME}"

    def read(self) -> QuorumState | None:
        """None before the first election. Raises `CorruptQuorumState`."""
        if not self._disk.exists(self._path):
            return None
        try:
            return decode_quorum_state(self._disk.read_file(self._path))
        except CorruptQuorumState as error:
            raise CorruptQuorumState(
                f"{self._path}: {error}. It says for whom this voter voted: restore it from a copy; or remove it while "
                "the other voters have a leader, so that no vote is given twice"
            ) from None

    def write(self, state: QuorumState, *, sync: bool) -> None:
        """`sync`: on the device before it returns, which a vote must be."""
        temporary = f"{self._path}.tmp"
        self._disk.write_file(temporary, encode_quorum_state(state), sync=sync)
        self._disk.rename(temporary, self._path)
        if sync:
            self._disk.sync_directory(self._path.rpartition("/")[0])
