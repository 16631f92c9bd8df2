"""A program may give its event loop a task factory: the clients' background tasks do not depend on it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import tidelog.client
from tests.patience import PATIENCE_S
from tests.unit.client.fake_broker import FakeCluster
from tests.unit.client.test_other_loops import CLIENTS, made, use
from tidelog.client.network import cluster as cluster_module
from tidelog.client.network.connection import connect
from tidelog.protocol.errors import ErrorCode, KafkaError

EAGER: Any = getattr(asyncio, "eager_task_factory", None)
CLIENT = Path(tidelog.client.__file__).parent


class RefusedAtOnce:
    """As a closed port of loopback on Linux, which refuses a connection before `connect` returns."""

    def __init__(self, count: int) -> None:
        self.count = count

    async def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.count:
            self.count -= 1
            raise KafkaError(ErrorCode.NETWORK_EXCEPTION, "refused")
        return await connect(*arguments, **options)


@pytest.mark.skipif(EAGER is None, reason="eager tasks are there from Python 3.12 on")
@CLIENTS
def test_with_eager_tasks_a_client_connects_after_attempts_that_failed_at_once(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_module, "connect", RefusedAtOnce(2))

    async def run() -> None:
        async with FakeCluster(t=1) as cluster:
            asyncio.get_running_loop().set_task_factory(EAGER)
            async with asyncio.timeout(PATIENCE_S), made(client, cluster) as started:
                await use(started)

    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:  # uvloop takes no eager factory
        runner.run(run())


def test_no_module_of_the_asynchronous_clients_asks_the_loop_for_a_task() -> None:
    modules = [path for path in CLIENT.rglob("*.py") if "sync" not in path.relative_to(CLIENT).parts]
    assert [path.name for path in modules if "create_task(" in path.read_text()] == []
