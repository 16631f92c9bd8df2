"""`tidelog start` as a process: what it prints, how it ends, and one line for everything that can be wrong outside."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, line_of
from tidelog.client.sync import Producer
from tidelog.testing.ports import free_port

pytestmark = pytest.mark.slow  # each starts a process

ROOT = Path(__file__).resolve().parents[3]


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "tidelog", "start", *map(str, words)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def refused(*words: str | Path, cwd: Path, after: str = "") -> str:
    """The one line of a start that fails; a line with `after` may come before it."""
    done = subprocess.run(
        command(*words), cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 1, done
    assert done.stdout == ""
    (line,) = [each for each in done.stderr.splitlines() if not after or after not in each]
    assert line.startswith("tidelog: ")
    return line


@pytest.fixture
def node(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A node on a free port with its data in tmp_path/data, read up to its first line."""
    options = ["-o", f"listeners=PLAINTEXT://127.0.0.1:{free_port()}", "-o", f"log.dirs={tmp_path / 'data'}"]
    process = subprocess.Popen(
        command(*options), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_says_its_address_first_and_ends_cleanly(
    node: subprocess.Popen[str], number: signal.Signals, tmp_path: Path
):
    assert node.stdout is not None
    first = line_of(node)
    assert first.startswith("tidelog 0.")
    assert "ready: PLAINTEXT://127.0.0.1:" in first
    assert str(tmp_path / "data") in first
    node.send_signal(number)
    out, err = node.communicate(timeout=PATIENCE_S)
    assert (node.returncode, out, "Traceback" in err) == (0, "", False)
    assert (tmp_path / "data" / ".kafka_cleanshutdown").exists()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_a_node_outlives_the_signals_of_a_terminal_that_its_caller_ignores(tmp_path: Path, number: signal.Signals):
    """nohup ignores SIGHUP, the shell of a script ignores SIGINT for each command with `&`."""
    options = ["-o", "listeners=PLAINTEXT://127.0.0.1:0", "-o", f"log.dirs={tmp_path / 'data'}"]
    deaf = ["bash", "-c", f"trap '' {number.name}; exec \"$@\"", "bash", *command(*options)]
    process = subprocess.Popen(
        deaf, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = line_of(process).partition("://")[2].partition(" ")[0]
        process.send_signal(number)
        with Producer(bootstrap_servers=address) as producer:
            assert producer.send_and_wait("kept", b"one record").offset == 0
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_a_node_says_what_its_start_recovered_and_that_it_stopped(tmp_path: Path):
    options = ["-o", "listeners=PLAINTEXT://127.0.0.1:0", "-o", f"log.dirs={tmp_path / 'data'}"]

    def run(number: signal.Signals) -> str:
        """A node's log, from its start until the signal; it creates a topic and takes a record."""
        process = subprocess.Popen(
            command(*options),
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            address = line_of(process).partition("://")[2].partition(" ")[0]
            with Producer(bootstrap_servers=address, acks="all") as producer:
                producer.send_and_wait("kept", b"one record")
            process.send_signal(number)
            return process.communicate(timeout=PATIENCE_S)[1]
        finally:
            process.kill()
            process.communicate(timeout=PATIENCE_S)

    first, second, third = (run(number) for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM))
    assert "logs opened" not in first
    assert re.search(
        r"data: the last process was killed: [\d,]+ bytes in 2 of its logs were scanned, 0 bytes were cut", second
    )
    assert re.search(r"INFO tidelog.node: logs opened: 1, in \d+\.\d\d s\n", second)
    assert second.endswith("node 1 has stopped, everything is on disk\n")
    assert "scanned" not in third


def test_it_lives_and_ends_well_when_nobody_reads_its_output(tmp_path: Path):
    reading, writing = os.pipe()
    os.close(reading)
    port = free_port()
    words = ["-o", f"listeners=PLAINTEXT://127.0.0.1:{port}", "-o", f"log.dirs={tmp_path / 'data'}"]
    process = subprocess.Popen(command(*words), env=environment(), stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not answers(port) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        lines = process.communicate(timeout=PATIENCE_S)[1].splitlines()
        assert [line for line in lines if not line.endswith("node 1 has stopped, everything is on disk")] == []
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def test_a_second_node_in_the_same_directory_is_refused(node: subprocess.Popen[str], tmp_path: Path):
    assert node.stdout is not None
    line_of(node)
    port = free_port()
    line = refused("-o", f"listeners=PLAINTEXT://127.0.0.1:{port}", "-o", f"log.dirs={tmp_path / 'data'}", cwd=tmp_path)
    assert str(tmp_path / "data") in line


def test_a_busy_port_is_refused_before_a_directory_is_made(tmp_path: Path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        line = refused("-o", f"listeners=PLAINTEXT://127.0.0.1:{port}", cwd=tmp_path)
    assert line == (
        f"tidelog: cannot listen on 127.0.0.1:{port}: Address already in use "
        "(does a node run already? another port: `-o listeners=PLAINTEXT://HOST:PORT`, `-o metrics.port=PORT`)"
    )
    assert list(tmp_path.iterdir()) == []


def test_one_port_for_clients_and_for_metrics_is_refused(tmp_path: Path):
    port = free_port()
    words = ["-o", f"listeners=PLAINTEXT://127.0.0.1:{port}", "-o", f"metrics.port={port}"]
    line = refused(*words, cwd=tmp_path, after="metrics and health at")
    assert line.startswith(f"tidelog: cannot listen on 127.0.0.1:{port}: Address already in use (")


@pytest.mark.parametrize(
    ("directories", "problem"),
    [
        ("{here}/file", "{here}/file: the log directory cannot be used: it is not a directory"),
        ("{here}/file/below", "{here}/file/below: the log directory cannot be used: {here}/file is not a directory"),
        ("{here}/dangling", "{here}/dangling: the log directory cannot be used: it is a link that leads nowhere"),
        ("/dev/null", "/dev/null: the log directory cannot be used: it is not a directory"),
        ("/proc/tidelog", "/proc/tidelog: the log directory cannot be used: "),
        ("{here}/" + "x" * 300, "the log directory cannot be used: File name too long"),
        ("{here}", "is not empty and has no meta.properties: it holds "),
        ("nul", "log.dirs holds a NUL character"),
    ],
)
def test_a_log_directory_that_cannot_be_one(tmp_path: Path, directories: str, problem: str):
    (tmp_path / "file").write_text("not ours")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    config = tmp_path / "config"
    config.mkdir()
    given = directories.format(here=tmp_path) if directories != "nul" else "a\0b"
    (config / "node.yaml").write_text(
        f"listeners: PLAINTEXT://127.0.0.1:{free_port()}\nlog.dirs: {json.dumps(given)}\n"
    )
    line = refused(config / "node.yaml", cwd=config)
    assert problem.format(here=tmp_path) in line
    assert (tmp_path / "file").read_text() == "not ours"


def test_a_wrong_key_names_the_right_one(tmp_path: Path):
    line = refused("-o", "log.retention.hour=1", cwd=tmp_path)
    assert "log.retention.hour" in line
    assert "log.retention.hours" in line


def test_a_wrong_value_is_refused(tmp_path: Path):
    assert "num.partitions" in refused("-o", "num.partitions=many", cwd=tmp_path)


def test_a_wrong_key_in_a_file_names_the_file_or_the_key(tmp_path: Path):
    file = tmp_path / "node.yaml"
    file.write_text("node.idd: 1\n")
    assert "node.idd" in refused(file, cwd=tmp_path)


def test_a_missing_file_is_refused(tmp_path: Path):
    assert "nowhere.yaml" in refused("nowhere.yaml", cwd=tmp_path)


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path):
    file = tmp_path / "node.yaml"
    file.write_text("- just\n- a list\n")
    refused(file, cwd=tmp_path)
    file.write_text("a: [\n")
    refused(file, cwd=tmp_path)
    file.write_text("node.id: &itself [*itself]\n")
    assert "nested without end" in refused(file, cwd=tmp_path)
    assert "Is a directory" in refused(tmp_path, cwd=tmp_path)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    port = free_port()
    words = ["-o", f"listeners=PLAINTEXT://127.0.0.1:{port}", "-o", f"log.dirs={tmp_path / 'file' / 'data'}"]
    assert str(tmp_path / "file") in refused(*words, cwd=tmp_path)


def test_a_directory_of_another_node_is_refused(node: subprocess.Popen[str], tmp_path: Path):
    assert node.stdout is not None
    line_of(node)
    node.terminate()
    node.communicate(timeout=PATIENCE_S)
    words = ["-o", f"listeners=PLAINTEXT://127.0.0.1:{free_port()}", "-o", f"log.dirs={tmp_path / 'data'}"]
    line = refused("-o", "node.id=7", *words, cwd=tmp_path)
    assert str(tmp_path / "data") in line
    assert "7" in line


# As it comes with Kafka 4.3, but for ports and the directory.
STOCK = """\
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=localhost:{controller}
listeners=PLAINTEXT://:{broker},CONTROLLER://:{controller}
inter.broker.listener.name=PLAINTEXT
advertised.listeners=PLAINTEXT://localhost:{broker},CONTROLLER://localhost:{controller}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT,\
SASL_SSL:SASL_SSL
num.network.threads=3
num.io.threads=8
socket.send.buffer.bytes=102400
socket.receive.buffer.bytes=102400
socket.request.max.bytes=104857600
log.dirs={data}
num.partitions=1
num.recovery.threads.per.data.dir=2
offsets.topic.replication.factor=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
log.retention.hours=168
log.segment.bytes=1073741824
log.retention.check.interval.ms=300000
"""


def formatted(file: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tidelog", "format", str(file), *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.strip()


def test_kafkas_stock_configuration_says_what_it_needs_and_then_starts(tmp_path: Path):
    file = tmp_path / "server.properties"
    file.write_text(STOCK.format(broker=free_port(), controller=free_port(), data=tmp_path / "data"))
    line = refused(file, cwd=tmp_path)
    assert f"{tmp_path / 'data'} is not formatted" in line
    assert "`tidelog format --standalone`" in line
    assert not (tmp_path / "data").exists()
    # Formatted as a node that joins others, it waits and says for whom; made the first voter after that, it starts.
    cluster_id = formatted(file)
    process = subprocess.Popen(
        command(file), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        said = line_of(process, process.stderr)
        assert "waits for a controller at localhost:" in said
        assert "`tidelog format --standalone`" in said
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    assert formatted(file, "--standalone") == cluster_id
    process = subprocess.Popen(command(file), cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert f"(cluster {cluster_id}, " in line_of(process)
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


def other_voters(content: bytes) -> bytes:
    state = json.loads(content)
    state["currentVoters"] = [{"voterId": 7}, {"voterId": 8}]
    del state["checksum"]  # as Kafka writes it
    return json.dumps(state).encode()


def test_other_voters_than_in_the_vote_file_are_one_line_that_says_what_to_do(
    node: subprocess.Popen[str], tmp_path: Path
):
    assert node.stdout is not None
    assert line_of(node)
    node.send_signal(signal.SIGTERM)
    node.wait(PATIENCE_S)
    path = tmp_path / "data" / "__cluster_metadata-0" / "quorum-state"
    path.write_bytes(other_voters(path.read_bytes()))
    words = ["-o", f"listeners=PLAINTEXT://127.0.0.1:{free_port()}", "-o", f"log.dirs={tmp_path / 'data'}"]
    line = refused(*words, cwd=tmp_path)
    assert "configure the same voters as before" in line
    assert "quorum-state" in line


def test_a_damaged_bootstrap_checkpoint_is_one_line(node: subprocess.Popen[str], tmp_path: Path):
    assert node.stdout is not None
    assert line_of(node)
    node.send_signal(signal.SIGTERM)
    node.wait(PATIENCE_S)
    data = tmp_path / "data"
    shutil.rmtree(data / "__cluster_metadata-0")
    (data / "bootstrap.checkpoint").write_bytes(b"damaged")
    words = ["-o", f"listeners=PLAINTEXT://127.0.0.1:{free_port()}", "-o", f"log.dirs={data}"]
    line = refused(*words, cwd=tmp_path)
    assert str(data / "bootstrap.checkpoint") in line
