"""Four brokers, three controllers, faults without end: nothing acknowledged is lost, doubled or out of order.

Two idempotent producers with acks=all never stop, librdkafka and our own. After every few faults everything is mended,
and every record of every partition is checked against what its producer was told. TIDELOG_FAULTS says how many faults
(`make cluster-test`: 200), TIDELOG_SEED replays the choices.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.cluster.asking import await_equal_replicas, await_healthy, create_topic, end_offset, rotated
from tests.cluster.chaos import Chaos
from tests.cluster.checking import check_partition
from tests.cluster.conftest import NewCluster
from tests.cluster.sending import ConfluentSending, OwnSending, Sending, scan
from tests.doses import dose
from tidelog.bench.metadata import ask
from tidelog.testing.cluster import EmbeddedCluster

pytestmark = pytest.mark.hunt

FAULTS = dose("TIDELOG_FAULTS")
CHECK_EVERY = 20
PARTITIONS, REPLICAS = 4, 3
CONFIGS = {"min.insync.replicas": "2", "unclean.leader.election.enable": "false", "segment.bytes": str(1 << 20)}
RECORDS_PER_SECOND = 400


def check_everything(cluster: EmbeddedCluster, sending: Sending) -> int:
    """Every record of every partition; the records there are."""
    records = 0
    for partition, expected in enumerate(sending.sent):
        found = scan(cluster.bootstrap_servers, sending.topic, partition, end_offset(cluster, sending.topic, partition))
        check_partition(expected, found)
        records += len(found)
    replicas = ask(cluster.nodes[1].port, [sending.topic]).topics[sending.topic]
    for partition, state in replicas.items():
        await_equal_replicas(cluster, sending.topic, partition, state.replicas)
    return records


def test_nothing_acknowledged_is_lost_doubled_or_out_of_order(new_cluster: NewCluster, choice: random.Random) -> None:
    cluster = new_cluster(4, controllers=3, linked=True)
    for topic in ("confluent", "own"):
        create_topic(cluster, topic, rotated(cluster.broker_ids, PARTITIONS, REPLICAS), CONFIGS)
    sendings: list[Sending] = [
        ConfluentSending(
            cluster.bootstrap_servers, "confluent", PARTITIONS, choice, records_per_second=RECORDS_PER_SECOND
        ),
        OwnSending(cluster.bootstrap_servers, "own", PARTITIONS, choice, records_per_second=RECORDS_PER_SECOND),
    ]
    chaos = Chaos(cluster, choice)
    began = time.monotonic()
    slowest_s = 0.0
    try:
        for sending in sendings:
            sending.start()
        time.sleep(1)
        for fault in range(1, FAULTS + 1):
            chaos.strike()
            time.sleep(choice.uniform(0.0, 1.5))
            while chaos.open_faults and choice.random() < (0.55 if chaos.open_faults < 3 else 0.9):
                chaos.mend_some()
                time.sleep(choice.uniform(0.0, 1.0))
            if fault % CHECK_EVERY == 0 or fault == FAULTS:
                chaos.mend_all()
                mended = time.monotonic()
                await_healthy(cluster, [sending.topic for sending in sendings], timeout_s=90)
                slowest_s = max(slowest_s, time.monotonic() - mended)
                for sending in sendings:
                    sending.settle(90)
                for sending in sendings:
                    check_everything(cluster, sending)
                for sending in sendings:
                    sending.go_on()
    except BaseException:
        print("\n".join(chaos.history[-60:]))
        raise
    finally:
        for sending in sendings:
            sending.end()
    records = {sending.topic: sending.records() for sending in sendings}
    assert all(count > 20 * FAULTS for count in records.values()), f"the producers hardly ran: {records}"
    print(
        f"{FAULTS} faults {dict(chaos.struck)} in {time.monotonic() - began:.0f} s, "
        f"{records} records, all acknowledged, each there once; "
        f"whole again {slowest_s:.1f} s after mending at the slowest"
    )
