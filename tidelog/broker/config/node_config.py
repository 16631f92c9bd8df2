"""A node's static configuration: Kafka's keys from a YAML (or .properties) file and `-o key=value`,
typed.

`NodeConfig` does not change while the process runs; callers pass in the dynamic configs as
`layers`. `definitions*.py` define the keys. Every start imports this module, so the import must be
cheap: no yaml, click or asyncio here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tidelog.broker.config.definition_types import BOOLEAN, TypedValues
from tidelog.broker.config.definitions import (
    BROKER,
    DYNAMIC_ONLY,
    TOPIC,
    TOPIC_SYNONYMS,
    convert_synonym,
)
from tidelog.broker.config.definitions_cluster import RACK_AWARE_SELECTOR
from tidelog.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tidelog.storage.segments.log_config import LogConfig

__all__ = ["ConfigError", "Listener", "NodeConfig", "internal_topic_options"]

# Keys of plugins and of single listeners carry free names.
FREE_PREFIXES = ("listener.name.", "rsm.config.", "rlmm.config.", "config.providers.")
# Keys of Kafka's servers before 4.0, with the key in their place, if there is one; a prefix ends with a dot.
REMOVED = {
    "advertised.host.name": "advertised.listeners",
    "advertised.port": "advertised.listeners",
    "broker.id.generation.enable": "",
    "control.plane.listener.name": "",
    "delegation.token.master.key": "",
    "eligible.leader.replicas.enable": "",
    "group.coordinator.new.enable": "",
    "host.name": "listeners",
    "inter.broker.protocol.version": "",
    "leader.imbalance.per.broker.percentage": "",
    "log.message.downconversion.enable": "",
    "log.message.format.version": "",
    "log.message.timestamp.difference.max.ms": "log.message.timestamp.before.max.ms",
    "offsets.commit.required.acks": "",
    "password.encoder.": "",
    "port": "listeners",
    "quota.consumer.default": "",
    "quota.producer.default": "",
    "replica.lag.max.messages": "replica.lag.time.max.ms",
    "reserved.broker.max.id": "",
    "zookeeper.": "",
}
# Kafka's authorizer reads these; they are no keys of its broker.
_AUTHORIZER_KEYS = ("allow.everyone.if.no.acl.found", "super.users")
_NO_HOST = re.compile(r"[^0-9A-Za-z\-._:%\[\]]")  # as Kafka's EndPoint
_META_ADDRESSES = ("0.0.0.0", "::", "0:0:0:0:0:0:0:0")


class Listener(NamedTuple):
    """One address the node serves, or tells clients to use. `host` is empty for every interface."""

    name: str
    host: str
    port: int
    security_protocol: str


def internal_topic_options(brokers: int) -> dict[str, str]:
    """Replication of the internal topics that few brokers can hold: Kafka's defaults would refuse the first group."""
    replicas, in_sync = str(min(3, brokers)), str(min(2, brokers))
    return {
        "offsets.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "transaction.state.log.replication.factor": replicas,
    }


class NodeConfig(TypedValues):
    """`config["num.partitions"]` is the typed value: int, bool, float, str, list; None
    where unset and without default.

    `explicit` holds what was set, as text; `raw(name)` the text in force; `integer`,
    `number`, `flag`, `text` and `items` are `[]` with a checked type. An unknown name is a
    KeyError: the tables list them all.
    """

    def __init__(self, explicit: Mapping[str, str] | None = None) -> None:
        self.explicit: dict[str, str] = dict(explicit or {})
        self._typed: dict[str, Any] = {}
        self._implied: Mapping[str, str] = {}
        _check_names(self.explicit)
        for name, text in self.explicit.items():
            if "\0" in text:
                raise ConfigError(f"{name} holds a NUL character")
            if not _can_be_sent(text):
                raise ConfigError(f"{name} is not UTF-8: {text!r}")
            if name in BROKER:
                self._typed[name] = BROKER[name].parse(text)
        # Two names of one thing, as in Kafka.
        for name, other in (("node.id", "broker.id"), ("broker.id", "node.id")):
            if name not in self.explicit and other in self.explicit:
                self.explicit[name] = self.explicit[other]
        self._check_roles()
        self.listeners: list[Listener] = self._parse_listeners("listeners")
        self._check_addresses()
        self._check_directories()
        self._check_internal_topics()
        self.quorum_voters: dict[int, tuple[str, int]] = dict(map(_voter, self.items("controller.quorum.voters")))
        self.quorum_bootstrap: list[tuple[str, int]] = [
            _host_and_port("controller.quorum.bootstrap.servers", item)
            for item in self.items("controller.quorum.bootstrap.servers")
        ]
        if self.is_alone:
            self._implied = internal_topic_options(1)

    @property
    def has_follower_reads(self) -> bool:
        """Whether consumers may read from a replica in their own rack (KIP-392)."""
        return bool(self["replica.selector.class"] == RACK_AWARE_SELECTOR)

    @classmethod
    def load(cls, file: Path | None = None, overrides: Mapping[str, str] | None = None) -> NodeConfig:
        """Load a file (or None) and overrides, which take precedence. Raises `ConfigError` with one
        line.
        """
        explicit = _read_file(Path(file)) if file is not None else {}
        explicit.update(overrides or {})
        return cls(explicit)

    # -- values ------------------------------------------------------------------------------------------------------

    def raw(self, name: str) -> str | None:
        """The value as text: set, implied for a single node, or the default."""
        text = self.explicit.get(name)
        if text is None:
            text = self._implied.get(name)
        return BROKER[name].default if text is None else text

    def __getitem__(self, name: str) -> Any:
        try:
            return self._typed[name]
        except KeyError:
            value = self._typed[name] = BROKER[name].parse(self.raw(name))
            return value

    def is_set(self, name: str) -> bool:
        """Whether the key is set: in the file, on the command line, or by implication."""
        return name in self.explicit or name in self._implied

    # -- the node ----------------------------------------------------------------------------------------------------

    @property
    def node_id(self) -> int:
        return self.integer("node.id")

    @property
    def is_broker(self) -> bool:
        return "broker" in self["process.roles"]

    @property
    def is_controller(self) -> bool:
        return "controller" in self["process.roles"]

    @property
    def is_alone(self) -> bool:
        """Whether this node is broker and controller, and the only voter."""
        others = max(
            len(self.items("controller.quorum.voters")), len(self.items("controller.quorum.bootstrap.servers"))
        )
        return self.is_broker and self.is_controller and others <= 1

    @property
    def controller_listener_names(self) -> frozenset[str]:
        """The names of the listeners of the quorum and the controller, on this node and on others."""
        return frozenset(name.upper() for name in self.items("controller.listener.names"))

    @property
    def inter_broker_listener(self) -> str:
        """The name of the listener over which brokers fetch from each other."""
        name = self.text("inter.broker.listener.name").upper()
        if name:
            return name
        protocol = self.text("security.inter.broker.protocol")
        advertised = [listener for listener in self.listeners if listener.name not in self.controller_listener_names]
        named = [listener.name for listener in advertised if listener.name == protocol]
        alike = [listener.name for listener in advertised if listener.security_protocol == protocol]
        return (named or alike or [protocol])[0]

    @property
    def log_dirs(self) -> list[Path]:
        """The log directories: `log.dirs`, else `log.dir`."""
        return [Path(item) for item in self.items("log.dirs") or self.items("log.dir")]

    @property
    def metadata_log_dir(self) -> Path:
        explicit = self.text("metadata.log.dir")
        return Path(explicit) if explicit else self.log_dirs[0]

    def advertised_listeners(self, bound_ports: Mapping[str, int] | None = None) -> list[Listener]:
        """The advertised addresses. `bound_ports`: listener name -> bound port, for a configured
        port of 0.
        """
        key = "advertised.listeners" if self.is_set("advertised.listeners") else "listeners"
        ports = bound_ports or {}
        return [
            listener._replace(
                host=listener.host or own_name(), port=listener.port or ports.get(listener.name, listener.port)
            )
            for listener in self._parse_listeners(key)
            if listener.name not in self.controller_listener_names
        ]

    def advertised_controller_listeners(self, bound_ports: Mapping[str, int] | None = None) -> list[Listener]:
        """The addresses of this controller for other nodes: of advertised.listeners, as Kafka's, otherwise
        of the voters' list, otherwise of listeners.
        """
        host, port = self.quorum_voters.get(self.node_id, ("", 0))
        mine = [listener for listener in self.listeners if listener.name in self.controller_listener_names]
        listeners = {one.name: one._replace(host=host or one.host, port=port or one.port) for one in mine}
        advertised = self._parse_listeners("advertised.listeners")
        listeners |= {one.name: one for one in advertised if one.name in self.controller_listener_names}
        ports = bound_ports or {}
        return [
            listener._replace(
                host=own_name() if listener.host in ("", *_META_ADDRESSES) else listener.host,
                port=listener.port or ports.get(name, 0),
            )
            for name, listener in listeners.items()
        ]

    # -- topics ------------------------------------------------------------------------------------------------------

    def topic_default(self, name: str, layers: Sequence[Mapping[str, str]] = ()) -> str | None:
        """What a topic gets for a topic key it does not set.

        `layers`: run-time broker configs, strongest first (this broker's, then the cluster's), as
        text.
        """
        for layer in layers:
            for synonym, factor in TOPIC_SYNONYMS.get(name, ()):
                if synonym in layer:
                    return convert_synonym(layer[synonym], factor)
        for synonym, factor in TOPIC_SYNONYMS.get(name, ()):
            text = self.explicit.get(synonym)
            if text is not None:
                return convert_synonym(text, factor)
        return TOPIC[name].default

    def topic_defaults(self, layers: Sequence[Mapping[str, str]] = ()) -> dict[str, str]:
        """Topic key -> text, for a topic without configs of its own. Omits keys without a value."""
        defaults = ((name, self.topic_default(name, layers)) for name in TOPIC)
        return {name: text for name, text in defaults if text is not None}

    def log_config(self, overrides: Mapping[str, str], layers: Sequence[Mapping[str, str]] = ()) -> LogConfig:
        """The storage settings of a topic with these configs."""
        from tidelog.storage.segments.log_config import LogConfig

        # A broker's in Kafka; our logs know only what their own settings say.
        passed_along = {
            name: next((layer[name] for layer in layers if name in layer), str(self[name]))
            for name in ("producer.id.expiration.ms", "transaction.partition.verification.enable")
        }
        return LogConfig.from_topic_config({**self.topic_defaults(layers), **passed_along, **overrides})

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check_roles(self) -> None:
        if not self["process.roles"]:
            raise ConfigError("process.roles must name at least one of: broker, controller")
        if not self.is_alone and not (
            self.items("controller.quorum.voters") or self.items("controller.quorum.bootstrap.servers")
        ):
            raise ConfigError(
                "controller.quorum.bootstrap.servers, or controller.quorum.voters, must say where the controllers are"
            )
        if self.is_set("broker.id") and self["broker.id"] != self.node_id:
            raise ConfigError(f"node.id is {self.node_id} and broker.id is {self['broker.id']}: they must be the same")
        ids = [str(_voter(item)[0]) for item in self.items("controller.quorum.voters")]
        is_voter = str(self.node_id) in ids
        if self.is_controller and ids and not is_voter:
            raise ConfigError(
                f"node.id {self.node_id} has the controller role but is not among "
                f"controller.quorum.voters ({', '.join(ids)})"
            )
        if is_voter and not self.is_controller:
            raise ConfigError(
                f"node.id {self.node_id} is among controller.quorum.voters ({', '.join(ids)}) "
                "but has no controller role"
            )

    def security_protocols(self) -> dict[str, str]:
        """Listener name -> security protocol, from
        listener.security.protocol.map and Kafka's defaults for it.
        """
        protocols = {"PLAINTEXT": "PLAINTEXT", "SSL": "SSL", "SASL_PLAINTEXT": "SASL_PLAINTEXT", "SASL_SSL": "SASL_SSL"}
        for entry in self.text("listener.security.protocol.map").split(","):
            name, colon, protocol = entry.strip().rpartition(":")
            if colon:
                protocols[name.strip().upper()] = protocol.strip().upper()
        for name in self.items("controller.listener.names"):
            # Kafka maps controller listeners to PLAINTEXT when nothing in the map is custom.
            protocols.setdefault(name.upper(), "PLAINTEXT")
        return protocols

    def _parse_listeners(self, key: str) -> list[Listener]:
        protocols = self.security_protocols()
        return [_parse_listener(key, item, protocols) for item in self.items(key)]

    def _check_addresses(self) -> None:
        if not self.listeners:
            raise ConfigError("listeners must name at least one address, as in PLAINTEXT://127.0.0.1:9092")
        _refuse_twice("listeners", [listener.name for listener in self.listeners], "name")
        ports = [f"{listener.host}:{listener.port}" for listener in self.listeners if listener.port]
        _refuse_twice("listeners", ports, "port")
        if not self.is_broker:
            return
        names = {listener.name for listener in self.listeners}
        explicit = self.is_set("advertised.listeners")
        if explicit and not self.items("advertised.listeners"):
            raise ConfigError("advertised.listeners is empty: clients would learn no address of this broker")
        for listener in self.advertised_listeners():
            if listener.host in _META_ADDRESSES:
                which = "advertised.listeners" if explicit else "listeners"
                raise ConfigError(
                    f"{which}: clients cannot connect to {listener.host}; "
                    "set advertised.listeners to an address they can reach"
                )
            if listener.name not in names:
                raise ConfigError(
                    f"advertised.listeners names {listener.name}, but listeners has only {', '.join(sorted(names))}"
                )

    def _check_directories(self) -> None:
        """An empty list is refused, as by Kafka: the variable of a script may have been empty."""
        for key in ("log.dirs", "log.dir"):
            if self.is_set(key) and not self.items(key):
                raise ConfigError(f"{key} is empty: it must name at least one directory")

    def _check_internal_topics(self) -> None:
        """A size of segments that no topic may have leaves a node on which these topics cannot be created."""
        for key in ("offsets.topic.segment.bytes", "transaction.state.log.segment.bytes"):
            try:
                TOPIC["segment.bytes"].parse(self.raw(key))
            except ConfigError as error:
                raise ConfigError(f"{key}: {error}") from None


def _parse_listener(key: str, item: str, protocols: Mapping[str, str]) -> Listener:
    name, separator, address = item.partition("://")
    host, colon, port_text = address.rpartition(":")
    if not separator or not colon or not port_text.isdecimal() or int(port_text) > 65535 or _NO_HOST.search(host):
        raise ConfigError(f"{key}: {item!r} is not an address of the form NAME://host:port")
    name = name.upper()
    protocol = protocols.get(name)
    if protocol is None:
        raise ConfigError(
            f"{key}: no security protocol for listener {name}; add {name}:PLAINTEXT to listener.security.protocol.map"
        )
    return Listener(name, host.strip("[]"), int(port_text), protocol)


def _voter(item: str) -> tuple[int, tuple[str, int]]:
    node_id, at, address = item.partition("@")
    if not at or not node_id.strip().isdecimal():
        raise ConfigError(f"controller.quorum.voters: {item!r} is not of the form ID@host:port")
    return int(node_id), _host_and_port("controller.quorum.voters", address)


def _host_and_port(key: str, address: str) -> tuple[str, int]:
    host, colon, port = address.strip().rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{key}: {address!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def _refuse_twice(key: str, values: Sequence[str], what: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{key}: each listener must have a different {what}, {value} is there twice")


def own_name() -> str:
    """The host name of this machine for other machines."""
    import socket

    return socket.getfqdn()


def _can_be_sent(text: str) -> bool:
    """Not where an argument of the command line holds bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_names(explicit: Mapping[str, str]) -> None:
    """All wrong names at once: a file of an older Kafka has several."""
    problems = []
    for name in explicit:
        if name in BROKER or name.startswith(FREE_PREFIXES):
            continue
        if name in DYNAMIC_ONLY:
            raise ConfigError(f"{name} is set on a running cluster (configs alter), not in a node's configuration")
        problems.append(f"unknown configuration key {name!r}{_hint(name)}")
    if problems:
        raise ConfigError("; ".join(problems))


def _hint(name: str) -> str:
    if name in _AUTHORIZER_KEYS:
        return " (of Kafka's authorizer: there is no authorization yet, and without this key the node would be open)"
    for removed, successor in REMOVED.items():
        if name == removed or (removed.endswith(".") and name.startswith(removed)):
            return f" (Kafka has removed it: {f'set {successor}' if successor else 'leave it out'})"
    near = nearest_keys(name)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def nearest_keys(name: str) -> list[str]:
    """Known broker keys that look like this one, nearest first, at most two. A
    topic key names its broker synonym.
    """
    import difflib

    if name in TOPIC_SYNONYMS:
        return [TOPIC_SYNONYMS[name][0][0]]
    normalized = name.strip().lower().replace("_", ".")
    return [normalized] if normalized in BROKER else difflib.get_close_matches(normalized, BROKER, n=2, cutoff=0.75)


def _read_file(file: Path) -> dict[str, str]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    is_properties = file.suffix == ".properties"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        if not is_properties:
            raise ConfigError(f"cannot read {file}: it is not UTF-8 text") from None
        text = data.decode("latin-1")  # as Java reads every such file
    return _read_properties(file, text) if is_properties else _read_yaml(file, text)


def _read_properties(file: Path, text: str) -> dict[str, str]:
    from tidelog.broker.config.java_properties import PropertiesError, parse_properties

    try:
        return parse_properties(text)
    except PropertiesError as error:
        raise ConfigError(f"{file}:{error}") from None


def _read_yaml(file: Path, text: str) -> dict[str, str]:
    import yaml

    try:
        content = yaml.load(text, Loader=_yaml_loader())
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{file}:{mark.line + 1}" if mark is not None else str(file)
        raise ConfigError(f"{where}: not valid YAML: {getattr(error, 'problem', None) or 'cannot be parsed'}") from None
    except RecursionError:
        raise ConfigError(f"{file}: nested too deeply") from None
    except (KeyError, ValueError):  # as `!!bool x`
        raise ConfigError(f"{file}: not valid YAML: a value does not fit its tag") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected `key: value` lines")
    values: dict[str, str] = {}
    try:
        _flatten(file, "", content, values)
    except RecursionError:  # an alias inside what it names
        raise ConfigError(f"{file}: nested without end") from None
    return values


def _yaml_loader() -> Any:
    """Reads values as the text that is written: YAML's numbers would make 8 of 010, and 1.1 of 1.10."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(loader):  # type: ignore[misc]
        yaml_implicit_resolvers = {
            first: [each for each in resolvers if each[0] in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")]
            for first, resolvers in loader.yaml_implicit_resolvers.items()
        }

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                name = str(key.value)
                if name in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise yaml.constructor.ConstructorError(None, None, f"{name} is there twice", key.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep)

    return Loader


_YAML_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


def _flatten(file: Path, prefix: str, content: Mapping[Any, Any], values: dict[str, str]) -> None:
    """Nested mappings spell dotted keys: `log: {dirs: x}` is `log.dirs: x`."""
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            _flatten(file, f"{name}.", value, values)
            continue
        if name in values:
            raise ConfigError(f"{file}: {name} is there twice")
        text = as_text(value)
        is_boolean = name in BROKER and BROKER[name].type == BOOLEAN
        values[name] = _YAML_BOOLEANS.get(text.lower(), text) if is_boolean else text


def as_text(value: Any) -> str:
    """A value as a configuration file has it: `true`, `3`, lists separated by commas."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(as_text(item) for item in value)
    return "" if value is None else str(value)
