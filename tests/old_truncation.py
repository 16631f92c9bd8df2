"""What followers did before KIP-101, planted in those of today to show what it costs."""

from __future__ import annotations

from typing import Any

from tidelog.protocol.hot_replication import RequestTemplate
from tidelog.replication.fetcher import ReplicaFetchers


def truncate_by_high_watermark(patch: Any) -> None:
    """A follower cuts its log at its own high watermark, and says nothing of epochs when it fetches."""
    follow = ReplicaFetchers.follow
    one: Any = RequestTemplate.one
    many: Any = RequestTemplate.many

    def old_follow(fetchers: ReplicaFetchers, partition: Any) -> None:
        if not fetchers._closed and partition.leader_id not in (-1, fetchers.node_id) and not partition.offline:
            fetchers.unfollow(partition)
            partition.log.truncate_to(partition.log.high_watermark)
        follow(fetchers, partition)

    def old_one(template: Any, *values: Any) -> Any:
        return one(template, *values[:-2], -1, values[-1])

    def old_many(template: Any, session_id: int, session_epoch: int, asked: Any, forgotten: Any, **wait: Any) -> Any:
        without_epochs = [(*each[:-2], -1, each[-1]) for each in asked]
        return many(template, session_id, session_epoch, without_epochs, forgotten, **wait)

    patch.setattr(ReplicaFetchers, "follow", old_follow)
    patch.setattr(RequestTemplate, "one", old_one)
    patch.setattr(RequestTemplate, "many", old_many)
