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

Tidelog takes Kafka's own configuration names. A node's come from a file, `tidelog start node.yaml`, and from the
command line, `-o key=value`, which wins:

```yaml
# node.yaml
node.id: 1
listeners: PLAINTEXT://0.0.0.0:9092
advertised.listeners: PLAINTEXT://kafka.example.org:9092
log.dirs: [/var/lib/tidelog/a, /var/lib/tidelog/b]
log:
  retention.hours: 72        # nested keys are joined by dots
```

A `.properties` file as Kafka reads it is taken too. A key that Kafka 4.3 does not know is refused, with the nearest one
that it does. A topic's own configs are set when it is created; what it does not set, it takes from the broker's key
named beside it below.

## While the cluster runs

Topics' configs may change at any time, brokers' where the table below says so: *cluster* for keys that can be set
for all brokers at once and for each one, *broker* for keys that each broker has for itself. What is set is kept in
the cluster's metadata and outlives restarts; it holds from the next request on, without a restart. Stronger comes
first:

1. the topic's own config;
2. this broker's, set at run time;
3. that of all brokers, set at run time;
4. the node's file and command line;
5. the default.

```
tidelog configs describe topics flights --all                        every value and where it comes from
tidelog configs alter topics flights --set retention.ms=3600000      the topic's own
tidelog configs alter brokers --default --set message.max.bytes=500000
tidelog configs alter brokers 1 --set max.connections=1000 --dry-run only asks whether it would be allowed
tidelog configs alter brokers 1 --delete max.connections             back to what is below it
tidelog configs alter broker-loggers 1 --set tidelog.controller=DEBUG
```

Kafka's `kafka-configs` and every admin client do the same. A broker judges its own configs, so that each is asked
for its own; a value it cannot have is refused with Kafka's words. The numbers of threads that Kafka's brokers have
are taken, within Kafka's limits, and change nothing. Listeners cannot change while the node runs. While eligible
leader replicas are kept (`eligible.leader.replicas.version`, as in every new cluster), `min.insync.replicas` is one
value for all brokers, written down when the cluster is made; topics still have their own.

Levels of loggers (`tidelog.*`, and `root` for all) are TRACE, DEBUG, INFO, WARN, ERROR and FATAL, and last until
the node stops.

## Where the defaults are not Kafka's

Kafka has none for the first three:

| key | default | why |
|---|---|---|
| `node.id` | `1` | a node starts without any configuration |
| `process.roles` | `broker,controller` | the same |
| `controller.listener.names` | empty | a node that is alone has no other controller to talk to |
| `listeners` | `PLAINTEXT://127.0.0.1:9092` | not open to the network before somebody says so |
| `log.dir` | `./tidelog-data` | not in `/tmp` |
| `offsets.topic.replication.factor`, `transaction.state.log.replication.factor`, `transaction.state.log.min.isr`, \
`share.coordinator.state.topic.replication.factor`, `share.coordinator.state.topic.min.isr` | \
`1` on a node that is alone, else Kafka's | one node cannot hold three replicas |
"""


UNSERVED = """\
Accepted so that a configuration of Kafka's can be taken over; `DescribeConfigs` shows them. A start that sets one to
something else than its default names it in a warning. Those that promise security stop the start, as the node would be
open: `ssl.*`, `sasl.*`, `delegation.token.*` (also of one listener, `listener.name.NAME.ssl.*`),
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
    lines += ["", "## Known, checked and described, but without effect yet", ""]
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
