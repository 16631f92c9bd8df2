"""The configuration in force on this node: its file, the cluster's dynamic
configs, and its own dynamic configs.

`NodeConfig` holds the values at start. The metadata image adds two layers (Kafka's
DynamicBrokerConfig): the cluster's dynamic defaults, and above them the configs of this node. Only
keys that may change at run time, with valid values, are used; an error line reports the others
once. A part that caches a value subscribes to its changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from tidelog.broker.config.definition_types import LISTENER_PREFIX, TypedValues, base_name
from tidelog.broker.config.definitions import BROKER, DYNAMIC_ONLY, run_time_definition
from tidelog.broker.scheduling.callbacks import call_all
from tidelog.protocol.errors import ConfigError
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import NodeConfig
    from tidelog.replication.controller.metadata.image import MetadataDelta, MetadataImage
    from tidelog.storage.segments.log_config import LogConfig

logger = logging.getLogger("tidelog.config")


class DynamicConfig(TypedValues):
    """`config["max.connections"]` and the typed accessors of `NodeConfig`, with the present value.

    `of_listener` reads the key of one listener (`listener.name.external.max.connections`).
    An unknown name is a KeyError.
    """

    def __init__(self, static: NodeConfig) -> None:
        self.static = static
        self.layers: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        """The usable dynamic configs as text: this node's own, then the cluster's."""
        self._image_layers: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        self._typed: dict[str, Any] = {}
        self._subscriptions: list[tuple[frozenset[str], Callable[[], None]]] = []

    # -- values ------------------------------------------------------------------------------------------------------

    def raw(self, name: str) -> str | None:
        """The value in force, as text."""
        for layer in self.layers:
            if name in layer:
                return layer[name]
        return self.static.raw(name) if name in BROKER else DYNAMIC_ONLY[name].default

    def __getitem__(self, name: str) -> Any:
        try:
            return self._typed[name]
        except KeyError:
            value = self._parse(name)
            self._typed[name] = value
            return value

    def _parse(self, name: str) -> Any:
        definition = BROKER.get(name) or DYNAMIC_ONLY[name]
        for layer in self.layers:
            if name in layer:
                return definition.parse(layer[name])
        return self.static[name] if name in BROKER else definition.parse(definition.default)

    def is_set(self, name: str) -> bool:
        """Whether the key is set: dynamically, in the file, on the command line, or by implication."""
        return any(name in layer for layer in self.layers) or self.static.is_set(name)

    def of_listener(self, listener: str, name: str) -> Any:
        """The value of `listener.name.<listener>.<name>`, or None.

        There is no fallback to the node's key, because some keys limit the node and each listener
        separately (max.connections).
        """
        key = f"{LISTENER_PREFIX}{listener.lower()}.{name}"
        for values in (*self.layers, self.static.explicit):
            if key in values:
                return BROKER[name].parse(values[key])
        return None

    def log_config(self, overrides: Mapping[str, str]) -> LogConfig:
        """The storage settings of a topic with these configs."""
        return self.static.log_config(overrides, self.layers)

    def topic_default(self, name: str) -> str | None:
        """The value of a topic key for topics that do not set it."""
        return self.static.topic_default(name, self.layers)

    # -- changes -----------------------------------------------------------------------------------------------------

    def subscribe(self, names: Iterable[str], callback: Callable[[], None]) -> None:
        """Call back on the loop after an image that changes one of these keys, once per image.

        A listener's key counts as the key itself. The caller reads the values before the first
        image.
        """
        keys = frozenset(names)
        unknown = sorted(keys - BROKER.keys() - DYNAMIC_ONLY.keys())
        assert not unknown, f"no such configuration keys: {unknown}"
        self._subscriptions.append((keys, callback))

    def on_image(self, image: MetadataImage, delta: MetadataDelta) -> None:
        """Apply one committed image, before other parts of the node apply it."""
        if not any(kind == BROKER_RESOURCE for kind, _ in delta.changed_configs):
            return
        image_layers = image.broker_config_layers(self.static.node_id)
        if image_layers == self._image_layers:
            return
        old_layers = self.layers
        self.layers = (
            self._usable(image_layers[0], self._image_layers[0]),
            self._usable(image_layers[1], self._image_layers[1]),
        )
        self._image_layers = image_layers
        changed_names = _changed_names(old_layers, self.layers)
        names = {base_name(name) for name in changed_names}
        for name in (*changed_names, *names):
            self._typed.pop(name, None)
        call_all([callback for keys, callback in self._subscriptions if not keys.isdisjoint(names)])

    def _usable(self, layer: Mapping[str, str], previous_layer: Mapping[str, str]) -> dict[str, str]:
        """The usable configs of a layer. Errors that `previous_layer` had too are not logged again."""
        usable: dict[str, str] = {}
        for name, text in layer.items():
            problem = run_time_problem(name, text)
            if problem is None:
                usable[name] = text
            elif previous_layer.get(name) != text:
                logger.error("the cluster's metadata sets a configuration that cannot be used here: %s", problem)
        return usable


def run_time_problem(name: str, text: str) -> str | None:
    """The problem of a dynamic config, or None. Unknown keys belong to plugins and are accepted."""
    definition = run_time_definition(name)
    if definition is None:
        return None
    if not definition.changes_at_run_time:
        return f"{name} cannot be changed at run time"
    try:
        definition.parse(text)
    except ConfigError as error:
        return str(error)
    return None


def _changed_names(
    old_layers: tuple[Mapping[str, str], Mapping[str, str]], new_layers: tuple[Mapping[str, str], Mapping[str, str]]
) -> list[str]:
    """The names with a changed value, in the order of the layers."""
    names = dict.fromkeys(name for layer in (*old_layers, *new_layers) for name in layer)
    return [name for name in names if _in_force(old_layers, name) != _in_force(new_layers, name)]


def _in_force(layers: tuple[Mapping[str, str], Mapping[str, str]], name: str) -> str | None:
    return next((layer[name] for layer in layers if name in layer), None)
