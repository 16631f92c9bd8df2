"""A broker with the methods of testcontainers' `KafkaContainer`, so that a suite moves by one import.

There is no container: the broker is an `EmbeddedBroker`, and what only concerns containers (images,
names, networks) is accepted and does nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from tidelog.testing.embedded import EmbeddedBroker, Scalar

_ENVIRONMENT_PREFIX = "KAFKA_"
_OWN_LISTENERS = frozenset(
    "listeners advertised.listeners listener.security.protocol.map inter.broker.listener.name log.dirs heap.opts "
    "controller.listener.names controller.quorum.voters node.id broker.id process.roles zookeeper.connect".split()
)
"""Keys with which images describe their container; the embedded broker has its own values."""


class TidelogContainer:
    """`with TidelogContainer() as kafka: kafka.get_bootstrap_server()`.

    `with_env("KAFKA_NUM_PARTITIONS", "3")` sets `num.partitions`, as Kafka's images do. `process`: the
    broker is a process of its own.
    """

    def __init__(self, image: str = "", port: int = 9093, *, process: bool = False, **_container: Any) -> None:
        self.port = port
        self._config: dict[str, Scalar] = {}
        self._in_process = process
        self._broker: EmbeddedBroker | None = None

    def with_env(self, key: str, value: str) -> TidelogContainer:
        """Set a configuration key of the broker where `key` begins with KAFKA_; other keys do nothing."""
        if key.startswith(_ENVIRONMENT_PREFIX):
            name = key.removeprefix(_ENVIRONMENT_PREFIX).lower().replace("_", ".")
            if name not in _OWN_LISTENERS:
                self._config[name] = value
        return self

    def with_kraft(self) -> TidelogContainer:
        """Nothing to do: the broker is its own controller."""
        return self

    def with_cluster_id(self, cluster_id: str) -> TidelogContainer:
        """Accepted; the broker makes an id of its own."""
        return self

    def with_name(self, name: str) -> TidelogContainer:
        """Accepted; there is no container to name."""
        return self

    def with_kwargs(self, **_container: Any) -> TidelogContainer:
        """Accepted; there is no container to configure."""
        return self

    def with_exposed_ports(self, *ports: int) -> TidelogContainer:
        """Accepted; `get_exposed_port` returns the broker's port."""
        return self

    def get_bootstrap_server(self) -> str:
        """host:port, for `bootstrap.servers`."""
        return self._running().bootstrap_servers

    def get_container_host_ip(self) -> str:
        return self.get_bootstrap_server().rpartition(":")[0]

    def get_exposed_port(self, port: int | None = None) -> int:
        """The port of the broker, whichever `port` of the container is asked for."""
        return int(self.get_bootstrap_server().rpartition(":")[2])

    def start(self, timeout: float = 30.0) -> TidelogContainer:
        """Start the broker; returns when it serves."""
        if self._broker is None:
            self._broker = EmbeddedBroker(config=self._config, process=self._in_process).start()
        return self

    def stop(self, force: bool = True, delete_volume: bool = True) -> None:
        """Stop the broker and delete its data."""
        broker, self._broker = self._broker, None
        if broker is not None:
            broker.stop()

    def _running(self) -> EmbeddedBroker:
        if self._broker is None:
            raise RuntimeError("the broker is stopped; call start() or use a with block")
        return self._broker

    def __enter__(self) -> TidelogContainer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
