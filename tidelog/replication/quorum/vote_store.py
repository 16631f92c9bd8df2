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
from tidelog.storage.disk import Disk

FILE_NAME = "quorum-state"


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


class VoteStore:
    """`quorum-state` in the metadata log's directory."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = f"{directory}/{FILE_NAME}"

    def read(self) -> QuorumState | None:
        """None before the first election. Raises `CorruptQuorumState`."""
        if not self._disk.exists(self._path):
            return None
        return decode_quorum_state(self._disk.read_file(self._path))

    def write(self, state: QuorumState, *, sync: bool) -> None:
        """`sync`: on the device before it returns, which a vote must be."""
        temporary = f"{self._path}.tmp"
        self._disk.write_file(temporary, encode_quorum_state(state), sync=sync)
        self._disk.rename(temporary, self._path)
        if sync:
            self._disk.sync_directory(self._path.rpartition("/")[0])
