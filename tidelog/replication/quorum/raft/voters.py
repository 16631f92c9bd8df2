"""The sets of voters, from the configuration or the log's VotersRecords, and their history in the log. Pure.

A replica key is a node id and a log directory id (KIP-853); the directory id of a static voter is unknown. The last set
in the log applies, committed or not. A truncation restores the set before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from tidelog.protocol.messages.control_records import Endpoint as EndpointRecord
from tidelog.protocol.messages.control_records import KRaftVersionFeature, VotersRecord, VotersRecordVoter
from tidelog.protocol.uuids import ZERO_UUID
from tidelog.replication.ports import Endpoint

KRAFT_VERSION_MIN: Final = 0
KRAFT_VERSION_MAX: Final = 1
CONTROLLER_LISTENER: Final = "CONTROLLER"


class ReplicaKey(NamedTuple):
    """`directory_id` is zero if unknown."""

    id: int
    directory_id: bytes = ZERO_UUID

    def matches(self, other: ReplicaKey) -> bool:
        """Whether both may be the same replica; an unknown directory id matches any."""
        return self.id == other.id and (
            self.directory_id == other.directory_id or ZERO_UUID in (self.directory_id, other.directory_id)
        )


class Voter(NamedTuple):
    """`endpoints`: (listener name, endpoint); other voters use the first one."""

    key: ReplicaKey
    endpoints: tuple[tuple[str, Endpoint], ...] = ()
    version_min: int = KRAFT_VERSION_MIN
    version_max: int = KRAFT_VERSION_MAX

    @property
    def endpoint(self) -> Endpoint | None:
        return self.endpoints[0][1] if self.endpoints else None


class VoterSet:
    """An immutable set, iterated in the order of ids."""

    __slots__ = ("_by_id",)

    def __init__(self, voters: Iterable[Voter] = ()) -> None:
        self._by_id = {voter.key.id: voter for voter in sorted(voters, key=lambda voter: voter.key.id)}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Voter]:
        return iter(self._by_id.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VoterSet) and self._by_id == other._by_id

    def __hash__(self) -> int:
        return hash(tuple(self._by_id.items()))

    def __repr__(self) -> str:
        return f"VoterSet({list(self._by_id)})"

    @property
    def ids(self) -> list[int]:
        return list(self._by_id)

    @property
    def keys(self) -> list[ReplicaKey]:
        return [voter.key for voter in self]

    @property
    def majority(self) -> int:
        return len(self._by_id) // 2 + 1

    def get(self, voter_id: int) -> Voter | None:
        return self._by_id.get(voter_id)

    def includes(self, key: ReplicaKey) -> bool:
        voter = self._by_id.get(key.id)
        return voter is not None and voter.key.matches(key)

    def is_only(self, key: ReplicaKey) -> bool:
        return len(self._by_id) == 1 and self.includes(key)

    def with_voter(self, voter: Voter) -> VoterSet:
        """A set with this voter added, or in the place of the voter with its id."""
        return VoterSet([*(one for one in self if one.key.id != voter.key.id), voter])

    def without(self, key: ReplicaKey) -> VoterSet:
        return VoterSet(one for one in self if not one.key.matches(key))


def static_voters(endpoints: Mapping[int, Endpoint]) -> VoterSet:
    """The voters of controller.quorum.voters."""
    return VoterSet(
        Voter(ReplicaKey(voter_id), ((CONTROLLER_LISTENER, endpoint),)) for voter_id, endpoint in endpoints.items()
    )


def voters_record(voters: VoterSet) -> VotersRecord:
    return VotersRecord(
        version=0,
        voters=[
            VotersRecordVoter(
                voter_id=voter.key.id,
                voter_directory_id=voter.key.directory_id,
                endpoints=[EndpointRecord(name=name, host=at.host, port=at.port) for name, at in voter.endpoints],
                k_raft_version_feature=KRaftVersionFeature(
                    min_supported_version=voter.version_min, max_supported_version=voter.version_max
                ),
            )
            for voter in voters
        ],
    )


def voters_from_record(record: VotersRecord) -> VoterSet:
    return VoterSet(
        Voter(
            ReplicaKey(voter.voter_id, voter.voter_directory_id),
            tuple((at.name, Endpoint(at.host, at.port)) for at in voter.endpoints),
            voter.k_raft_version_feature.min_supported_version,
            voter.k_raft_version_feature.max_supported_version,
        )
        for voter in record.voters
    )


class VoterHistory:
    """The voters and the kraft.version by the offset of their change; before the first change, `static` and 0."""

    def __init__(self, static: VoterSet) -> None:
        self.static = static
        self._voters: list[tuple[int, VoterSet]] = []
        self._versions: list[tuple[int, int]] = []

    @property
    def latest(self) -> VoterSet:
        return self._voters[-1][1] if self._voters else self.static

    @property
    def latest_offset(self) -> int:
        """The offset of the record with the latest voters; -1 without such a record."""
        return self._voters[-1][0] if self._voters else -1

    @property
    def kraft_version(self) -> int:
        return self._versions[-1][1] if self._versions else 0

    def may_run(self, key: ReplicaKey, high_watermark: int) -> bool:
        """Whether the replica may run for the lead: it is a voter, or its removal is not known to be committed.

        A removed replica may be the only one whose log is long enough to be elected. It must then lead to commit its
        own removal (Raft thesis, section 4.2.2).
        """
        return any(voters.includes(key) for voters in self.in_question(high_watermark))

    def in_question(self, high_watermark: int) -> list[VoterSet]:
        """The latest voters, and the ones before them if the latest are not known to be committed.

        A leader writes the voters again when its addresses have changed; such a record is no change of the voters.
        """
        latest = self.latest
        if not self._voters or self.latest_offset < high_watermark:
            return [latest]
        sets = [self.static, *(voters for _, voters in self._voters)]
        return [latest, next((each for each in reversed(sets) if each.keys != latest.keys), latest)]

    def at(self, offset: int) -> tuple[int, VoterSet | None]:
        """(kraft.version, voters from records or None) just before `offset`."""
        version = next((version for at, version in reversed(self._versions) if at < offset), 0)
        return version, next((voters for at, voters in reversed(self._voters) if at < offset), None)

    def add_voters(self, offset: int, voters: VoterSet) -> None:
        assert offset >= self.latest_offset, (offset, self.latest_offset)
        self._voters.append((offset, voters))

    def add_version(self, offset: int, version: int) -> None:
        self._versions.append((offset, version))

    def truncate_to(self, end_offset: int) -> None:
        """Drop the changes at or after `end_offset`."""
        self._voters = [entry for entry in self._voters if entry[0] < end_offset]
        self._versions = [entry for entry in self._versions if entry[0] < end_offset]

    def forget_before(self, start_offset: int) -> None:
        """Drop the changes before `start_offset`, except the last one, which still applies."""
        self._voters = self._voters[_superfluous(self._voters, start_offset) :]
        self._versions = self._versions[_superfluous(self._versions, start_offset) :]

    def clear(self) -> None:
        self._voters.clear()
        self._versions.clear()


def _superfluous(entries: Sequence[tuple[int, object]], start_offset: int) -> int:
    """The number of entries before `start_offset` that a later such entry replaces."""
    return max(0, sum(1 for entry in entries if entry[0] < start_offset) - 1)
