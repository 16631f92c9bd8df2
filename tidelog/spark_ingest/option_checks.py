"""Checks that the options of the source and of the sink share. Pure.

Options are a mapping from names in lower case to text, as `lower_names` makes it. Each check raises a
ConfigError of one line that names the option.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, TypeVar

from tidelog.client.arguments import shown
from tidelog.client.config import ClientConfig
from tidelog.protocol.errors import ConfigError

Config = TypeVar("Config", bound=ClientConfig)

_NAME: Final = re.compile(r"(?<!['\w])[a-z_]+(?!['\w])")
_SECURITY: Final = ("kafka.sasl.", "kafka.ssl.")


def check_given(options: Mapping[str, str]) -> None:
    """Refuse a read or a write without any option, as a table gives it."""
    if not options:
        raise ConfigError(
            "no option is given. A table has none: Spark hands the options of a table to no source in Python. Read "
            "with a temporary view (CREATE TEMPORARY VIEW ... USING tidelog OPTIONS ...), and write with save(), not "
            "saveAsTable()"
        )


def lower_names(raw_options: Mapping[str, str]) -> dict[str, str]:
    """The options by their names in lower case. Spark matches names without regard to case."""
    return {key.lower(): str(value).strip() for key, value in raw_options.items()}


def check_name(
    key: str, spelling: Mapping[str, str], kafka_names: Collection[str], forbidden: Mapping[str, str], owner: str
) -> None:
    """Refuse a name that is forbidden or unknown.

    `spelling` gives the usual spelling of the names that `owner`, the source or the sink, has beside
    `kafka_names`. `forbidden` gives the reason for each forbidden name.
    """
    if key in forbidden:
        raise ConfigError(f"option {key!r} is not allowed: {forbidden[key]}")
    if key.startswith(_SECURITY):
        raise ConfigError(f"option {shown(key)} is not supported: the client speaks PLAINTEXT only")
    if key in spelling or key in kafka_names:
        return
    close_matches = get_close_matches(key, (*spelling, *kafka_names), n=1)
    hint = f"; did you mean {spelling.get(close_matches[0], close_matches[0])}?" if close_matches else ""
    raise ConfigError(f"the tidelog {owner} has no option {shown(key)}{hint}")


def flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    """An option that is true or false."""
    text = options.get(name.lower(), str(default)).lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{name} must be true or false, not {shown(text)}")
    return text == "true"


def is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 20


def whole_number(options: Mapping[str, str], name: str, default: int, *, bits: int = 31, least: int = 0) -> int:
    """An option that is a number from `least`, not below 0, to below 2^`bits`."""
    text = options.get(name.lower())
    if text is None:
        return default
    if not is_digits(text) or not least <= int(text) < 2**bits:
        raise ConfigError(f"{name} must be a whole number, at least {least} and below 2^{bits}, not {shown(text)}")
    return int(text)


def positive_number(options: Mapping[str, str], name: str, default: int, *, bits: int = 31) -> int:
    """An option that is a number from 1 to below 2^`bits`."""
    return whole_number(options, name, default, bits=bits, least=1)


def client_options(
    options: Mapping[str, str], kafka_names: Collection[str], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of Kafka's client among `options`, as the client names them, over `defaults`."""
    if not options.get("kafka.bootstrap.servers"):
        raise ConfigError("option 'kafka.bootstrap.servers' is missing; give host:port, several separated by commas")
    given = {
        key.removeprefix("kafka.").replace(".", "_"): value for key, value in options.items() if key in kafka_names
    }
    return {**defaults, **given}


def client_config(
    config_class: type[Config], options: Mapping[str, Any], spelling: Mapping[str, str] = MappingProxyType({})
) -> Config:
    """The configuration of a client. Raises ConfigError, which names options as Spark's user writes them.

    `spelling` gives the names of those that do not begin with `kafka.`.
    """
    try:
        return config_class.from_options(options)
    except ConfigError as error:
        names = {each.name: f"kafka.{each.name.replace('_', '.')}" for each in fields(config_class)} | dict(spelling)
        text = _NAME.sub(lambda match: names.get(match[0], match[0]), str(error))
        raise ConfigError(text) from None
