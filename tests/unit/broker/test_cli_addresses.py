"""An address that a command prints is one that `-b` takes, of an IPv6 listener too."""

from __future__ import annotations

import pytest

from tidelog.cli.commands import run
from tidelog.protocol.addresses import address_text
from tidelog.testing.embedded import EmbeddedBroker


@pytest.mark.parametrize(
    ("host", "port", "text"), [("h", 1, "h:1"), ("127.0.0.1", 9092, "127.0.0.1:9092"), ("::1", 9092, "[::1]:9092")]
)
def test_an_ipv6_address_has_brackets(host: str, port: int, text: str) -> None:
    assert address_text(host, port) == text


@pytest.mark.slow
def test_addresses_that_commands_print_can_be_given_to_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with EmbeddedBroker(config={"listeners": "PLAINTEXT://[::1]:0"}) as broker:
        address = broker.bootstrap_servers
        assert address.startswith("[::1]:")
        for line in ("brokers list", "brokers describe 1", "top --once"):
            assert run([*line.split(), "-b", address]) == 0
            printed = capsys.readouterr().out
            assert "::1" in printed, line
            assert printed.replace("[::1]:", "").find("::1") == -1, line
    assert run(["topics", "list", "-b", address]) == 1
    assert f"no broker reached at {address}: cannot connect to {address}" in capsys.readouterr().err
