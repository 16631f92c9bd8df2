"""Commands whose standard streams are closed, full, or read only in part; and bytes that are not UTF-8 in arguments."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, line_of, wait_until
from tidelog.cli.commands import LazyGroup
from tidelog.cli.main import main
from tidelog.client.sync import Producer
from tidelog.testing import EmbeddedBroker, produced

pytestmark = pytest.mark.slow  # each starts processes

ROOT = Path(__file__).resolve().parents[3]
NO_DESCRIPTOR = "Bad file descriptor"


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with EmbeddedBroker() as broker, Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
        for _ in range(5_000):
            producer.send("numbers", b"x" * 100)
        producer.flush()
        yield broker.bootstrap_servers


def shell(line: str, bootstrap: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """The outcome of a line of bash, in which `tidelog` is the command line; a pipe fails with any of its parts."""
    start = f'set -o pipefail; tidelog() {{ {sys.executable} -m tidelog "$@"; }}\n'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TIDELOG_BOOTSTRAP_SERVER": bootstrap, **variables}
    return subprocess.run(
        ["bash", "-c", start + line], env=environment, capture_output=True, timeout=PATIENCE_S, check=False
    )


def committed(group: str, bootstrap: str) -> int:
    described = json.loads(shell(f"tidelog groups describe {group} --json", bootstrap).stdout)
    return sum(each["current_offset"] or 0 for one in described for each in one["offsets"])


@pytest.mark.parametrize(
    ("words", "err"),
    [
        ("topics list >&-", f"cannot write standard output: {NO_DESCRIPTOR}"),
        ("--version >&-", NO_DESCRIPTOR),
        ("--help >/dev/full", "No space left on device"),
        ("consume numbers -o earliest -e >&-", f"cannot write standard output: {NO_DESCRIPTOR}"),
        ("topics list >/dev/full", "cannot write standard output: No space left on device"),
        ("topics describe --json >/dev/full", "cannot write standard output: No space left on device"),
        ("consume numbers -o earliest -e >/dev/full", "cannot write standard output: No space left on device"),
        ("produce closed <&-", f"cannot read standard input: {NO_DESCRIPTOR}"),
    ],
)
def test_a_stream_that_cannot_be_used_is_one_line(bootstrap: str, words: str, err: str):
    done = shell(f"tidelog {words}", bootstrap)
    assert (done.returncode, done.stdout, done.stderr.decode()) == (1, b"", f"tidelog: {err}\n")


@pytest.mark.parametrize("words", ["start", "cluster start --detach"])
def test_a_working_directory_that_is_gone_is_named(bootstrap: str, tmp_path: Path, words: str):
    (tmp_path / "gone").mkdir()
    done = shell(f"cd {tmp_path}/gone; rmdir {tmp_path}/gone; tidelog {words}", bootstrap)
    expected = "tidelog: the working directory: No such file or directory\n"
    assert (done.returncode, done.stdout, done.stderr.decode()) == (1, b"", expected)


@pytest.mark.parametrize(
    "words", ["topics list <&-", "consume numbers -o -1 -e <&-", "topics list 2>&-", "topics create quiet 2>&- <&-"]
)
def test_a_closed_stream_that_is_not_used_does_not_matter(bootstrap: str, words: str):
    done = shell(f"tidelog {words}", bootstrap)
    assert done.returncode == 0
    assert done.stdout


@pytest.mark.parametrize(
    "words",
    ["top --once -d 0.1", "topics describe --configs numbers", "consume numbers -o earliest", "brokers list", "--help"],
)
def test_a_reader_that_has_enough_is_no_failure(bootstrap: str, words: str):
    done = shell(f"tidelog {words} | head -c 1", bootstrap)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 1, b"")


def test_a_reader_that_has_enough_does_not_end_the_work(bootstrap: str):
    names = [f"gone{number}" for number in range(4)]
    for name in names:
        shell(f"tidelog topics create {name}", bootstrap)
    done = shell(f"tidelog topics delete {' '.join(names)} missing | :", bootstrap)
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert b"UNKNOWN_TOPIC_OR_PARTITION: topic 'missing'" in done.stderr
    assert shell("tidelog topics list | grep gone", bootstrap).stdout == b""


@pytest.mark.parametrize("output", [">/dev/full", ">&-", "| head -c 1"])
def test_a_group_keeps_what_could_not_be_written(bootstrap: str, output: str):
    group = f"kept-{output.strip('>|/& ').split()[0].replace('/', '-')}"
    shell(f"tidelog consume numbers -g {group} --from-beginning -n 100 >/dev/null", bootstrap)
    assert committed(group, bootstrap) == 100
    shell(f"tidelog consume numbers -g {group} {output}", bootstrap)
    assert committed(group, bootstrap) in ((100,) if "head" not in output else (100, 2100))


@pytest.mark.parametrize("variables", [{}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_bytes_of_arguments_are_sent_as_they_are(bootstrap: str, variables: dict[str, str]):
    topic = f"bytes{len(variables)}"
    lines = rf"""printf 'k\377v\n\376\377v\n' |
        tidelog produce {topic} -q -k $'\377' --null $'\376' -H $'h=\xc3\xa9\377' -H 'h= b ' &&
        tidelog consume {topic} -o earliest -e -f $'{{key}}\377{{value}} {{headers}}'"""
    done = shell(lines, bootstrap, **variables)
    assert (done.returncode, done.stderr) == (0, b"2 records\n")
    assert done.stdout == b"".join(key + b"\xffv h=\xc3\xa9\xff,h= b \n" for key in (b"k", b"null"))


def test_a_header_without_a_readable_name_is_wrong_usage(bootstrap: str):
    for header in (r"$'\377=1'", "=1", "name"):
        done = shell(f"echo x | tidelog produce headers -H {header}", bootstrap)
        assert (done.returncode, b"Traceback" in done.stderr, b"--header" in done.stderr) == (2, False, True), done


STARTING = "import sys; from tidelog.cli.main import main; print('begins', flush=True); sys.exit(main())"


def test_a_start_that_is_interrupted_says_so(tmp_path: Path):
    """Ctrl-C at any moment before the node handles it. CPython ends some of them by the signal, after the line."""
    for delay_s in (0.03, 0.06, 0.1, 0.15, 0.2, 0.3):
        process = subprocess.Popen(
            [sys.executable, "-c", STARTING, "start", "-o", f"log.dirs={tmp_path / str(delay_s)}"]
            + ["-o", "listeners=PLAINTEXT://127.0.0.1:0"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert line_of(process) == b"begins\n"  # a moment earlier Python itself prints a traceback
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=PATIENCE_S)[1].decode()
        assert process.returncode in (0, 1, -signal.SIGINT)
        assert process.returncode == 0 or err == "tidelog: interrupted\n"


INTERRUPTED_CLASS = """
import sys, tidelog.cli.commands
from tidelog.cli.main import main

class Interrupted:
    def __set_name__(self, owner, name):
        raise KeyboardInterrupt

def run(arguments):
    type("Made", (), {"attribute": Interrupted()})

tidelog.cli.commands.run = run
sys.exit(main([]))
"""


@pytest.mark.parametrize("words", ["--help", "--version", "topics --help", "topics list --help"])
def test_help_whose_reader_has_closed_the_pipe_is_no_failure(words: str):
    """It was a failure, at the top with the line `Broken pipe`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tidelog", *words.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(
            command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=PATIENCE_S, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_one_that_is_interrupted_while_its_words_are_read_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The test above meets these moments on a loaded machine alone."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for moment in ("make_context", "parse_args", "invoke"):
        with monkeypatch.context() as patches:
            patches.setattr(LazyGroup, moment, interrupt)
            assert main(["topics", "list"]) == 1
        assert capsys.readouterr() == ("", "tidelog: interrupted\n")


def test_a_start_that_is_interrupted_while_a_class_is_made_says_so():
    """CPython 3.11 raises a RuntimeError then, with the interrupt as its cause."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_CLASS],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "tidelog: interrupted\n")


def test_what_a_client_logs_names_the_command() -> None:
    """It was a bare line, between others that begin with `tidelog:`."""
    program = (
        "import logging; from tidelog.cli.main import main; main(['--version'])\n"
        "logging.getLogger('tidelog.client.groups').warning('group %r', 'a')\n"
        "logging.getLogger('asyncio').error('a fault', exc_info=ValueError('x'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.stderr == "tidelog: warning: group 'a'\ntidelog: error: a fault\nValueError: x\n"


def test_a_log_record_that_cannot_be_written_does_not_end_the_command() -> None:
    """The reader of standard error has ended. The event loop logs a fault of a callback, and goes on."""
    program = (
        "import asyncio, os; from tidelog.cli.main import main; main(['--version'])\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 2)\n"
        "async def go_on():\n"
        "    asyncio.get_running_loop().call_soon(int, 'no number')\n"
        "    await asyncio.sleep(0.01)\n"
        "    os.write(1, b'goes on')\n"
        "    os._exit(0)\n"
        "asyncio.run(go_on())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("goes on")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_producer_that_is_interrupted_sends_and_counts_what_it_has_read(bootstrap: str, number: signal.Signals):
    """Kafka's console producer flushes, too. Half a line is none: the rest of it was never read."""
    topic = f"interrupted-{number}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tidelog", "produce", topic, "-b", bootstrap, "-X", "linger.ms=15000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdin is not None
    pipe = process.stdin
    pipe.write(b"one\ntwo\nhal")
    pipe.flush()
    wait_until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, b"0000") == bytes(4))
    process.send_signal(number)
    assert process.wait(timeout=PATIENCE_S) == 1
    assert process.stderr is not None
    assert process.stderr.read() == b"2 records\ntidelog: interrupted\n"
    pipe.close()
    process.stderr.close()
    assert shell(f"tidelog consume {topic} -o earliest -e", bootstrap).stdout == b"one\ntwo\n"


@pytest.mark.parametrize("is_given_up", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_comes_twice_ends_a_producer_as_one_does(
    tmp_path: Path, number: signal.Signals, is_given_up: bool
):
    """timeout(1) sends SIGTERM twice, and a terminal that closes SIGHUP. One that comes later ends the command."""
    with EmbeddedBroker(tmp_path / "data", process=True) as broker:
        process = subprocess.Popen(
            [sys.executable, "-m", "tidelog", "produce", "twice", "-b", broker.bootstrap_servers],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdin is not None
        pipe = process.stdin
        pipe.write(b"one\n")
        pipe.flush()
        produced(broker, "twice", 1, timeout_s=PATIENCE_S)
        broker.pause()
        pipe.write(b"two\n")
        pipe.flush()
        wait_until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, b"0000") == bytes(4))
        for _ in range(3):
            process.send_signal(number)
            time.sleep(0.05)
        if is_given_up:
            time.sleep(1.1)
            process.send_signal(number)
            assert process.wait(timeout=PATIENCE_S) == -number
        broker.resume()
        err = process.communicate(timeout=PATIENCE_S)[1]
    if not is_given_up:
        assert (process.returncode, err) == (1, b"2 records\ntidelog: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_a_member_whose_broker_hangs(tmp_path: Path, number: signal.Signals):
    """Its commit and its leave take the whole API timeout, and further signals changed nothing."""
    with EmbeddedBroker(tmp_path / "data", process=True) as broker:
        with Producer(bootstrap_servers=broker.bootstrap_servers) as producer:
            producer.send("read", b"one").result(timeout=PATIENCE_S)
        words = [sys.executable, "-m", "tidelog", "consume", "read", "-g", "readers", "-b", broker.bootstrap_servers]
        process = subprocess.Popen(
            [*words, "-o", "earliest", "-X", "default.api.timeout.ms=3600000"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None
        try:
            assert line_of(process) == b"one\n"
            broker.pause()
            process.send_signal(number)
            time.sleep(1.5)
            process.send_signal(number)
            assert process.wait(timeout=PATIENCE_S) == -number
        finally:
            process.kill()
            process.wait(timeout=PATIENCE_S)
            process.stdout.close()
            broker.resume()


@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_more_lines_than_are_kept_unacknowledged_do_not_wait_for_their_linger(
    bootstrap: str, number: signal.Signals | None
):
    """A thousand lines were sent in each linger time, also after a signal, which took minutes to end the command."""
    topic = f"lingering-{number}"
    process = subprocess.Popen(
        [sys.executable, "-m", "tidelog", "produce", topic, "-b", bootstrap, "-X", "linger.ms=3600000"]
        + ["-X", "delivery.timeout.ms=7200000", "-X", "batch.size=1000000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    pipe = process.stdin
    try:
        pipe.write(b"line\n" * 5000)
        pipe.flush()
        if number is None:
            pipe.close()
        else:
            wait_until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, b"0000") == bytes(4))
            process.send_signal(number)
        assert process.wait(timeout=PATIENCE_S) == (0 if number is None else 1)
        assert process.stderr.read() == b"5,000 records\n" + (b"" if number is None else b"tidelog: interrupted\n")
    finally:
        process.kill()
        process.wait(timeout=PATIENCE_S)
        pipe.close()
        process.stderr.close()


def test_a_producer_whose_broker_has_gone_says_why(tmp_path: Path):
    with EmbeddedBroker(tmp_path / "data", process=True) as broker:
        words = [sys.executable, "-m", "tidelog", "produce", "left", "-b", broker.bootstrap_servers]
        patience = ["-X", "delivery.timeout.ms=2000", "-X", "request.timeout.ms=1000"]
        process = subprocess.Popen(
            words + patience,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(b"one\n")
        process.stdin.flush()
        produced(broker, "left", 1, timeout_s=PATIENCE_S)
        broker.kill()
        err = process.communicate(b"two\n", timeout=PATIENCE_S)[1].decode()
        assert process.returncode == 1
        assert err.startswith(
            "tidelog: REQUEST_TIMED_OUT: from line 2 on: left-0: not delivered within delivery_timeout_ms=2000, after "
        )
        assert err.endswith(f": cannot connect to {broker.bootstrap_servers}: Connection refused\n")
