"""`docs/configuration.md`, rendered from the tables and from what the code reads; run as a module it is rewritten."""

from __future__ import annotations

import ast
from pathlib import Path

from tidelog.broker.config.definition_types import (
    CLUSTER_WIDE,
    INTERNAL,
    PER_BROKER,
    TYPE_NAMES,
    ConfigDefinition,
)
from tidelog.broker.config.definitions import BROKER, GROUP, TOPIC, TOPIC_SYNONYMS
from tidelog.broker.config.node_config import NodeConfig

ROOT = Path(__file__).resolve().parents[3]
# Named where their defaults for a lone node are, but nothing reads them yet.
_NOT_YET = ("share.",)
_AT_RUN_TIME = {CLUSTER_WIDE: "cluster", PER_BROKER: "broker"}
PAGE = ROOT / "docs" / "configuration.md"

HEAD = """\
# Configuration

Tidelog uses Kafka's own configuration names. A node reads its configuration from a file, `tidelog start node.yaml`, and
from the command line, `-o key=value`, which takes precedence:

```yaml
# node.yaml
node.id: 1
listeners: PLAINTEXT://0.0.0.0:9092
advertised.listeners: PLAINTEXT://kafka.example.org:9092
log.dirs: [/var/lib/tidelog/a, /var/lib/tidelog/b]
log:
  retention.hours: 72        # nested keys are joined by dots
```

The file may also be a `.properties` file of Kafka. Values are the text that is written (`broker.rack: 1.10` is not
1.1), and YAML may name a key only once. A node refuses keys that neither Kafka 4.3 nor Tidelog knows. It names all of
them with the nearest known key, and says of a key that Kafka has removed (`zookeeper.connect`, `port`) what to do with
it. A topic has its own configs from its creation on. For a config that a topic does not set, the broker's key in the
table of topic configs below applies.

## While the cluster runs

Configs of topics may change at any time. The table of broker configs below shows which of them may change: *cluster*
keys for all brokers at once and for each broker, *broker* keys for each broker only. The cluster's metadata stores
these values, so that they survive restarts. A change takes effect without a restart. The first value in this list
applies:

1. the topic's own config;
2. this broker's config, set at run time;
3. the config of all brokers, set at run time;
4. the node's command line and file;
5. the default.

```
tidelog configs describe topics flights --all                        every value and its source
tidelog configs alter topics flights --set retention.ms=3600000      the topic's own config
tidelog configs alter brokers --default --set message.max.bytes=500000
tidelog configs alter brokers 1 --set max.connections=1000 --dry-run only checks the change
tidelog configs alter brokers 1 --delete max.connections             back to the next value of the list
tidelog configs alter broker-loggers 1 --set tidelog.controller=DEBUG
```

Kafka's `kafka-configs` and every admin client do the same. A broker checks changes of its own configs, so clients send
them to that broker. It refuses invalid values with Kafka's error messages. It accepts the numbers of threads of
Kafka's brokers, within Kafka's limits, but they have no effect. Listeners cannot change while the node runs. While
the cluster keeps eligible leader replicas (feature `eligible.leader.replicas.version`, on in every new cluster),
`min.insync.replicas` has one value for all brokers, which is stored when the cluster is created. Topics may still
set their own.

The levels of loggers (`tidelog.*`, and `root` for all) are TRACE, DEBUG, INFO, WARN, ERROR and FATAL. A changed level
lasts until the node stops.

## Defaults that differ from Kafka's

Kafka has no default for the first three keys:

| key | default | why |
|---|---|---|
| `node.id` | `1` | a node starts without any configuration |
| `process.roles` | `broker,controller` | the same |
| `controller.listener.names` | empty | a node that is alone connects to no other controller |
| `listeners` | `PLAINTEXT://127.0.0.1:9092` | not open to the network without a decision |
| `log.dir` | `./tidelog-data` | not in `/tmp` |
| `offsets.topic.replication.factor`, `transaction.state.log.replication.factor`, `transaction.state.log.min.isr`, \
`share.coordinator.state.topic.replication.factor`, `share.coordinator.state.topic.min.isr` | \
`1` on a node that is alone, otherwise Kafka's | one node cannot hold three replicas |
"""


UNSERVED = """\
A node accepts these keys, so that it can start with the configuration file of a Kafka broker. `DescribeConfigs` shows
them. A node logs a warning with those that have another value than their default. Keys that promise security prevent
the start, because the node would be open: `ssl.*`, `sasl.*`, `delegation.token.*` (also of one listener,
`listener.name.NAME.ssl.*`),
`authorizer.class.name`, `principal.builder.class`, `security.providers`, `connections.max.reauth.ms`,
`create.topic.policy.class.name` and `alter.config.policy.class.name`."""


def keys_read_by_the_code() -> set[str]:
    """Every string in the product's code, the tables aside: a key that is nowhere named has no effect."""
    found: set[str] = set()
    for path in (ROOT / "tidelog").rglob("*.py"):
        room = path.relative_to(ROOT / "tidelog").parts[0]
        if room in ("client", "spark_ingest", "bench", "protocol", "testing") or path.name == "config_changes.py":
            continue
        if path.parent.name == "config" and path.name.startswith(("definition", "entries", "unserved", "validation")):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def effective_keys() -> tuple[set[str], set[str]]:
    """(topic keys, broker keys) that change something."""
    read = keys_read_by_the_code()
    topic = {name for name in TOPIC if name in read}
    broker = {name for name in BROKER if name in read}
    broker -= {name for name in broker if name.startswith(_NOT_YET)}
    broker |= {synonym for name in topic for synonym, _ in TOPIC_SYNONYMS.get(name, ())}
    return topic, broker


def render() -> str:
    topic, broker = effective_keys()
    shown = {name: definition for name, definition in BROKER.items() if definition.update_mode != INTERNAL}
    lines = [HEAD, "## Broker configs that have an effect", "", "| key | type | default | at run time | |"]
    lines += ["|---|---|---|---|---|"]
    lines += [
        _row(one, _AT_RUN_TIME.get(one.update_mode, "")) for name, one in sorted(BROKER.items()) if name in broker
    ]
    lines += ["", "## Topic configs that have an effect", ""]
    lines += ["| key | type | default | broker's key | |", "|---|---|---|---|---|"]
    for name, definition in TOPIC.items():
        if name in topic:
            synonyms = ", ".join(f"`{synonym}`" for synonym, _ in TOPIC_SYNONYMS.get(name, ()))
            lines.append(_row(definition, synonyms))
    lines += ["", "## Keys without an effect", ""]
    lines += [UNSERVED, ""]
    lines += ["Broker: " + ", ".join(f"`{name}`" for name in sorted(set(shown) - broker)) + ".", ""]
    lines += ["Topic: " + ", ".join(f"`{name}`" for name in sorted(set(TOPIC) - topic)) + ".", ""]
    lines += ["Group: " + ", ".join(f"`{name}`" for name in sorted(GROUP)) + ".", ""]
    return "\n".join(lines)


def _row(definition: ConfigDefinition, *more: str) -> str:
    default = definition.default
    shown = "none" if default is None else f"`{default}`" if default else "empty"
    cells = [f"`{definition.name}`", TYPE_NAMES[definition.type].lower(), shown, *more, definition.documentation]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    NodeConfig.load()
    PAGE.write_text(render(), encoding="utf-8")
