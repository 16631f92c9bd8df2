"""ListConfigResources, key 74, versions 0-1: the resources that can have configs (KIP-714,
KIP-1142).

Version 0 knows metrics subscriptions only; version 1 asks by type, and for every type with an empty
list.
"""

from __future__ import annotations

from tidelog.protocol.codec.schema import Message, array, int8, int16, int32, string


class ListConfigResourcesRequest(Message, key=74, versions="0-1", flexible="0+"):
    resource_types: list[int] = array(int8, "1+")


class ConfigResource(Message):
    resource_name: str = string()
    resource_type: int = int8("1+", default=16, ignorable=True)


class ListConfigResourcesResponse(Message, key=74, versions="0-1", flexible="0+"):
    throttle_time_ms: int = int32()
    error_code: int = int16()
    config_resources: list[ConfigResource] = array(ConfigResource)
