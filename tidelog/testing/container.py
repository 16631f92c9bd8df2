"""A broker with the methods of testcontainers' `KafkaContainer`, so that a suite moves by one import.

There is no container: the broker is an `EmbeddedBroker`. What only concerns containers (images, names,
networks, volumes) is accepted and does nothing. What would need a container (`exec`) raises.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tidelog.broker.config.definitions import BROKER
from tidelog.broker.config.node_config import FREE_PREFIXES
from tidelog.testing.embedded import EmbeddedBroker, Scalar

logger = logging.getLogger(__name__)

_ENVIRONMENT_PREFIX = "KAFKA_"
_CONTAINER_KEYS = frozenset(
    "listeners advertised.listeners listener.security.protocol.map inter.broker.listener.name log.dir log.dirs "
    "controller.listener.names controller.quorum.voters controller.quorum.bootstrap.servers process.roles".split()
)
"""Keys with which images describe their container; the embedded broker has its own values."""
_IMAGE_KEYS = (
    "opts",
    "heap.opts",
    "gc.log.opts",
    "jvm.performance.opts",
    "jmx.",
    "log4j.",
    "tools.log4j.",
    "confluent.",
    "zookeeper.",
)
"""Beginnings of what images read for the JVM, its logs and their metrics; there is nothing to set."""
_SEPARATORS = {"_": ".", "__": "_", "___": "-"}
_LOOPBACK = "127.0.0.1"


class TidelogContainer:
    """`with TidelogContainer() as kafka: kafka.get_bootstrap_server()`.

    `port`: the port of the listener inside the container; `with_bind_ports` refers to it. `env`: the same as
    `with_env` for each item. `process`: the broker is a process of its own. The other arguments of a container
    do nothing, but a `security_protocol` other than PLAINTEXT raises ValueError.
    """

    def __init__(
        self,
        image: str = "",
        port: int = 9093,
        wait_strategy_check_string: str = "",
        listener_name: str = "PLAINTEXT",
        security_protocol: str = "PLAINTEXT",
        *,
        process: bool = False,
        env: Mapping[str, str] | None = None,
        **_container: Any,
    ) -> None:
        if security_protocol != "PLAINTEXT":
            raise ValueError(f"security_protocol {security_protocol} is not served; the broker has PLAINTEXT listeners")
        self.image = image
        self.port = port
        self.listener_name = listener_name
        self.security_protocol = security_protocol
        self.env: dict[str, str] = dict(env or {})
        """The environment of the container, of which `KAFKA_...` and `CLUSTER_ID` have an effect."""
        self.kraft_enabled = True
        self._host_ports: dict[int, int] = {}
        """By the port inside the container, the port of this machine."""
        self._in_process = process
        self._broker: EmbeddedBroker | None = None
        self._has_run = False

    def with_env(self, key: str, value: str) -> Self:
        """Set a configuration key of the broker where `key` begins with KAFKA_, the broker's id too. Options of
        the JVM and other variables do nothing. A key that Kafka 4.3 does not know gets a warning, as in Kafka.
        """
        self.env[key] = value
        return self

    def with_envs(self, **variables: str) -> Self:
        """`with_env` for each."""
        self.env.update(variables)
        return self

    def with_env_file(self, env_file: str | os.PathLike[str]) -> Self:
        """`with_env` for each line KEY=VALUE; a value may stand in quotes. Raises ValueError for another line."""
        for number, line in enumerate(Path(env_file).read_text(encoding="utf-8").splitlines(), 1):
            text = line.strip().removeprefix("export ")
            if not text or text.startswith("#"):
                continue
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                raise ValueError(f"{os.fspath(env_file)}: line {number} is not KEY=VALUE")
            self.with_env(key.strip(), _unquoted(value.strip()))
        return self

    def with_cluster_id(self, cluster_id: str) -> Self:
        """The id that the broker reports; otherwise each start has a new one."""
        return self.with_env("CLUSTER_ID", cluster_id)

    def with_kraft(self) -> Self:
        """Nothing to do: the broker is its own controller."""
        return self

    def with_bind_ports(self, container: str | int, host: str | int | None = None) -> Self:
        """The broker listens on the port `host` if `container` is the port of its listener: `port`, or else the
        only port that is bound. Without `host` the port is a free one.
        """
        if host is not None:
            self._host_ports[_port_number(container)] = _port_number(host)
        return self

    def with_exposed_ports(self, *ports: str | int) -> Self:
        """Accepted; `get_exposed_port` returns the broker's port."""
        return self

    def _accept(self, *_: Any, **__: Any) -> Self:
        """Accepted; there is no container that this could concern."""
        return self

    with_name = with_kwargs = with_network = with_network_aliases = with_command = _accept
    with_volume_mapping = with_tmpfs_mount = with_copy_into_container = maybe_emulate_amd64 = waiting_for = _accept

    def get_bootstrap_server(self) -> str:
        """host:port, for `bootstrap.servers`."""
        return self._running().bootstrap_servers

    def get_container_host_ip(self) -> str:
        return self.get_bootstrap_server().rpartition(":")[0]

    def get_exposed_port(self, port: str | int | None = None) -> int:
        """The port of the broker, whichever `port` of the container is asked for."""
        return int(self.get_bootstrap_server().rpartition(":")[2])

    @property
    def status(self) -> str:
        """`not_started`, `running` or `exited`."""
        return "running" if self._broker is not None else "exited" if self._has_run else "not_started"

    def reload(self) -> None:
        """Accepted; `status` is always that of now."""

    def get_logs(self) -> tuple[bytes, bytes]:
        """What the broker has written on standard output and standard error, which are one with `process=True`. In
        the test's process it writes nothing: its log is in the test's logging.
        """
        return self._running().output(), b""

    def wait(self) -> int:
        """Raises RuntimeError: the broker runs until `stop`, so that this would never return."""
        raise RuntimeError("the broker does not end by itself; call stop()")

    def exec(self, command: str | list[str]) -> Any:
        """Raises RuntimeError: there is no container in which a command could run."""
        raise RuntimeError(
            f"cannot run {command!r}: there is no container; use an admin client, or a tool of this machine "
            "with get_bootstrap_server()"
        )

    def start(self, timeout: float = 30.0) -> Self:
        """Start the broker; returns when it serves. `timeout` is accepted: the broker has a limit of its own."""
        if self._broker is None:
            broker = EmbeddedBroker(
                config=self._config(), process=self._in_process, cluster_id=self.env.get("CLUSTER_ID")
            )
            self._broker, self._has_run = broker.start(), True
        return self

    def stop(self, force: bool = True, delete_volume: bool = True) -> None:
        """Stop the broker and delete its data."""
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.stop()

    def _config(self) -> dict[str, Scalar]:
        config: dict[str, Scalar] = {}
        for variable, value in self.env.items():
            if not variable.startswith(_ENVIRONMENT_PREFIX):
                continue
            key = _config_key(variable)
            if key in _CONTAINER_KEYS or key.startswith(_IMAGE_KEYS):
                continue
            if key in BROKER or key.startswith(FREE_PREFIXES):
                config[key] = value
            else:
                logger.warning("%s has no effect: Kafka 4.3 has no configuration key %s", variable, key)
        ports = self._host_ports
        host_port = ports.get(self.port, *(ports.values() if len(ports) == 1 else ()))
        if host_port is not None:
            config["listeners"] = f"PLAINTEXT://{_LOOPBACK}:{host_port}"
        return config

    def _running(self) -> EmbeddedBroker:
        if self._broker is None:
            raise RuntimeError("the broker is stopped; call start() or use a with block")
        return self._broker

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _config_key(variable: str) -> str:
    """KAFKA_NUM_PARTITIONS is num.partitions. As in Kafka's images, two underscores are one, and three a dash."""
    name = variable.removeprefix(_ENVIRONMENT_PREFIX).lower()
    return re.sub("___|__|_", lambda match: _SEPARATORS[match.group()], name)


def _unquoted(value: str) -> str:
    """A value of an env file: what is in its quotes, or what stands before a comment."""
    if value[:1] in ("'", '"') and (end := value.find(value[0], 1)) > 0:
        return value[1:end]
    return re.split(r"\s#", value, maxsplit=1)[0].rstrip()


def _port_number(port: str | int) -> int:
    """A port as testcontainers accepts it: 9093, "9093", "9093/tcp"."""
    return int(str(port).partition("/")[0])
