"""Runs a transcript of members of the consumer protocol (KIP-848): what each sends, and what the coordinator answers.

A line `> A subscribe t` or `> A heartbeat` is a step of member A; what it sends (`!`) and what it is answered (`<`) is
recorded. The members are the client's own state machine. The answers come from Kafka, from the fake of the client's
tests, or from the recording itself.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.patience import PATIENCE_S
from tidelog.client.groups.consumer_member import ConsumerMember, Outcome, TopicSelection
from tidelog.protocol.codec.schema import Message
from tidelog.protocol.messages.consumer_group_heartbeat import (
    Assignment,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    TopicPartitions,
)
from tidelog.protocol.messages.headers import RequestHeader

VERSION = 1
REBALANCE_TIMEOUT_MS = 60_000
Answer = Callable[[ConsumerGroupHeartbeatRequest], ConsumerGroupHeartbeatResponse]


class Remote:
    """A coordinator on a port. Between two requests it gets time to assign."""

    def __init__(self, port: int, settle_s: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        self._settle_s = settle_s

    def __call__(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        time.sleep(self._settle_s)
        header = RequestHeader(request_api_key=68, request_api_version=VERSION, client_id="transcript")
        frame = header.encode(2) + request.encode(VERSION)
        self._socket.sendall(len(frame).to_bytes(4, "big") + frame)
        with self._socket.makefile("rb") as reader:
            size_bytes = int.from_bytes(reader.read(4), "big")
            body = reader.read(size_bytes)
        return ConsumerGroupHeartbeatResponse.decode(body[5:], VERSION)

    def close(self) -> None:
        self._socket.close()


class Replay:
    """The answers that a transcript has recorded, in their order."""

    def __init__(self, lines: Iterable[str], topic_ids: dict[str, bytes]) -> None:
        self._answers = [json.loads(line[2:]) for line in lines if line.startswith("< ")]
        self._topic_ids = topic_ids

    def __call__(self, request: ConsumerGroupHeartbeatRequest) -> ConsumerGroupHeartbeatResponse:
        fields = self._answers.pop(0)
        assignment = fields.pop("assignment", None)
        response = ConsumerGroupHeartbeatResponse(heartbeat_interval_ms=5000, **fields)
        if assignment is not None:
            response.assignment = Assignment(
                topic_partitions=[
                    TopicPartitions(topic_id=self._topic_ids[name], partitions=numbers)
                    for name, numbers in assignment.items()
                ]
            )
        return response


class Transcript:
    """The members of one transcript. `topic_ids`: of the topics that it names."""

    def __init__(self, answer: Answer, group_id: str, topic_ids: dict[str, bytes]) -> None:
        self._answer = answer
        self._group_id = group_id
        self._names = {topic_id: name for name, topic_id in topic_ids.items()}
        self._members: dict[str, ConsumerMember] = {}
        self._now_ms = 0.0

    def run(self, script: Iterable[str]) -> list[str]:
        """The transcript with what was sent and answered this time."""
        out: list[str] = []
        for line in script:
            if line.startswith(("!", "<", "=")):
                continue
            out.append(line)
            if line.startswith("> "):
                name, verb, *words = line[2:].split()
                out += getattr(self, f"_{verb}")(self._member(name), *words)
        return out

    def _member(self, name: str) -> ConsumerMember:
        if name not in self._members:
            self._members[name] = ConsumerMember(
                self._group_id,
                name,
                rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
                backoff_ms=lambda failures: 100.0,
                # `A-i` and `B-i` are two processes of the static member i.
                instance_id=name.partition("-")[2] or None,
                server_assignor="nope" if name == "Stranger" else None,
            )
        return self._members[name]

    # -- steps

    def _subscribe(self, member: ConsumerMember, *names: str) -> list[str]:
        member.subscribe(TopicSelection(names), self._now_ms)
        return self._heartbeat(member)

    def _pattern(self, member: ConsumerMember, regex: str) -> list[str]:
        member.subscribe(TopicSelection(regex=regex), self._now_ms)
        return self._heartbeat(member)

    def _heartbeat(self, member: ConsumerMember) -> list[str]:
        """The next heartbeat, when it is due."""
        wait_ms = member.ms_until_heartbeat(self._now_ms)
        if wait_ms is None:
            return ["= no heartbeat is due"]
        self._now_ms += wait_ms
        request = member.next_heartbeat()
        answer = self._answer(request)
        outcome = member.handle_response(answer, self._now_ms)
        lines = [self._sent(request), self._answered(answer)]
        if outcome is not Outcome.MEMBER:
            lines.append(f"= {outcome.name}")
        return lines

    def _reconcile(self, member: ConsumerMember) -> list[str]:
        """Give up and take what the last assignment says, and acknowledge."""
        if member.target is None:
            return ["= there is nothing to reconcile"]
        given_up, target = member.owned - member.target, member.target
        member.acknowledge(target, target, self._now_ms)
        return [f"= gives up {self._named(given_up)}", *self._heartbeat(member)]

    def _lose_answer(self, member: ConsumerMember) -> list[str]:
        """The heartbeat arrives, its answer does not."""
        request = member.next_heartbeat()
        answer = self._answer(request)
        member.handle_failure(self._now_ms)
        return [self._sent(request), self._answered(answer), "= the answer is lost"]

    def _forget(self, member: ConsumerMember) -> list[str]:
        """The process restarts: the same member id, nothing known."""
        member.fence(self._now_ms)
        return []

    def _leave(self, member: ConsumerMember) -> list[str]:
        request = member.leave()
        assert request is not None
        return [self._sent(request), self._answered(self._answer(request))]

    # -- what is written

    def _sent(self, request: ConsumerGroupHeartbeatRequest) -> str:
        fields = _set_fields(request, ConsumerGroupHeartbeatRequest(), {"group_id"})
        if request.topic_partitions is not None:
            fields["topic_partitions"] = self._by_name(request.topic_partitions)
        fields["member_epoch"] = request.member_epoch
        return f"! {json.dumps(fields, sort_keys=True)}"

    def _answered(self, answer: ConsumerGroupHeartbeatResponse) -> str:
        ignored = {"error_message", "heartbeat_interval_ms", "throttle_time_ms", "member_id"}
        fields = _set_fields(answer, ConsumerGroupHeartbeatResponse(), ignored)
        if answer.assignment is not None:
            fields["assignment"] = self._by_name(answer.assignment.topic_partitions)
        return f"< {json.dumps(fields, sort_keys=True)}"

    def _by_name(self, topics: list[TopicPartitions]) -> dict[str, list[int]]:
        return {self._names[topic.topic_id]: sorted(topic.partitions) for topic in topics}

    def _named(self, partitions: Iterable[tuple[bytes, int]]) -> str:
        return ", ".join(sorted(f"{self._names[topic_id]}-{number}" for topic_id, number in partitions)) or "nothing"


def _set_fields(message: Message, default: Message, ignored: set[str]) -> dict[str, Any]:
    """The fields that differ from their default."""
    values = {name: getattr(message, name) for name, _ in message.FIELDS}
    return {name: value for name, value in values.items() if name not in ignored and value != getattr(default, name)}
