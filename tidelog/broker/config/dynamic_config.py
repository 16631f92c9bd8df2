"""What is in force on this node now: its file, what the cluster sets at run time, and what it sets for this node alone.

`NodeConfig` is what was known at start; the metadata image lays two layers over it (Kafka's DynamicBrokerConfig): the
cluster's defaults, and above them this node's own. Only keys that may change at run time are taken from there, and only
values that can be used: what cannot is left out and told once. Whoever keeps a value asks to be told when it changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidelog.broker.config.definition_types import (
    CLUSTER_WIDE,
    LISTENER_PREFIX,
    PER_BROKER,
    ConfigDefinition,
    TypedValues,
    base_name,
)
from tidelog.broker.config.definitions import BROKER, DYNAMIC_ONLY
from tidelog.broker.scheduling.callbacks import call_all
from tidelog.protocol.errors import ConfigError
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage
    from tidelog.storage.segments.log_config import LogConfig

logger = logging.getLogger("tidelog.config")


class DynamicConfig(TypedValues):
    """`config["max.connections"]` and the typed forms of it, as `NodeConfig` has them, with the value of this moment.

    A key of one listener (`listener.name.external.max.connections`) is read with `of_listener`. An unknown name is a
    KeyError.
    """

    def __init__(self, static: NodeConfig) -> None:
        self.static = static
        self.layers: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        """This node's own run-time configs, then the cluster's, as text: what of the image can be used."""
        self._given: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        self._typed: dict[str, Any] = {}
        self._subscriptions: list[tuple[frozenset[str], Callable[[], None]]] = []

    # -- values ------------------------------------------------------------------------------------------------------

    def raw(self, name: str) -> str | None:
        """The text in force."""
        for layer in self.layers:
            if name in layer:
                return layer[name]
        return self.static.raw(name) if name in BROKER else DYNAMIC_ONLY[name].default

    def __getitem__(self, name: str) -> Any:
        try:
            return self._typed[name]
        except KeyError:
            found = self._find(name)
            self._typed[name] = found
            return found

    def _find(self, name: str) -> Any:
        definition = BROKER.get(name) or DYNAMIC_ONLY[name]
        for layer in self.layers:
            if name in layer:
                return definition.parse(layer[name])
        return self.static[name] if name in BROKER else definition.parse(definition.default)

    def is_set(self, name: str) -> bool:
        """At run time, in the file, on the command line, or implied; False for a default."""
        return any(name in layer for layer in self.layers) or self.static.is_set(name)

    def of_listener(self, listener: str, name: str) -> Any:
        """What holds for one listener: `listener.name.<listener>.<name>` where it is set, or else None.

        Some keys count once for the node and once for each listener (max.connections), so nothing is fallen back to.
        """
        key = f"{LISTENER_PREFIX}{listener.lower()}.{name}"
        for values in (*self.layers, self.static.explicit):
            if key in values:
                return BROKER[name].parse(values[key])
        return None

    def log_config(self, overrides: Mapping[str, str]) -> LogConfig:
        """The storage settings of a topic with these configs of its own."""
        return self.static.log_config(overrides, self.layers)

    def topic_default(self, name: str) -> str | None:
        """What a topic gets for a topic key it does not set."""
        return self.static.topic_default(name, self.layers)

    # -- changes -----------------------------------------------------------------------------------------------------

    def subscribe(self, names: Iterable[str], callback: Callable[[], None]) -> None:
        """Call back on the loop, once per image, after it changed the value of one of these keys.

        The key of a listener counts as the key itself. What was valid before the first image is the caller's to read.
        """
        wanted = frozenset(names)
        unknown = sorted(wanted - BROKER.keys() - DYNAMIC_ONLY.keys())
        assert not unknown, f"no such configuration keys: {unknown}"
        self._subscriptions.append((wanted, callback))

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Follow one committed change; before those who act on the image look at values."""
        if not any(kind == BROKER_RESOURCE for kind, _ in delta.changed_configs):
            return
        given = image.broker_config_layers(self.static.node_id)
        if given == self._given:
            return
        before = self.layers
        self.layers = (self._usable(given[0], self._given[0]), self._usable(given[1], self._given[1]))
        self._given = given
        changed = _changed(before, self.layers)
        names = {base_name(name) for name in changed}
        for name in (*changed, *names):
            self._typed.pop(name, None)
        call_all([callback for wanted, callback in self._subscriptions if not wanted.isdisjoint(names)])

    def _usable(self, given: Mapping[str, str], told: Mapping[str, str]) -> dict[str, str]:
        """`told`: what was looked at before, about which nothing is said twice."""
        found: dict[str, str] = {}
        for name, text in given.items():
            problem = run_time_problem(name, text)
            if problem is None:
                found[name] = text
            elif told.get(name) != text:
                logger.error("the cluster's metadata sets a configuration that cannot be used here: %s", problem)
        return found


def run_time_problem(name: str, text: str) -> str | None:
    """Why a run-time config is not taken, or None. Keys that no table knows belong to plugins and harm nobody."""
    base = base_name(name)
    definition: ConfigDefinition | None = BROKER.get(base) or DYNAMIC_ONLY.get(base)
    if definition is None:
        return None
    if definition.update_mode not in (CLUSTER_WIDE, PER_BROKER):
        return f"{name} cannot be changed at run time"
    try:
        definition.parse(text)
    except ConfigError as error:
        return str(error)
    return None


def _changed(
    before: tuple[Mapping[str, str], Mapping[str, str]], after: tuple[Mapping[str, str], Mapping[str, str]]
) -> list[str]:
    """Names whose value in force is another than before, in the order in which they are set."""
    names = dict.fromkeys(name for layer in (*before, *after) for name in layer)
    return [name for name in names if _in_force(before, name) != _in_force(after, name)]


def _in_force(layers: tuple[Mapping[str, str], Mapping[str, str]], name: str) -> str | None:
    return next((layer[name] for layer in layers if name in layer), None)
