"""Runs a transcript of group members against a coordinator, ours or Kafka's, and writes down what was answered.

A line `> join A session=6000` is a request of member A, `> wait 500` lets milliseconds pass; the rest of a transcript
is recorded: `<` an answer, `=` a record written. Member ids become the names of the members. What a request leaves
out is what a well-behaved client would send: the id and generation it was last told.
"""

from __future__ import annotations

import re
import shlex
import socket
import struct
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, Protocol

from tests.patience import PATIENCE_S
from tests.unit.broker.coordinators.fakes import World, context
from tidelog.broker.apis.groups import (
    delete_groups,
    describe_groups,
    heartbeat,
    join_group,
    leave_group,
    offset_commit,
    offset_delete,
    offset_fetch,
    sync_group,
)
from tidelog.broker.coordinators.group.config import GroupCoordinatorConfig
from tidelog.broker.coordinators.group.records import GroupMetadata, OffsetCommit, decode
from tidelog.broker.network.request import Deferred
from tidelog.protocol.api import request_header_version, response_header_version
from tidelog.protocol.batches.records import iter_records
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.protocol.messages.delete_groups import DeleteGroupsRequest, DeleteGroupsResponse
from tidelog.protocol.messages.describe_groups import DescribeGroupsRequest, DescribeGroupsResponse
from tidelog.protocol.messages.headers import RequestHeader, ResponseHeader
from tidelog.protocol.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from tidelog.protocol.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol, JoinGroupResponse
from tidelog.protocol.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse, MemberIdentity
from tidelog.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
)
from tidelog.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
    OffsetDeleteResponse,
)
from tidelog.protocol.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchRequestTopic,
    OffsetFetchRequestTopics,
    OffsetFetchResponse,
)
from tidelog.protocol.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment, SyncGroupResponse

# What both coordinators are configured with, so that a transcript takes seconds against a real one.
INITIAL_DELAY_MS = 400
MIN_SESSION_MS = 1000
# For a broker of its own, whose answers take their time on a busy machine.
SLOWER = 3
TOPIC = "t"
NO_TOPIC_ID = bytes(16)
UNKNOWN_TOPIC_ID = b"unknown-topic-id"
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

APIS: dict[str, tuple[Any, Any, int]] = {
    "join": (join_group, JoinGroupResponse, 9),
    "sync": (sync_group, SyncGroupResponse, 5),
    "beat": (heartbeat, HeartbeatResponse, 4),
    "leave": (leave_group, LeaveGroupResponse, 5),
    "commit": (offset_commit, OffsetCommitResponse, 9),
    "fetch": (offset_fetch, OffsetFetchResponse, 9),
    "describe": (describe_groups, DescribeGroupsResponse, 6),
    "delete": (delete_groups, DeleteGroupsResponse, 2),
    "forget": (offset_delete, OffsetDeleteResponse, 0),
}


class Target(Protocol):
    topic_id: bytes

    def send(self, member: str, kind: str, request: Any, version: int) -> None: ...

    def wait(self, ms: int) -> None: ...

    def answers(self) -> list[tuple[str, str, Any]]:
        """(member, kind, response) of everything that was answered since the last call."""

    def events(self) -> list[str]:
        """What the coordinator wrote and said since the last call, where it can be seen."""

    def command(self, words: list[str]) -> None:
        """Something only a coordinator in the test's own hands can do."""


class InProcess:
    """Our coordinator behind our handlers, in virtual time."""

    topic_id = b"topic-id-of-t..."

    def __init__(self) -> None:
        self.world = World(
            GroupCoordinatorConfig(
                group_initial_rebalance_delay_ms=INITIAL_DELAY_MS, group_min_session_timeout_ms=MIN_SESSION_MS
            )
        )
        self._answers: list[tuple[str, str, Any]] = []
        self._read_offset = 0
        topic = SimpleNamespace(name=TOPIC, topic_id=self.topic_id, partitions={0: None, 1: None})
        self._image = SimpleNamespace(topics_by_name={TOPIC: topic}, topics_by_id={self.topic_id: topic})

    def send(self, member: str, kind: str, request: Any, version: int) -> None:
        module, response_class, _ = APIS[kind]
        asked = context(module.REQUEST.API_KEY, version, member.lower())
        services: Any = SimpleNamespace(image=lambda: self._image, groups=self.world.service)

        def answered(response: Any) -> None:
            if isinstance(response, KafkaError):
                response = module.refuse(request, response, version)
            self._answers.append((member, kind, response_class.decode(response.encode(version), version)))

        try:
            result = module.handle(services, asked, module.REQUEST.decode(request.encode(version), version))
        except KafkaError as error:
            result = error
        if isinstance(result, Deferred):
            result.on_complete(answered)
        else:
            answered(result)

    def wait(self, ms: int) -> None:
        self.world.advance(ms)

    def answers(self) -> list[tuple[str, str, Any]]:
        found, self._answers = self._answers, []
        return found

    def events(self) -> list[str]:
        lines = []
        for batch in self.world.ports.logs.get(0, []):
            for record in iter_records(batch):
                if record.offset >= self._read_offset and record.key is not None:
                    self._read_offset = record.offset + 1
                    lines.append("= " + show_record(decode(record.key, record.value)))
        return lines

    def command(self, words: list[str]) -> None:
        if words == ["restart"]:
            self._answers.clear()
            self.world.restart()
        elif words[0] == "appends":
            self.world.ports.refuse_appends = None if words[1] == "work" else KafkaError(ErrorCode[words[1]])
        elif words[0] == "commits":
            self.world.ports.commits_at_once = words[1] == "at-once"
        elif words == ["commit-all"]:
            self.world.ports.commit(0)
        else:
            raise ValueError(f"no such command: {words}")


class Remote:
    """A broker on loopback, one connection a member; every time of the transcript is `SLOWER` times as long."""

    def __init__(self, port: int, topic_id: bytes, settle_s: float) -> None:
        self.topic_id = topic_id
        self._port = port
        self._settle_s = settle_s
        self._connections: dict[str, socket.socket] = {}
        self._sent: dict[str, list[tuple[str, int]]] = {}
        self._buffers: dict[str, bytearray] = {}

    def send(self, member: str, kind: str, request: Any, version: int) -> None:
        if member not in self._connections:
            self._connections[member] = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
            self._buffers[member] = bytearray()
        if isinstance(request, JoinGroupRequest):
            request.session_timeout_ms *= SLOWER
            request.rebalance_timeout_ms *= SLOWER if version else 1
        key = request.API_KEY
        header_version = request_header_version(key, version)
        header = RequestHeader(
            request_api_key=key, request_api_version=version, correlation_id=0, client_id=member.lower()
        )
        frame = header.encode(header_version) + request.encode(version)
        self._connections[member].sendall(struct.pack(">i", len(frame)) + frame)
        self._sent.setdefault(member, []).append((kind, version))

    def wait(self, ms: int) -> None:
        time.sleep(SLOWER * ms / 1000)

    def answers(self) -> list[tuple[str, str, Any]]:
        time.sleep(self._settle_s)
        found = []
        for member, connection in self._connections.items():
            buffer = self._buffers[member]
            connection.setblocking(False)
            try:
                while data := connection.recv(65536):
                    buffer += data
            except BlockingIOError:
                pass
            connection.setblocking(True)
            while len(buffer) >= 4 and len(buffer) >= 4 + (size := struct.unpack_from(">i", buffer)[0]):
                frame = bytes(buffer[4 : 4 + size])
                del buffer[: 4 + size]
                kind, version = self._sent[member].pop(0)
                module, response_class, _ = APIS[kind]
                header_version = response_header_version(module.REQUEST.API_KEY, version)
                _, position = ResponseHeader.read(frame, 0, header_version)
                found.append((member, kind, response_class.decode(frame[position:], version)))
        return found

    def events(self) -> list[str]:
        return []

    def command(self, words: list[str]) -> None:
        raise ValueError(f"Kafka cannot be told to {words}")

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class Transcript:
    """One run. `group` is the group's id on the wire; the transcript says g."""

    def __init__(self, target: Target, group: str = "g") -> None:
        self._target = target
        self._group = group
        self._ids: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._generations: dict[str, int] = {}

    def run(self, script: Iterable[str]) -> list[str]:
        """The script's own lines with everything recorded between them."""
        lines: list[str] = []
        for line in script:
            if line.startswith(("<", "=")):
                continue
            lines.append(line)
            if line.startswith(">"):
                self._step(shlex.split(line[1:]))
                lines += self._outcome()
        return lines

    def _step(self, words: list[str]) -> None:
        kind, *rest = words
        if kind == "wait":
            self._target.wait(int(rest[0]))
        elif kind not in APIS:
            self._target.command(words)
        else:
            member = rest[0]
            options = dict(word.split("=", 1) for word in rest[1:])
            version = int(options.pop("v", APIS[kind][2]))
            request = getattr(self, f"_{kind}")(member, options, version)
            assert not options, f"not understood: {options}"
            self._target.send(member, kind, request, version)

    def _outcome(self) -> list[str]:
        lines = []
        for member, kind, response in self._target.answers():
            self._learn(member, response)
            text = f"{member} {kind} {show(response)}"
            lines.append(text)
        events = self._target.events()
        return [self._with_names(line) for line in sorted("< " + line.rstrip() for line in lines) + events]

    def _learn(self, member: str, response: Any) -> None:
        if isinstance(response, JoinGroupResponse):
            if response.error_code == ErrorCode.FENCED_INSTANCE_ID:
                self._names.setdefault(response.member_id, member)  # it never learned what it was called
            if response.error_code in (ErrorCode.NONE, ErrorCode.MEMBER_ID_REQUIRED):
                self._names.setdefault(response.member_id, member)
                self._ids[member] = response.member_id
            if response.error_code == ErrorCode.NONE:
                self._generations[member] = response.generation_id

    def _with_names(self, text: str) -> str:
        for member_id, name in self._names.items():
            text = text.replace(member_id, name)
        text = _UUID.sub("UUID", text)  # of a member that has not been told its id yet
        return text.replace(self._group, "g") if self._group != "g" else text

    def _id(self, member: str, options: dict[str, str]) -> str:
        named = options.pop("id", member)
        return "" if named == "none" else self._ids.get(named, "" if named == member else named)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _join(self, member: str, options: dict[str, str], version: int) -> JoinGroupRequest:
        protocols = [each.split(":") for each in options.pop("protocols", "range:meta").split(",") if each]
        return JoinGroupRequest(
            group_id=self._group,
            member_id=self._id(member, options),
            group_instance_id=options.pop("instance", None),
            protocol_type=options.pop("type", "consumer"),
            session_timeout_ms=int(options.pop("session", 10_000)),
            rebalance_timeout_ms=int(options.pop("rebalance", 10_000)) if version else -1,
            protocols=[JoinGroupRequestProtocol(name=name, metadata=data.encode()) for name, data in protocols],
        )

    def _sync(self, member: str, options: dict[str, str], version: int) -> SyncGroupRequest:
        assign = [each.split(":") for each in options.pop("assign", "").split(",") if each]
        request = SyncGroupRequest(
            group_id=self._group,
            member_id=self._id(member, options),
            generation_id=int(options.pop("gen", self._generations.get(member, -1))),
            group_instance_id=options.pop("instance", None),
            assignments=[
                SyncGroupRequestAssignment(member_id=self._ids.get(name, name), assignment=data.encode())
                for name, data in assign
            ],
        )
        if version >= 5:
            request.protocol_type = options.pop("type", "consumer")
            request.protocol_name = options.pop("name", "range")
        return request

    def _beat(self, member: str, options: dict[str, str], version: int) -> HeartbeatRequest:
        return HeartbeatRequest(
            group_id=self._group,
            member_id=self._id(member, options),
            generation_id=int(options.pop("gen", self._generations.get(member, -1))),
            group_instance_id=options.pop("instance", None),
        )

    def _leave(self, member: str, options: dict[str, str], version: int) -> LeaveGroupRequest:
        if version < 3:
            return LeaveGroupRequest(group_id=self._group, member_id=self._id(member, options))
        names = [name for name in options.pop("members", member).split(",") if name]
        identities = [MemberIdentity(member_id=self._ids.get(name, name)) for name in names]
        instances = filter(None, options.pop("instances", "").split(","))
        identities += [MemberIdentity(group_instance_id=instance) for instance in instances]
        return LeaveGroupRequest(group_id=self._group, members=identities)

    def _commit(self, member: str, options: dict[str, str], version: int) -> OffsetCommitRequest:
        topics: dict[str, OffsetCommitRequestTopic] = {}
        for each in options.pop("offsets").split(","):
            place, offset = each.split(":")
            name, index = place.rsplit("-", 1)
            topic_id = self._topic_id(name) if version >= 10 else NO_TOPIC_ID
            topic = topics.setdefault(name, OffsetCommitRequestTopic(name=name, topic_id=topic_id))
            topic.partitions.append(
                OffsetCommitRequestPartition(
                    partition_index=int(index), committed_offset=int(offset), committed_metadata=options.get("meta", "")
                )
            )
        options.pop("meta", None)
        return OffsetCommitRequest(
            group_id=self._group,
            member_id=self._id(member, options),
            generation_id_or_member_epoch=int(options.pop("gen", self._generations.get(member, -1))),
            group_instance_id=options.pop("instance", None),
            topics=list(topics.values()),
        )

    def _fetch(self, member: str, options: dict[str, str], version: int) -> OffsetFetchRequest:
        asked = options.pop("topics")
        stable = bool(options.pop("stable", ""))
        group = options.pop("group", self._group)
        topics: dict[str, list[int]] | None = None
        if asked != "all":
            topics = {}
            for each in asked.split(","):
                name, index = each.rsplit("-", 1)
                topics.setdefault(name, []).append(int(index))
        if version < 8:
            old = None if topics is None else [
                OffsetFetchRequestTopic(name=name, partition_indexes=indexes) for name, indexes in topics.items()
            ]  # fmt: skip
            return OffsetFetchRequest(group_id=group, topics=old, require_stable=stable)
        new = None if topics is None else [
            OffsetFetchRequestTopics(name=name, topic_id=self._topic_id(name), partition_indexes=indexes)
            for name, indexes in topics.items()
        ]  # fmt: skip
        return OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id=group, topics=new)], require_stable=stable)

    def _describe(self, member: str, options: dict[str, str], version: int) -> DescribeGroupsRequest:
        return DescribeGroupsRequest(groups=[self._group])

    def _delete(self, member: str, options: dict[str, str], version: int) -> DeleteGroupsRequest:
        return DeleteGroupsRequest(groups_names=[self._group])

    def _forget(self, member: str, options: dict[str, str], version: int) -> OffsetDeleteRequest:
        indexes = [int(index) for index in options.pop("partitions").split(",")]
        partitions = [OffsetDeleteRequestPartition(partition_index=index) for index in indexes]
        return OffsetDeleteRequest(
            group_id=self._group, topics=[OffsetDeleteRequestTopic(name=TOPIC, partitions=partitions)]
        )

    def _topic_id(self, name: str) -> bytes:
        return self._target.topic_id if name == TOPIC else UNKNOWN_TOPIC_ID


def show(message: Any) -> str:
    """A message in one line: what is not the default, lists sorted as their order means nothing here."""
    parts = []
    error = getattr(message, "error_code", None)
    if error is not None:
        parts.append(ErrorCode.of(error).name)
    for name, field in message.FIELDS:
        value = getattr(message, name)
        if name in ("error_code", "throttle_time_ms", "topic_id", "committed_leader_epoch"):
            continue
        if isinstance(value, list):
            if value:
                parts.append(f"{name}=[{', '.join(sorted(show(each) for each in value))}]")
        elif value not in (None, "", b"") and value != field.default:
            parts.append(f"{name}={value.decode() if isinstance(value, bytes) else value}")
    return " ".join(parts)


def show_record(record: Any) -> str:
    if isinstance(record, OffsetCommit):
        value = record.value
        text = "forgotten" if value is None else f"{value.offset} {value.metadata!r}"
        return f"offset of {record.group_id} in {record.topic}-{record.partition}: {text}"
    assert isinstance(record, GroupMetadata)
    if record.value is None:
        return f"group {record.group_id} is deleted"
    members = ", ".join(f"{each.member_id}:{each.assignment.decode()}" for each in record.value.members)
    return (
        f"group {record.group_id} generation {record.value.generation} protocol {record.value.protocol} "
        f"leader {record.value.leader} members [{members}]"
    )
