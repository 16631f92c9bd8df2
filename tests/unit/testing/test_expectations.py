"""The assertion helpers of `tidelog.testing`, and the adapter for suites that use testcontainers."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

import tidelog.testing
from tests.patience import join
from tidelog.client.model import NewTopic, TopicPartition
from tidelog.client.sync import Admin, Consumer, Producer
from tidelog.protocol.errors import ErrorCode, KafkaError
from tidelog.testing import EmbeddedBroker, produced, wait_for_lag, wait_for_topic
from tidelog.testing.ports import free_port


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker() as running:
        yield running


@pytest.fixture
def producer(broker: EmbeddedBroker) -> Iterator[Producer]:
    with Producer(bootstrap_servers=broker.bootstrap_servers) as client:
        yield client


def test_records_are_returned_when_there_are_enough(broker: EmbeddedBroker, producer: Producer) -> None:
    producer.send_and_wait("enough", b"0")
    sending = threading.Timer(0.1, lambda: producer.send_and_wait("enough", b"1"))
    sending.start()
    assert [record.value for record in produced(broker, "enough", 2)] == [b"0", b"1"]
    join(sending)
    assert [record.value for record in produced(broker, "enough", matching=lambda record: record.offset == 1)] == [b"1"]


@pytest.mark.slow
def test_too_few_records_are_an_assertion_that_counts_them(broker: EmbeddedBroker, producer: Producer) -> None:
    producer.send_and_wait("few", b"0")
    with pytest.raises(AssertionError, match=r"'few' has 1 records of 2 after 1\.5 s"):
        produced(broker.bootstrap_servers, "few", 2, timeout_s=1.5)
    with pytest.raises(AssertionError, match="'few' has 0 matching records of 1"):
        produced(broker, "few", matching=lambda record: record.offset == 7, timeout_s=1.5)


def test_a_broker_that_does_not_answer_is_an_assertion(
    broker: EmbeddedBroker, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer.send_and_wait("silent", b"0")

    def end_offsets(*_: object) -> None:
        raise KafkaError(ErrorCode.REQUEST_TIMED_OUT, "a leader did not answer")

    monkeypatch.setattr(Consumer, "end_offsets", end_offsets)
    with pytest.raises(AssertionError, match=r"'silent' was not read to its end .* a leader did not answer"):
        produced(broker, "silent", timeout_s=0.2)


def test_no_records_are_what_is_there_now(broker: EmbeddedBroker, producer: Producer) -> None:
    producer.send_and_wait("none", b"0")
    assert len(produced(broker, "none", 0)) == 1


def test_a_topic_that_does_not_exist_is_not_created(broker: EmbeddedBroker) -> None:
    with pytest.raises(AssertionError, match="'missing' does not exist"):
        produced(broker, "missing", 0, timeout_s=0.2)
    with pytest.raises(AssertionError, match="does not know the topic 'missing'"):
        wait_for_topic(broker, "missing", timeout_s=0.2)
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        assert "missing" not in admin.list_topics()


def test_a_group_is_awaited_until_it_has_read_all(broker: EmbeddedBroker, producer: Producer) -> None:
    with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
        admin.create_topics([NewTopic("read", 2)])
    for partition in (0, 0, 1):
        producer.send_and_wait("read", b"x", partition=partition)
    with pytest.raises(AssertionError, match="no offsets"):
        wait_for_lag(broker, "readers", timeout_s=0.2)
    with Consumer(bootstrap_servers=broker.bootstrap_servers, group_id="readers") as consumer:
        consumer.commit({TopicPartition("read", 0): 1})
        with pytest.raises(AssertionError, match="read-0: 1"):
            wait_for_lag(broker, "readers", timeout_s=0.2)
        wait_for_lag(broker, "readers", 1)
        with pytest.raises(AssertionError, match="read-0: 1, read-1: 1"):
            wait_for_lag(broker, "readers", topics=["read"], timeout_s=0.2)
        reading = threading.Timer(0.1, consumer.commit, [{TopicPartition("read", 0): 2}])
        reading.start()
        wait_for_lag(broker, "readers")
        join(reading)
        consumer.commit({TopicPartition("read", 1): 1})
    wait_for_lag(broker, "readers", topics=["read"])


def test_names_of_the_package_are_loaded_on_use() -> None:
    assert sorted(tidelog.testing._HOMES) == sorted(tidelog.testing.__all__)
    for name in tidelog.testing.__all__:
        assert getattr(tidelog.testing, name).__name__ == name
        assert name in dir(tidelog.testing)
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = tidelog.testing.NoSuchName


def test_no_broker_at_all_is_an_assertion() -> None:
    """It was a KafkaError, after nine seconds whatever the limit."""
    nowhere = f"127.0.0.1:{free_port()}"
    for expectation in (produced, wait_for_lag, wait_for_topic):
        with pytest.raises(AssertionError, match=nowhere):
            expectation(nowhere, "t", timeout_s=0.2)


def test_one_topic_may_be_named_without_a_list(broker: EmbeddedBroker, producer: Producer) -> None:
    producer.send_and_wait("orders", b"x")
    with pytest.raises(AssertionError, match="orders-0: 1"):
        wait_for_lag(broker, "nobody", topics="orders", timeout_s=0.1)
