"""The errors of the client in a process pool, which pickles them: it breaks, or waits without an end, if it cannot."""

from __future__ import annotations

import copy

import pytest

import tidelog
from tidelog import KafkaError, OffsetAndMetadata, TopicPartition, WrittenRange
from tidelog.client.consuming.log_truncation import LogTruncation
from tidelog.client.model import BrokerErrors, PartitionErrors
from tidelog.client.producing.send_group import BatchSendError
from tidelog.protocol.batches.record_batch import CorruptRecord
from tidelog.protocol.errors import ErrorCode

T0 = TopicPartition("t", 0)
REFUSED = KafkaError(ErrorCode.INVALID_RECORD, "refused", ((3, "no key"),))
ERRORS: list[KafkaError] = [
    REFUSED,
    BatchSendError(ErrorCode.MESSAGE_TOO_LARGE, "too large", [WrittenRange("t", 0, 7, 2)], 1),
    CorruptRecord("a batch is damaged"),
    LogTruncation(T0, OffsetAndMetadata(9, "", 4), OffsetAndMetadata(5, "", 3)),
    LogTruncation(T0, OffsetAndMetadata(9, "", 4), None),
    PartitionErrors(ErrorCode.REQUEST_TIMED_OUT, "late", {T0: 7}, {TopicPartition("t", 1): REFUSED}),
    BrokerErrors(ErrorCode.REQUEST_TIMED_OUT, "late", [7], {1: REFUSED}),
    tidelog.ProducerFenced(ErrorCode.PRODUCER_FENCED, "fenced"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_they_arrive_as_they_were(error: KafkaError):
    error.add_note("at offset 3 of t-0")
    other = copy.deepcopy(error)  # by what pickle calls
    assert (type(other), str(other), other.args) == (type(error), str(error), error.args)
    assert repr(vars(other)) == repr(vars(error))


def test_each_kind_is_among_them():
    public = [getattr(tidelog, name) for name in tidelog.__all__]
    kinds = {each for each in public if isinstance(each, type) and issubclass(each, KafkaError)}
    assert {kind for kind in kinds if kind.__init__ is not KafkaError.__init__} <= set(map(type, ERRORS))
