"""A node in a process of its own under each attack: it lives, its memory is bounded, and another client is served."""

from __future__ import annotations

import asyncio
import resource
from pathlib import Path

import pytest

from tests.doses import is_large
from tidelog.bench.hostile.__main__ import ALL, Victim, prepare, under_attack
from tidelog.broker.network.server_limits import RECEIVE_BYTES_MAX
from tidelog.testing.processes import TidelogProcess

pytestmark = pytest.mark.hunt

ATTACK_S = 2.0 if is_large() else 0.5
# Of the node without clients, and what a thousand groups, sessions and parked requests add to it.
NODE_MIB = 300
# Whatever else this machine does meanwhile; unhurt it is a few milliseconds.
PATIENCE_MS = 2_000


def test_nobody_else_is_hurt(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with TidelogProcess(tmp_path, options={"group.initial.rebalance.delay.ms": "0"}) as server:
        prepare(server.port)
        victim = Victim(server.port)
        try:
            for name in ALL:
                outcome = asyncio.run(under_attack(server, victim, name, ATTACK_S))
                assert outcome.count > 10, outcome
                assert outcome.p99_ms < PATIENCE_MS, outcome
                assert outcome.most_mib < NODE_MIB + RECEIVE_BYTES_MAX / 2**20, outcome
        finally:
            victim.stop()
        log = server.output_file.read_text()
        assert "Traceback" not in log
        assert "refusing" not in log or "ulimit" in log
        assert log.count("closing connection") < 30
