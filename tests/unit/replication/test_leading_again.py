"""A controller that loses the lead and leads again in the same process."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.replication.controller_harness import Broker, Member, Quorum
from tidelog.protocol.errors import ErrorCode, KafkaError


async def test_what_was_not_committed_is_not_published_when_the_node_leads_again() -> None:
    quorum = Quorum()
    member = Member(quorum, 1)
    quorum.lead(member.log)
    await Broker(6).register(member.controller)
    quorum.hold = True
    lost = asyncio.create_task(Broker(7).register(member.controller))
    await asyncio.sleep(0)
    assert quorum.end_offset > quorum.high_watermark
    quorum.lead(None)
    with pytest.raises(KafkaError) as failure:
        await lost
    assert failure.value.code is ErrorCode.NOT_CONTROLLER
    quorum.hold = False
    quorum.lead(member.log)
    await Broker(8).register(member.controller)
    assert list(member.controller.image.brokers) == [6, 8]
    image, delta = member.told[-1]
    assert (list(image.brokers), sorted(delta.changed_brokers)) == ([6, 8], [8])
    await member.controller.close()
