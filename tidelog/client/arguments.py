"""Checks of the arguments of the clients' calls: what these functions return can be sent. Pure.

Here: one function for each kind of argument, for all three clients, asynchronous and blocking. Not here: options
(`config`), and the values and keys of records (`producing.record_arguments`). Invariant: a wrong type raises a
TypeError and a wrong value a WrongArgument (a ValueError) of one line that names the argument. A topic name that no
request can have is a KafkaError(INVALID_TOPIC_EXCEPTION), as from a broker.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypeVar

from tidelog.client.model import ConsumerGroupMetadata, OffsetAndMetadata, Replica, TopicPartition
from tidelog.protocol.errors import ErrorCode, KafkaError

INT16_MAX = 2**15 - 1
INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
TEXT_BYTES_MAX = 2**15 - 1
"""The longest string of Kafka's protocol."""
_TOPIC_NAME_CHARACTERS_MAX = 249
_SHOWN_CHARACTERS_MAX = 100
Item = TypeVar("Item")


class WrongArgument(ValueError):
    """A value that no request can have. The command line shows it as a wrong use of a command."""


def shown(value: Any) -> str:
    """A value in an error, not longer than a line. A table, for example, is written on several."""
    text = " ".join(repr(value).split("\n"))
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[:_SHOWN_CHARACTERS_MAX]}..."


def check_named_options(client: str, positional: tuple[object, ...]) -> None:
    """Raise TypeError for an argument without a name, such as the dict that confluent-kafka takes."""
    if positional:
        form = f"{client}(bootstrap_servers='127.0.0.1:9092') or {client}(**options)"
        raise TypeError(f"{client} takes named options, as {form}, not {shown(positional[0])}")


# -- single values


def as_int(name: str, value: Any, minimum: int = 0, maximum: int = INT32_MAX) -> int:
    """A whole number, also of numpy."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, not {shown(value)}")
    if not minimum <= number <= maximum:
        raise WrongArgument(f"{name} must be between {minimum} and {maximum}, not {shown(number)}")
    return number


def as_milliseconds(name: str, value: Any) -> float:
    """A time limit, which may be infinite. A negative one is over at once."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)) or value != value:
        raise TypeError(f"{name} must be a number of milliseconds, not {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise WrongArgument(f"{name} is too large: {shown(value)}") from None


def as_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")
    return value


def as_bytes_of(name: str, value: Any, size_bytes: int) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{name} must be bytes, not {shown(value)}")
    if len(value) != size_bytes:
        raise WrongArgument(f"{name} must have {size_bytes} bytes, not {len(value)}")
    return value


def as_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {shown(value)}")
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        raise WrongArgument(f"{name} cannot be written as UTF-8: {shown(value)}") from None
    if size_bytes > TEXT_BYTES_MAX:
        raise WrongArgument(f"{name} must be at most {TEXT_BYTES_MAX} bytes, not {size_bytes}")
    return value


def as_choice(name: str, value: Any, choices: Iterable[Any]) -> Any:
    known = list(choices)
    if value not in known:
        raise WrongArgument(f"{name} must be one of {', '.join(map(str, known))}, not {shown(value)}")
    return value


def as_known_names(name: str, values: Any, known: Iterable[str]) -> list[str]:
    """Some of the known names, given in any letter case."""
    spelling = {each.lower(): each for each in known}
    names = as_texts(name, values)
    for value in names:
        if value.lower() not in spelling:
            near = get_close_matches(value.lower(), spelling, n=1)
            hint = f"did you mean {spelling[near[0]]}?" if near else f"known are {', '.join(spelling.values())}"
            raise WrongArgument(f"{name}: {shown(value)} is unknown; {hint}")
    return [spelling[value.lower()] for value in names]


def as_topic_name(name: str, value: Any) -> str:
    """A topic name with which a request can be sent. Other names that are not legal are for the broker to refuse."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {type(value).__name__}: {shown(value)}")
    if len(value) > _TOPIC_NAME_CHARACTERS_MAX:
        text = f"{value[:30]!r}... has {len(value)} characters, at most {_TOPIC_NAME_CHARACTERS_MAX} are allowed"
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, f"the topic name {text}")
    try:
        value.encode()
    except UnicodeEncodeError:
        text = f"the topic name {value!r} cannot be written as UTF-8"
        raise KafkaError(ErrorCode.INVALID_TOPIC_EXCEPTION, text) from None
    return value


def as_partition(name: str, value: Any) -> TopicPartition:
    """A TopicPartition, or the (topic, number) that it is."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], str):
        raise TypeError(f"{name} must be a TopicPartition, not {shown(value)}")
    topic = as_topic_name(name, value[0])
    try:
        return TopicPartition(topic, as_int("its number", value[1]))
    except TypeError:
        raise TypeError(f"{name} must be a TopicPartition, not {shown(value)}") from None
    except ValueError:
        text = f"there is no partition {shown(value[1])} of {topic!r}: partitions are numbered from 0 on"
        raise WrongArgument(f"{name}: {text}") from None


def as_replica(name: str, value: Any) -> Replica:
    """A Replica, or the (topic, partition, broker id) that it is."""
    if not isinstance(value, tuple) or len(value) != 3:
        raise TypeError(f"{name} must be a Replica, not {shown(value)}")
    partition = as_partition(name, value[:2])
    return Replica(*partition, as_int(f"{name}: the broker id of {partition}", value[2]))


def as_offset(partition: TopicPartition, value: Any) -> OffsetAndMetadata:
    """A position: a number or an OffsetAndMetadata."""
    target = value if isinstance(value, OffsetAndMetadata) else OffsetAndMetadata(value)
    metadata: Any = target.metadata  # None from programs that know Java's client
    try:
        offset, leader_epoch = operator.index(target.offset), operator.index(target.leader_epoch)
    except TypeError:
        raise TypeError(f"{partition}: an offset is a number or an OffsetAndMetadata, not {shown(value)}") from None
    if not 0 <= offset <= INT64_MAX:
        raise WrongArgument(f"{partition}: {shown(offset)} is not an offset, which is between 0 and 2^63 - 1")
    if not -1 <= leader_epoch <= INT32_MAX:
        raise WrongArgument(
            f"{partition}: {shown(leader_epoch)} is not a leader epoch, which is between -1 and 2^31 - 1"
        )
    text = as_text(f"{partition}: the metadata of an offset", "" if metadata is None else metadata)
    return OffsetAndMetadata(offset, text, leader_epoch)


def as_time(name: str, value: Any) -> int:
    """A time in ms since 1970."""
    try:
        return as_int(name, value, 0, INT64_MAX)
    except TypeError:
        raise TypeError(f"{name}: a time is a whole number of milliseconds, not {shown(value)}") from None
    except ValueError:
        raise WrongArgument(f"{name}: {shown(value)} is not a time in ms") from None


def as_config_value(name: str, value: Any) -> str:
    """A value of a configuration key, of its type or as text, as requests have it."""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, (str, Real)):
        raise TypeError(f"{name} must be a str, a number or a bool, not {shown(value)}")
    return as_text(name, str(value))


def as_group_metadata(name: str, value: Any) -> ConsumerGroupMetadata:
    """The metadata of a consumer, of its `group_metadata()` or of a group id."""
    if isinstance(value, str):
        group: Any = ConsumerGroupMetadata(value)
    else:
        group = value.group_metadata() if hasattr(value, "group_metadata") else value
    if not isinstance(group, ConsumerGroupMetadata):
        raise TypeError(f"{name} must be a consumer, its group_metadata() or a group id, not {shown(value)}")
    instance_id = group.group_instance_id
    return ConsumerGroupMetadata(
        as_text("group_id", group.group_id),
        as_int("generation_id", group.generation_id, -1),
        as_text("member_id", group.member_id),
        None if instance_id is None else as_text("group_instance_id", instance_id),
    )


def group_metadata_or_error(group: Any) -> ConsumerGroupMetadata | KafkaError:
    """As `as_group_metadata`; the KafkaError of a consumer that is no member of its group now."""
    try:
        return as_group_metadata("group", group)
    except KafkaError as error:
        return error


# -- several values


def as_list(name: str, value: Iterable[Any] | Any, what: str) -> list[Any]:
    """The items of any iterable but a string, whose letters would count as items. `what` they are is for the error."""
    if not isinstance(value, (str, bytes, bytearray)):
        try:
            items = iter(value)
        except TypeError:
            pass
        else:
            return list(items)
    raise TypeError(f"{name} must be a list of {what}, not {shown(value)}")


def as_list_of(name: str, value: Any, what: str, check: Callable[[str, Any], Item]) -> list[Item]:
    return [check(f"an item of {name}", item) for item in as_list(name, value, what)]


def as_mapping(name: str, value: Any, what: str) -> dict[Any, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict of {what}, not {shown(value)}")
    return dict(value)


def as_texts(name: str, value: Any) -> list[str]:
    return as_list_of(name, value, "strings", as_text)


def as_topic_names(name: str, value: Any) -> list[str]:
    return as_list_of(name, value, "topic names", as_topic_name)


def as_partitions(name: str, value: Any) -> list[TopicPartition]:
    return as_list_of(name, value, "TopicPartitions", as_partition)


def as_broker_ids(name: str, value: Any) -> list[int]:
    return as_list_of(name, value, "broker ids", as_int)


def as_offsets(name: str, value: Any) -> dict[TopicPartition, OffsetAndMetadata]:
    offsets = {}
    for key, offset in as_mapping(name, value, "offsets by TopicPartition").items():
        partition = as_partition(f"a key of {name}", key)
        offsets[partition] = as_offset(partition, offset)
    return offsets


def as_partition_mapping(
    name: str, value: Any, what: str, check: Callable[[str, Any], Item]
) -> dict[TopicPartition, Item]:
    """`check` gets the partition as the name of each value."""
    checked = {}
    for key, item in as_mapping(name, value, f"{what} by TopicPartition").items():
        partition = as_partition(f"a key of {name}", key)
        checked[partition] = check(f"{name}: {partition}", item)
    return checked
