"""Stock clients with a transactional id hear at once, and for good, that transactions are not served."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.compatibility.conftest import start
from tests.patience import PATIENCE_S
from tidelog.testing.processes import ServerProcess


@pytest.fixture(scope="module")
def tidelog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with start("tidelog", tmp_path_factory.mktemp("tidelog")) as node:
        yield node


def test_confluent_kafka(tidelog: ServerProcess) -> None:
    confluent = pytest.importorskip("confluent_kafka")
    producer = confluent.Producer(
        {
            "bootstrap.servers": tidelog.bootstrap_servers,
            "transactional.id": "t",
            "log_level": 0,
            "logger": logging.getLogger(),
        }
    )
    with pytest.raises(confluent.KafkaException) as caught:
        producer.init_transactions(PATIENCE_S)
    error = caught.value.args[0]
    assert error.code() == confluent.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert error.fatal()


async def test_aiokafka(tidelog: ServerProcess) -> None:
    aiokafka = pytest.importorskip("aiokafka")
    producer = aiokafka.AIOKafkaProducer(bootstrap_servers=tidelog.bootstrap_servers, transactional_id="t")
    try:
        with pytest.raises(aiokafka.errors.TransactionalIdAuthorizationFailed):
            await producer.start()
    finally:
        await producer.stop()


def test_kafka_python(tidelog: ServerProcess) -> None:
    kafka = pytest.importorskip("kafka")
    producer = kafka.KafkaProducer(
        bootstrap_servers=tidelog.bootstrap_servers, transactional_id="t", max_block_ms=1000 * PATIENCE_S
    )
    try:
        with pytest.raises(kafka.errors.TransactionalIdAuthorizationFailedError):
            producer.init_transactions()
    finally:
        producer.close(timeout=1)
