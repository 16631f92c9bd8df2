"""InitProducerId, key 22, versions 0-5: an identity for an idempotent or transactional producer.

Version 2 is flexible, 3 lets a producer name the identity it had, 4 may answer PRODUCER_FENCED, 5
belongs to KIP-890. Version 6 (two-phase commit, KIP-939) is unstable in Kafka 4.3 and not declared.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, int16, int32, int64, string


class InitProducerIdRequest(Message, key=22, versions="0-5", flexible="2+"):
    transactional_id: str | None = string(nullable="0+")
    transaction_timeout_ms: int = int32()
    producer_id: int = int64("3+", default=-1)
    producer_epoch: int = int16("3+", default=-1)


class InitProducerIdResponse(Message, key=22, versions="0-5", flexible="2+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id: int = int64(default=-1)
    producer_epoch: int = int16()
