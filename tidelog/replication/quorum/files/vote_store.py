"""The `quorum-state` file: this voter's epoch, leader and vote, in Kafka's JSON.

The format is `QuorumStateData` of Kafka's raft module: version 0 at kraft.version 0 (static voters), version 1 above.
A checksum is added, because a wrong vote or epoch that can be read would let this voter vote twice.
The file is written under another name and renamed, so that a reader sees the old state or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tidelog.protocol.batches.crc import crc32c
from tidelog.protocol.uuids import ZERO_UUID, uuid_from_text, uuid_to_text
from tidelog.replication.quorum.raft.messages import ElectionState
from tidelog.replication.quorum.raft.voters import ReplicaKey, VoterHistory
from tidelog.storage.files.disk import Disk

FILE_NAME = "quorum-state"
_CHECKSUM = "checksum"
"""CRC-32C of the file without this last field, which Kafka ignores."""


class InconsistentVoters(Exception):
    """The configured voters differ from those in the vote file."""


class CorruptQuorumState(Exception):
    """The file exists, but its content is invalid."""


@dataclass(frozen=True, slots=True)
class QuorumState:
    """An id of -1 means none."""

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
    fields[_CHECKSUM] = f"{crc32c(_encode(fields)):08x}"
    return _encode(fields)


def _encode(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def decode_quorum_state(content: bytes) -> QuorumState:
    """Raises `CorruptQuorumState`, also for a wrong checksum. A file of Kafka's has none."""
    try:
        fields = json.loads(content)
        checksum = fields.pop(_CHECKSUM, None)
        if checksum is not None and checksum != f"{crc32c(_encode(fields)):08x}":
            raise CorruptQuorumState("the checksum of quorum-state is wrong")
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
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptQuorumState(f"quorum-state cannot be read: {error}") from None


def election_in(state: QuorumState | None, voters: VoterHistory, can_vote: bool) -> ElectionState:
    """The last election in the file. Raises `InconsistentVoters`."""
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
    """The content of the file for this election."""
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
                f"{self._path}: {error}. It says for whom this voter voted: it does not vote until it is safe"
            ) from None

    def write(self, state: QuorumState, *, sync: bool) -> None:
        """`sync`: the file is on the device before the call returns, as a vote must be."""
        temporary = f"{self._path}.tmp"
        self._disk.write_file(temporary, encode_quorum_state(state), sync=sync)
        self._disk.rename(temporary, self._path)
        if sync:
            self._disk.sync_directory(self._path.rpartition("/")[0])
