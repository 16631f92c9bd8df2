"""Whatever is set and taken back at run time: the strongest of what can be used holds, and who asked is told of it."""

from __future__ import annotations

import logging
from typing import Final

from hypothesis import given
from hypothesis import strategies as st

from tidelog.broker.config.dynamic_config import DynamicConfig
from tidelog.broker.config.node_config import NodeConfig
from tidelog.replication.controller.metadata.image import BROKER_RESOURCE, MetadataDelta, MetadataImage

STATIC: Final = {"max.connections": "11", "num.io.threads": "9"}
DEFAULTS: Final = {"max.connections": 11, "num.io.threads": 9, "log.preallocate": False, "background.threads": 10}
VALUES: Final[dict[str, dict[str, int | bool | None]]] = {
    "max.connections": {"1": 1, "-1": None, "x": None, " 7 ": 7},
    "num.io.threads": {"4": 4, "0": None},
    "log.preallocate": {"true": True, "FALSE": False, "yes": None},
    "background.threads": {"5": 5, "": None},
    "node.id": {"3": None},
    "a.plugins.own": {"x": None},
}
SETS = st.fixed_dictionaries({}, optional={name: st.sampled_from(sorted(values)) for name, values in VALUES.items()})


@given(st.lists(st.tuples(SETS, SETS), max_size=12))
def test_the_strongest_usable_value_holds(steps: list[tuple[dict[str, str], dict[str, str]]]) -> None:
    logging.getLogger("tidelog.config").setLevel(logging.CRITICAL)
    settings = DynamicConfig(NodeConfig(STATIC))
    told: dict[str, int] = dict.fromkeys(DEFAULTS, 0)
    for name in DEFAULTS:
        settings.subscribe([name], lambda name=name: told.update({name: told[name] + 1}))  # type: ignore[misc]
    changes = dict.fromkeys(DEFAULTS, 0)
    before: dict[str, object] = dict(DEFAULTS)
    for own, cluster in steps:
        configs = {(BROKER_RESOURCE, "1"): own, (BROKER_RESOURCE, ""): cluster}
        settings.on_image(MetadataImage(configs=configs), MetadataDelta(changed_configs=set(configs)))
        for name, default in DEFAULTS.items():
            usable = [VALUES[name][layer[name]] for layer in (own, cluster) if name in layer]
            wanted = next((value for value in usable if value is not None), default)
            assert settings[name] == wanted, name
            changes[name] += wanted != before[name]
            before[name] = wanted
        assert settings.integer("node.id") == 1
    logging.getLogger("tidelog.config").setLevel(logging.NOTSET)
    # The same value in other words, or from another layer, may be told too; a change always is.
    assert all(told[name] >= changes[name] for name in DEFAULTS)
