"""The bytes between members: exactly Java's, and tolerant of what other versions wrote."""

from __future__ import annotations

import pytest

from tidelog.client.assignment.protocol import (
    MemberSubscription,
    decode_assignment,
    decode_sticky_user_data,
    decode_subscription,
    encode_assignment,
    encode_sticky_user_data,
    encode_subscription,
)
from tidelog.client.model import TopicPartition
from tidelog.protocol.errors import MalformedMessage

T0P1 = TopicPartition("t0", 1)
OWNED = b"\0\0\0\1\0\2t0\0\0\0\1\0\0\0\1"


def test_a_subscription_is_version_3_of_the_consumer_protocol():
    subscription = MemberSubscription(("t0",), (T0P1,), 5, "r", b"u")
    expected = b"\0\3" + b"\0\0\0\1\0\2t0" + b"\0\0\0\1u" + OWNED + b"\0\0\0\5" + b"\0\1r"
    assert encode_subscription(subscription) == expected
    assert decode_subscription(expected) == subscription


def test_old_and_newer_subscriptions_are_read():
    assert decode_subscription(b"\0\0" + b"\0\0\0\1\0\2t0" + b"\xff\xff\xff\xff") == MemberSubscription(("t0",))
    newer = encode_subscription(MemberSubscription(("t0",), (T0P1,), 5))
    assert decode_subscription(b"\0\7" + newer[2:] + b"more") == MemberSubscription(("t0",), (T0P1,), 5)


def test_an_assignment_is_topics_partitions_and_no_user_data():
    expected = b"\0\3" + OWNED + b"\xff\xff\xff\xff"
    assert encode_assignment([T0P1]) == expected
    assert decode_assignment(expected) == (T0P1,)
    assert decode_assignment(b"") == ()


def test_the_sticky_user_data_is_java_stickys_version_1():
    assert encode_sticky_user_data([T0P1], 7) == OWNED + b"\0\0\0\7"
    assert decode_sticky_user_data(OWNED + b"\0\0\0\7") == ((T0P1,), 7)
    assert decode_sticky_user_data(OWNED) == ((T0P1,), -1)


@pytest.mark.parametrize("data", [None, b"", b"\0", b"\x7f\xff\xff\xff", OWNED[:-1]])
def test_sticky_user_data_that_cannot_be_read_is_nothing_owned(data):
    assert decode_sticky_user_data(data) == ((), -1)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\3", b"\0\3\x7f\xff\xff\xff", b"\xff\xff\0\0\0\0"])
def test_other_bytes_are_no_subscription(data):
    with pytest.raises(MalformedMessage):
        decode_subscription(data)
