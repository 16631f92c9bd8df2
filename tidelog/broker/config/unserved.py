"""Kafka's keys that this broker does not serve: some prevent the start, the others get a warning.
Pure.

A key that promises security must not start an open node, so it is refused by name. Every other key
without effect is accepted, because configuration files for Kafka contain such keys. A test compares
the list with the keys that the code reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidelog.broker.config.definition_types import LISTENER_PREFIX, base_name
from tidelog.broker.config.definitions import BROKER
from tidelog.protocol.errors import ConfigError

if TYPE_CHECKING:
    from tidelog.broker.config.node_config import NodeConfig

_PREFIXES: Final = (
    "delegation.token.",
    "group.consumer.",
    "group.coordinator.append.",
    "group.coordinator.background.",
    "group.coordinator.cached.",
    "group.coordinator.rebalance.",
    "group.coordinator.threads",
    "group.share.",
    "group.streams.",
    "remote.",
    "sasl.",
    "share.",
    "ssl.",
)
_NAMES: Final = frozenset(
    """
    alter.config.policy.class.name
    alter.log.dirs.replication.quota.window.num alter.log.dirs.replication.quota.window.size.seconds
    authorizer.class.name background.threads client.quota.callback.class config.providers
    connection.failed.authentication.delay.ms connections.max.reauth.ms controller.performance.always.log.threshold.ms
    controller.performance.sample.period.ms controller.quorum.append.linger.ms controller.quorum.auto.join.enable
    controller.quorum.fetch.max.bytes controller.quorum.fetch.snapshot.max.bytes controller.quota.window.num
    controller.quota.window.size.seconds controller.socket.timeout.ms create.topic.policy.class.name
    delete.records.purgatory.purge.interval.requests early.start.listeners fetch.purgatory.purge.interval.requests
    follower.fetch.last.tiered.offset.enable initial.broker.registration.timeout.ms
    kafka.metrics.polling.interval.secs kafka.metrics.reporters log.flush.offset.checkpoint.interval.ms
    log.flush.start.offset.checkpoint.interval.ms log.initial.task.delay.ms log.local.retention.bytes
    log.local.retention.ms metadata.max.idle.interval.ms
    metric.reporters metrics.num.samples
    metrics.recording.level metrics.sample.window.ms num.io.threads num.network.threads
    num.recovery.threads.per.data.dir num.replica.alter.log.dirs.threads num.replica.fetchers offsets.load.buffer.size
    principal.builder.class producer.purgatory.purge.interval.requests
    queued.max.requests quota.window.num quota.window.size.seconds replica.socket.receive.buffer.bytes
    replication.quota.window.num replication.quota.window.size.seconds security.providers
    server.max.startup.time.ms socket.connection.setup.timeout.max.ms socket.connection.setup.timeout.ms
    socket.listen.backlog.size telemetry.max.bytes
    transaction.state.log.load.buffer.size transaction.two.phase.commit.enable
    unstable.api.versions.enable unstable.feature.versions.enable
    """.split()
)
_SECURITY_PREFIXES: Final = ("delegation.token.", "sasl.", "ssl.")
_SECURITY: Final = frozenset(
    {
        "alter.config.policy.class.name",
        "authorizer.class.name",
        "connections.max.reauth.ms",
        "create.topic.policy.class.name",
        "principal.builder.class",
        "security.inter.broker.protocol",
        "security.providers",
    }
)
# Sizes of topics that are not there yet: every configuration of a small cluster has them.
_EXPECTED: Final = ("share.coordinator.state.topic.",)


def has_effect(name: str) -> bool:
    """Whether a broker key has an effect."""
    return name not in _NAMES and not name.startswith(_PREFIXES)


def keys_without_effect(config: NodeConfig) -> list[str]:
    """The keys without effect that are set to another value than their default; sorted."""
    return sorted(
        name
        for name in config.explicit
        if name in BROKER and not has_effect(name) and not name.startswith(_EXPECTED) and _says_something(config, name)
    )


def check_served(config: NodeConfig) -> None:
    """Raises ConfigError for unserved settings: security, and listeners that the node's roles need."""
    for name in sorted(config.explicit):
        if _promises_security(name) and _says_something(config, name):
            raise ConfigError(
                f"{name} promises what is not served yet: TLS, SASL and authorization are missing, and the node would "
                "be open; take the key out to start it all the same"
            )
    for listener in config.listeners:
        if listener.security_protocol != "PLAINTEXT":
            raise ConfigError(f"listener {listener.name}: {listener.security_protocol} is not served yet")
    _check_protocols_to_others(config)
    _check_providers(config)
    own = {listener.name for listener in config.listeners}
    if config.is_controller and not config.is_alone and not own & config.controller_listener_names:
        raise ConfigError("a controller needs a listener named in controller.listener.names")
    if config.is_broker and not own - config.controller_listener_names:
        raise ConfigError("a broker needs a listener that is not among controller.listener.names")
    _check_listeners_of_roles(config, own)


def _check_listeners_of_roles(config: NodeConfig, own: set[str]) -> None:
    """Every listener has a role that serves it, and the other brokers find the one that they use."""
    idle = set() if config.is_broker else own - config.controller_listener_names
    if not config.is_controller:
        idle |= own & config.controller_listener_names
    if idle:
        roles = config.raw("process.roles")
        raise ConfigError(f"listeners: a node with process.roles={roles} does not serve {', '.join(sorted(idle))}")
    advertised = [listener.name for listener in config.advertised_listeners()]
    if config.is_broker and config.inter_broker_listener not in advertised:
        raise ConfigError(
            f"inter.broker.listener.name is {config.inter_broker_listener}, which other brokers cannot find: "
            f"advertised are {', '.join(advertised)}"
        )


def _check_providers(config: NodeConfig) -> None:
    """A reference to a provider is no value: `log.dirs=${env:DIRS}` would be a directory of this name."""
    references = [f"${{{name}:" for name in config.items("config.providers")]
    for name, text in sorted(config.explicit.items()):
        if any(reference in text for reference in references):
            raise ConfigError(f"{name} refers to one of config.providers, which are not served yet: {text}")


def _promises_security(name: str) -> bool:
    if name.startswith(LISTENER_PREFIX):
        # Also with a mechanism, as in listener.name.sasl_ssl.scram-sha-256.sasl.jaas.config.
        return any(f".{prefix}" in name for prefix in _SECURITY_PREFIXES) or base_name(name) in _SECURITY
    return name in _SECURITY or name.startswith(_SECURITY_PREFIXES)


def _check_protocols_to_others(config: NodeConfig) -> None:
    """The listeners of other nodes to which this node connects."""
    protocols = config.security_protocols()
    for name in sorted(config.controller_listener_names | {config.inter_broker_listener}):
        if protocols.get(name, "PLAINTEXT") != "PLAINTEXT":
            raise ConfigError(
                f"listener.security.protocol.map: {protocols[name]} of listener {name}, over which this node reaches "
                "others, is not served yet"
            )


def _says_something(config: NodeConfig, name: str) -> bool:
    """Whether the key has a value other than its default."""
    text = config.explicit[name].strip()
    if not text:
        return False
    definition = BROKER.get(base_name(name) if name.startswith(LISTENER_PREFIX) else name)
    if definition is None or definition.default is None:
        return True
    try:
        return bool(definition.parse(text) != definition.parse(definition.default))
    except ConfigError:
        return True
