"""What docs/testing.md and docs/deployment.md tell people to write works."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, line_of
from tests.unit.test_documented_commands import parse
from tidelog import EmbeddedBroker
from tidelog.broker.config.node_config import NodeConfig
from tidelog.cli.commands import cli
from tidelog.client import TopicPartition
from tidelog.client.sync import Admin, Consumer, Producer
from tidelog.testing.ports import free_port
from tidelog.testing.processes import accepts

ROOT = Path(__file__).resolve().parents[2]
TESTING = (ROOT / "docs" / "testing.md").read_text()
DEPLOYMENT = (ROOT / "docs" / "deployment.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


EXAMPLES = [block for block in blocks(TESTING, "python") if not block.startswith("# conftest.py")]
(CONFTEST,) = [block for block in blocks(TESTING, "python") if block not in EXAMPLES]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_of_a_test_passes(number: int, tmp_path: Path):
    (tmp_path / "test_example.py").write_text(EXAMPLES[number])
    run_pytest(tmp_path)


USERS_TEST = """
import pytest
from tidelog.client.sync import Producer

@pytest.mark.parametrize("number", range(4))
def test_the_broker_is_there(number):
    with Producer(bootstrap_servers="127.0.0.1:9092") as producer:
        producer.send_and_wait("orders", b"x")
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_conftest_for_a_port_serves_every_worker(workers: int, tmp_path: Path):
    port = str(free_port())
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("9092", port))
    (tmp_path / "test_users.py").write_text(USERS_TEST.replace("9092", port))
    run_pytest(tmp_path, *(["-p", "xdist", "-n", str(workers)] if workers else []))
    assert not accepts(int(port))


def run_pytest(directory: Path, *arguments: str) -> None:
    # The plugin of this checkout, whichever is installed; and not as a part of the run that this test belongs to.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tidelog.testing.pytest_plugin",
            "-p",
            "no:cacheprovider",
            *arguments,
        ],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_the_configuration_is_one(tmp_path: Path):
    (text,) = blocks(DEPLOYMENT, "yaml")
    file = tmp_path / "node.yaml"
    file.write_text(text)
    config = NodeConfig.load(file)
    assert (config["metrics.port"], config["log.dirs"]) == (9404, ["/var/lib/tidelog"])


def test_the_unit_is_one(tmp_path: Path):
    (unit,) = blocks(DEPLOYMENT, "ini")
    (command,) = re.findall(r"^ExecStart=(\S+) (.*)$", unit, re.MULTILINE)
    parse(cli, command[1].split(), None, "tidelog")
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed: the words of the unit are not checked")
    file = tmp_path / "tidelog.service"
    file.write_text(unit.replace(command[0], sys.executable).replace("User=tidelog\n", ""))
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(file)], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert [line for line in (done.stdout + done.stderr).splitlines() if "tidelog.service" in line] == []


@pytest.mark.slow
def test_the_container_starts_a_node_that_is_found_healthy(tmp_path: Path):
    (text,) = blocks(DEPLOYMENT, "dockerfile")
    entry, arguments, health = (
        json.loads(re.findall(rf"^{words} (\[.*\])$", text, re.MULTILINE)[0])
        for words in ("ENTRYPOINT", "CMD", "HEALTHCHECK .* CMD")
    )
    words = [*entry[1:], *arguments]
    parse(cli, words, None, "tidelog")
    config = dict(each.split("=", 1) for each in words[1:] if each != "-o")
    port = free_port()
    own = {
        "log.dirs": str(tmp_path / "data"),
        "listeners": f"PLAINTEXT://127.0.0.1:{free_port()}",
        "metrics.port": str(port),
    }
    config |= own
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tidelog",
            "start",
            *(each for key in config for each in ("-o", f"{key}={config[key]}")),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert "ready" in line_of(process)
        check = [sys.executable, *(word.replace("9404", str(port)) for word in health[1:])]
        assert subprocess.run(check, timeout=PATIENCE_S, check=False).returncode == 0
        process.terminate()
        _, log = process.communicate(timeout=PATIENCE_S)
        assert "everything is on disk" in log
        assert subprocess.run(check, stderr=subprocess.DEVNULL, timeout=PATIENCE_S, check=False).returncode == 1
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.slow
def test_a_directory_is_backed_up_and_put_back(tmp_path: Path):
    home, archive = tmp_path / "tidelog", tmp_path / "backup.tar.gz"

    def write(value: bytes) -> None:
        with EmbeddedBroker(home) as broker, Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
            producer.send_and_wait("kept", value, partition=0)
            with Consumer(bootstrap_servers=broker.bootstrap_servers, group_id="g") as consumer:
                consumer.commit({TopicPartition("kept", 0): 1})

    write(b"before")
    with tarfile.open(archive, "w:gz") as files:
        files.add(home, "tidelog")
    write(b"after")
    shutil.rmtree(home)
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    with EmbeddedBroker(home) as broker:
        with Consumer("kept", bootstrap_servers=broker.bootstrap_servers, auto_offset_reset="earliest") as consumer:
            assert next(iter(consumer)).value == b"before"
        with Admin(bootstrap_servers=broker.bootstrap_servers) as admin:
            kept = TopicPartition("kept", 0)
            (end,) = admin.list_offsets({kept: "latest"}).values()
            assert end is not None
            assert end.offset == 1
            assert admin.list_group_offsets("g")[kept].offset == 1
