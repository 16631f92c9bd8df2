"""Transactions written straight into the log of a stopped node, for tests of readers alone."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tests.unit.storage.batches import NOW, idempotent, marker
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.log.directory import LogDirectory
from tidelog.storage.segments.log_config import LogConfig

COMMIT, ABORT, OPEN = "commit", "abort", "open"


def write_transactions(
    directory: Path, topic: str, transactions: Iterable[tuple[str, int]], partition: int = 0
) -> None:
    """Append transactions, each as (its end, number of records), to the log of a node that does not run.

    Every transaction has a producer of its own. Its records have the end as their value; a marker follows
    unless it stays open.
    """
    properties = dict(
        line.split("=", 1) for line in (directory / "meta.properties").read_text().splitlines() if "=" in line
    )
    node_id = int(properties.get("node.id") or properties["broker.id"])
    logs = LogDirectory.open(OsDisk(), str(directory), node_id=node_id, cluster_id=properties["cluster.id"])
    log = logs.load(lambda _: LogConfig(), NOW)[topic, partition]
    for producer_id, (end, records) in enumerate(transactions, start=1000):
        data = idempotent(0, records, producer_id=producer_id, value=end.encode(), transactional=True)
        log.append_as_leader(data, 0, NOW, from_client=False)
        if end != OPEN:
            log.append_as_leader(marker(abort=end == ABORT, producer_id=producer_id), 0, NOW, from_client=False)
    log.set_high_watermark(log.log_end_offset)
    logs.close()
