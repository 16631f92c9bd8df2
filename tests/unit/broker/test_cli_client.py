"""The client commands against a real node: what they print, and their exit codes."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S, join
from tidelog import EmbeddedBroker
from tidelog.cli import consume
from tidelog.cli.main import main
from tidelog.testing.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
Cli = Callable[..., tuple[int, bytes, str]]


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.bootstrap_servers


@pytest.fixture
def cli(bootstrap: str, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Runs a command against the node: (exit code, standard output, standard error)."""
    monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", bootstrap)

    def run(*words: str, stdin: bytes = b"") -> tuple[int, bytes, str]:
        reading, writing = os.pipe()
        feeder = threading.Thread(target=_feed, args=(writing, stdin))
        feeder.start()
        with open(reading, "rb") as source:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(source))
            capfdbinary.readouterr()
            status = main(list(words))
        join(feeder)
        out, err = capfdbinary.readouterr()
        return status, out, err.decode()

    return run


def _feed(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb") as pipe:
        try:
            pipe.write(data)
        except BrokenPipeError:
            return


def test_topics_come_and_go(cli: Cli):
    assert cli("topics", "create", "coming", "-p", "2", "-c", "retention.ms=5000")[:2] == (
        0,
        b"Created topic coming.\n",
    )
    assert b"coming\n" in cli("topics", "list")[1]
    assert "coming" in json.loads(cli("topics", "list", "--json")[1])
    ((described,), shown) = json.loads(cli("topics", "describe", "coming", "--json")[1]), cli("topics", "describe")[1]
    assert [part["leader"] for part in described["partitions"]] == [1, 1]
    assert described["configs"] == {"retention.ms": "5000"}
    assert shown.splitlines()[0].split() == b"TOPIC PARTITION LEADER EPOCH REPLICAS ISR OFFLINE".split()
    assert json.loads(cli("topics", "describe", "--under-replicated", "--json")[1]) == []
    assert cli("topics", "delete", "coming")[:2] == (0, b"Deleted topic coming.\n")
    assert b"coming\n" not in cli("topics", "list")[1]


def test_a_misspelt_command_names_the_nearest(cli: Cli):
    status, out, err = cli("topic", "list")
    assert (status, out) == (2, b"")
    assert "No such command 'topic'. Did you mean 'topics'?" in err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("topics", "list", "-b", "a:b:c"), "bootstrap_servers: 'a:b:c' is not host:port"),
        (("topics", "list", "-X", "retires=3"), "Admin has no option 'retires'; did you mean retries?"),
        (("produce", "t", "-X", "linger.ms=x"), "linger_ms must be a whole number, not 'x'"),
        (("reassign", "--json", "missing", "--verify"), "Invalid value for '--json': File 'missing' does not exist."),
        (("top", "--delay", "x"), "Invalid value for '-d' / '--delay': 'x' is not a valid number."),
        (("configs", "alter", "topics", "t", "--set", "x"), "Invalid value for '-s' / '--set': 'x' is not key=value"),
    ],
)
def test_a_wrong_value_is_one_line(cli: Cli, words: tuple[str, ...], problem: str):
    status, out, err = cli(*words)
    assert (status, out, err.count("\n")) == (2, b"", 1)
    assert err.startswith(f"tidelog: {problem}")


@pytest.mark.parametrize("words", [("-b", "x", "topics", "list"), ("topics", "-b", "x", "list")])
def test_an_option_before_its_command_says_where_it_goes(cli: Cli, words: tuple[str, ...]):
    status, out, err = cli(*words)
    assert (status, out) == (2, b"")
    assert "Options go after the command, as in `tidelog topics list -b HOST:PORT`." in err
    assert "go after the command" not in cli("topics", "list", "--foo")[2]


def test_a_pattern_for_a_name_is_named_as_such(cli: Cli):
    status, out, err = cli("topics", "describe", "gree.*")
    assert (status, out) == (1, b"")
    assert "a name is wanted here, no pattern" in err
    assert "no pattern" not in cli("topics", "describe", "gree ting")[2]
    assert "Did you mean" not in cli("frobnicate")[2]
    assert "No such option" in cli("--topic")[2]


def test_a_cluster_that_does_not_answer_is_told_with_what_to_do(cli: Cli):
    status, out, err = cli(
        "topics", "list", "-b", f"127.0.0.1:{free_port()}", "-X", "socket.connection.setup.timeout.ms=50"
    )
    assert (status, out, err.count("\n")) == (1, b"", 1)
    assert err.startswith("tidelog: NETWORK_EXCEPTION: no broker reached at 127.0.0.1:")
    assert ": Connection refused (-b HOST" in err
    assert "TIDELOG_BOOTSTRAP_SERVER say where the cluster is, `tidelog start` runs a node" in err


def test_a_terminal_is_told_what_consume_and_produce_wait_for(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    cli("topics", "create", "silent")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert "waiting for new records; --from-beginning prints" in cli("consume", "silent", "--timeout-ms", "1")[2]
    assert "waiting" not in cli("consume", "silent", "-e")[2]
    assert "waiting" not in cli("consume", "silent", "--from-beginning", "--timeout-ms", "1")[2]
    assert "each line is a record" not in cli("produce", "silent", stdin=b"piped\n")[2]


def test_a_topic_that_is_there_already(cli: Cli):
    cli("topics", "create", "twice")
    status, out, err = cli("topics", "create", "twice")
    assert (status, out) == (1, b"")
    assert err.startswith("tidelog: TOPIC_ALREADY_EXISTS")
    assert err.count("\n") == 1
    assert cli("topics", "create", "twice", "--if-not-exists")[0] == 0


@pytest.mark.parametrize("words", [["describe", "nothing"], ["delete", "nothing"], ["create", "a/b"]])
def test_what_the_cluster_refuses_is_one_line(cli: Cli, words: list[str]):
    status, out, err = cli("topics", *words)
    assert (status, out) == (1, b"")
    assert err.startswith("tidelog: ")
    assert err.count("\n") == 1


def test_lines_go_in_and_come_out(cli: Cli):
    assert cli("produce", "lines", stdin=b"one\ntwo\n\nlast without newline")[2] == "4 records\n"
    status, out, err = cli("consume", "lines", "--from-beginning", "--until-end")
    assert (status, out, err) == (0, b"one\ntwo\n\nlast without newline\n", "4 records\n")


def test_keys_headers_nulls_and_bytes(cli: Cli):
    data = b"a:1\n\xff:\xfe\nn:NULL\n"
    words = ["-k", ":", "--null", "NULL", "-H", "h=v", "-z", "lz4", "-q"]
    assert cli("produce", "keyed", *words, stdin=data) == (0, b"", "")
    out = cli("consume", "keyed", "-o", "0", "-e", "-f", r"{offset}\t{key}\t{value}\t{headers}")[1]
    assert out == b"0\ta\t1\th=v\n1\t\xff\t\xfe\th=v\n2\tn\tnull\th=v\n"
    shown = [json.loads(line) for line in cli("consume", "keyed", "--from-beginning", "-e", "--json")[1].splitlines()]
    assert shown[2]["value"] is None
    assert shown[1]["key_base64"] == "/w=="


def test_what_consume_prints_as_json_can_be_produced_again(cli: Cli):
    cli("topics", "create", "there", "-p", "3")
    lines = [
        {"partition": 2, "timestamp_ms": 7, "key": "k", "value": "text\nof two lines \u00e9", "headers": []},
        {"partition": 0, "timestamp_ms": 1700000000000, "key_base64": "/w==", "value_hex": "00fe", "headers": []},
        {"partition": 0, "timestamp_ms": 9, "key": None, "value": None, "headers": [{"name": "h", "value": "1"}]},
        {"partition": 1, "timestamp_ms": 9, "key": "", "value_json": {"a": [1, "b"]}, "headers": []},
        {"partition": 1, "timestamp_ms": 9, "value": "", "headers": [{"name": "n", "value": None}] * 2},
    ]
    stdin = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    assert cli("produce", "there", "-F", "json", stdin=stdin)[::2] == (0, "5 records\n")
    first = cli("consume", "there", "-o", "earliest", "-e", "--json", "--value-format", "json")[1]
    assert sorted(json.loads(line)["timestamp_ms"] for line in first.splitlines()) == [7, 9, 9, 9, 1700000000000]
    cli("topics", "create", "back", "-p", "3")
    assert cli("produce", "back", "-F", "json", "-q", stdin=first)[0] == 0
    second = cli("consume", "back", "-o", "earliest", "-e", "--json", "--value-format", "json")[1]
    assert sorted(second.replace(b'"back"', b'"there"').splitlines()) == sorted(first.splitlines())


def test_records_of_several_topics_go_back_where_they_came_from(cli: Cli):
    for name in ("left", "right"):
        cli("topics", "create", name)
        cli("produce", name, "-q", stdin=name.encode())
    shown = cli("consume", "left", "right", "-o", "earliest", "-e", "--json")[1]
    assert sorted(json.loads(line)["topic"] for line in shown.splitlines()) == ["left", "right"]
    status, out, _ = cli("produce", "-F", "json", "--json", stdin=shown)
    assert (status, json.loads(out)["topics"]) == (0, ["left", "right"])
    assert cli("consume", "--include", "(left|righ.)", "-o", "-1", "-e")[1].split() in (
        [b"left", b"right"],
        [b"right", b"left"],
    )
    assert cli("consume", "--include", "lef", "-e")[2] == (
        "tidelog: UNKNOWN_TOPIC_OR_PARTITION: there is no topic that matches 'lef'\n"
    )


def test_a_group_reads_the_topics_of_a_pattern(cli: Cli):
    for name in ("pattern-1", "pattern-2", "other-pattern"):
        cli("topics", "create", name)
        cli("produce", name, "-q", stdin=name.encode())
    words = ["--include", r"pattern-\d", "-g", "by-pattern", "--from-beginning", "-n", "2"]
    assert sorted(cli("consume", *words)[1].split()) == [b"pattern-1", b"pattern-2"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"{", "line 2: '{' is not JSON"),
        (b"[1]", "line 2: '[1]' is not a JSON object"),
        (b'{"valu": 1}', "line 2: 'valu' is no field of a record: headers, key, "),
        (b'{"value": 1}', "line 2: value is to be text or null; JSON goes into value_json"),
        (b'{"value": "a", "value_hex": "00"}', "line 2: value and value_hex are both given"),
        (b'{"value_hex": "0"}', "line 2: '0' is not hexadecimal"),
        (b'{"key_base64": "!"}', "line 2: '!' is not base64"),
        (b'{"partition": true}', "line 2: partition is to be a whole number, not True"),
        (b'{"timestamp_ms": 1.5}', "line 2: timestamp_ms is to be a whole number, not 1.5"),
        (b'{"headers": {"a": "b"}}', "line 2: headers is to be a list of objects with name and value"),
        (b'{"headers": [{"value": "b"}]}', "line 2: a header is to be an object with name and value"),
        (b'{"value": "\\ud800"}', "line 2: value has half of a surrogate pair"),
    ],
)
def test_a_json_line_that_is_no_record_is_named(cli: Cli, line: bytes, problem: str):
    status, out, err = cli("produce", "wrong-json", "-F", "json", stdin=b'{"value": "right"}\n' + line + b"\n")
    assert (status, out, err.count("\n")) == (1, b"", 1)
    assert err.startswith(f"tidelog: {problem}")


def test_a_json_line_without_any_topic(cli: Cli):
    assert cli("produce", "-F", "json", stdin=b"{}")[2] == "tidelog: line 1: no topic in it, and no TOPIC given\n"


def test_keys_and_values_in_other_forms(cli: Cli):
    cli("produce", "forms", "-k", ":", "--key-format", "hex", "--value-format", "base64", "-q", stdin=b"00ff:AQI=\n")
    cli("produce", "forms", "-q", "--value-format", "json", stdin=b'{"a": 1}')
    words = ["consume", "forms", "-o", "earliest", "-e", "-f", "{key} {value}"]
    assert cli(*words, "--key-format", "base64", "--value-format", "hex")[1] == b"AP8= 0102\nnull 7b2261223a20317d\n"
    assert cli(*words, "--value-format", "json")[1] == b'\x00\xff \x01\x02\nnull {"a": 1}\n'
    assert cli("produce", "forms", "--value-format", "json", stdin=b"{")[2] == "tidelog: line 1: '{' is not JSON\n"


@pytest.mark.slow
def test_from_a_time_until_a_time(cli: Cli):
    lines = b"".join(b'{"value": "%d", "timestamp_ms": %d000, "partition": 0}\n' % (each, each) for each in range(1, 6))
    cli("produce", "timed", "-F", "json", "-q", stdin=lines)

    def read(*words: str) -> bytes:
        return cli("consume", "timed", *words)[1].replace(b"\n", b" ")

    assert read("--from-time", "2000", "--until-time", "4000") == b"2 3 "
    assert read("--from-time", "1970-01-01T00:00:03.5", "-e") == b"4 5 "
    assert read("--until-time", "1970-01-01T00:00:03Z") == b"1 2 "
    assert read("--until-time", "9000") == b"1 2 3 4 5 "
    assert read("--from-time", "9000", "-e") == b""
    soon = str(int(time.time() * 1000) + 1500)
    assert read("--from-time", "4000", "--until-time", soon) == b"4 5 "
    assert time.time() * 1000 >= int(soon)
    # A record of the time that is waited for ends the wait.
    late = str(int(time.time() * 1000) + 3_600_000)
    cli("produce", "timed", "-F", "json", "-q", stdin=b'{"value": "late", "timestamp_ms": %s}' % late.encode())
    assert read("--from-time", "5000", "--until-time", late) == b"5 "


def test_more_lines_than_fit_a_read(cli: Cli):
    data = b"".join(b"%d %s\n" % (number, b"x" * (number % 300)) for number in range(5000))
    assert cli("produce", "many", "-X", "linger.ms=20", stdin=data)[2] == "5,000 records\n"
    assert cli("consume", "many", "--from-beginning", "-e")[1] == data
    assert cli("consume", "many", "-o", "-2", "-e")[1] == b"".join(data.splitlines(keepends=True)[-2:])
    assert cli("consume", "many", "-o", "4999", "-n", "1")[1] == data.splitlines(keepends=True)[-1]
    assert len(cli("consume", "many", "--from-beginning", "-n", "7")[1].splitlines()) == 7


def test_a_group_goes_on_where_it_was(cli: Cli):
    cli("produce", "grouped", stdin=b"1\n2\n3\n")
    assert cli("consume", "grouped", "-g", "readers", "--from-beginning", "-n", "2")[1] == b"1\n2\n"
    assert cli("consume", "grouped", "-g", "readers", "--from-beginning", "-n", "1")[1] == b"3\n"
    assert cli("consume", "grouped", "-g", "readers", "--timeout-ms", "300")[1] == b""


@pytest.mark.slow
def test_a_groups_silence_begins_when_it_has_assigned_partitions(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    with EmbeddedBroker(config={"group.initial.rebalance.delay.ms": 1500}) as broker:
        monkeypatch.setenv("TIDELOG_BOOTSTRAP_SERVER", broker.bootstrap_servers)
        cli("produce", "grouped", stdin=b"1\n2\n")
        words = ("consume", "grouped", "-g", "readers", "--from-beginning", "--timeout-ms", "300")
        assert cli(*words)[1] == b"1\n2\n"
        cli("produce", "grouped", stdin=b"3\n")
        monkeypatch.setattr("tidelog.cli.consume._JOIN_MS", 200)
        assert cli(*words)[1] == b""  # a group that assigns nothing is not waited for without end


def test_a_partition_that_is_not_there(cli: Cli):
    cli("topics", "create", "small", "-p", "1")
    assert cli("consume", "small", "-p", "3", "-e")[2] == "tidelog: UNKNOWN_TOPIC_OR_PARTITION: there is no small-3\n"
    assert cli("consume", "not-there", "-e")[2] == "tidelog: UNKNOWN_TOPIC_OR_PARTITION: there is no not-there\n"
    assert b"not-there" not in cli("topics", "list")[1]


def test_a_group_of_a_topic_that_is_not_there(cli: Cli):
    assert cli("consume", "not-there", "-g", "readers")[::2] == (
        1,
        "tidelog: UNKNOWN_TOPIC_OR_PARTITION: there is no not-there\n",
    )


@pytest.mark.slow
def test_an_offset_beyond_the_end_waits_there(cli: Cli):
    cli("produce", "short", stdin=b"1\n2\n")
    status, out, err = cli("consume", "short", "-o", "99", "--timeout-ms", "400")
    assert (status, out) == (0, b"")
    assert "offset 99 is beyond the end of 1 partition(s): reading from the end\n" in err
    assert "beyond" not in cli("consume", "short", "-o", "2", "--timeout-ms", "1")[2]
    assert cli("consume", "short", "-o", "-99", "-e")[1] == b"1\n2\n"


def test_deleting_says_how_far_it_came(cli: Cli):
    cli("topics", "create", "first")
    status, out, err = cli("topics", "delete", "first", "second")
    assert (status, out, err.count("\n")) == (1, b"Deleted topic first.\n", 1)


def test_a_partition_to_write_that_is_not_there(cli: Cli):
    cli("topics", "create", "narrow", "-p", "1")
    status, _, err = cli("produce", "narrow", "-p", "7", "-X", "max.block.ms=300", stdin=b"1\n")
    assert (status, err.count("\n")) == (1, 1)
    assert "not one numbered 7" in err


@pytest.mark.slow
def test_ctrl_c_ends_typing_and_keeps_what_was_typed(cli: Cli, bootstrap: str):
    words = [sys.executable, "-m", "tidelog", "produce", "typed", "-b", bootstrap]
    process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(b"one\ntwo\nhalf a li")
        process.stdin.flush()
        while cli("consume", "typed", "-o", "earliest", "-e")[1] != b"one\ntwo\n":
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        assert process.stderr.read() == b"2 records\ntidelog: interrupted\n"
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)


@pytest.mark.parametrize(
    ("words", "bad", "text"),
    [
        (("-k", ":"), b"keyless", "line 3: no key separator ':' in 'keyless'"),
        ((), b"v" * 2_000_000, "MESSAGE_TOO_LARGE: line 3: a record of 2000000 bytes"),
        (("-X", "max.request.size=4000000"), b"v" * 2_000_000, "MESSAGE_TOO_LARGE: from line 3 on: lines-0: "),
        (
            ("-F", "json", "-X", "max.block.ms=500"),
            b'{"value": "x", "partition": 7}',
            "UNKNOWN_TOPIC_OR_PARTITION: line 3: lines has 1 partition",
        ),
    ],
)
def test_the_first_record_that_fails_is_named_by_its_line(cli: Cli, words: tuple[str, ...], bad: bytes, text: str):
    good = b'{"key": "k", "value": "v"}' if "json" in words else b"k:v"
    status, _, err = cli("produce", "lines", *words, stdin=b"\n".join((good, good, bad, good, b"")))
    assert status == 1
    assert err.startswith(f"tidelog: {text}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("last", [b"no JSON", b'{"value": "x", "partition": 7}'])
def test_a_bad_line_does_not_hide_that_one_before_it_is_refused(cli: Cli, last: bytes):
    """Both are there before the broker answers."""
    cli("topics", "create", "slim", "-c", "max.message.bytes=200")
    lines = (b'{"value": "a"}', b'{"value": "%s"}' % (b"v" * 400), b'{"value": "b"}', last, b"")
    status, _, err = cli("produce", "slim", "-F", "json", "-X", "max.block.ms=500", stdin=b"\n".join(lines))
    assert status == 1
    assert err.startswith("tidelog: MESSAGE_TOO_LARGE: from line 2 on: slim-0: ")


@pytest.mark.parametrize(
    ("words", "one", "other"),
    [
        ("groups reset-offsets billing --topic orders --execute", "--to-earliest", "--to-latest"),
        ("groups reset-offsets billing --topic orders", "--to-current", "--to-earliest"),
        ("groups describe billing", "--members", "--state"),
        (f"reassign --json {__file__}", "--verify", "--execute"),
        ("elect-leaders --all", "--unclean", "--preferred"),
        ("quorum describe", "--status", "--replication"),
        ("topics describe", "--unavailable", "--under-replicated"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(cli: Cli, words: str, one: str, other: str):
    status, out, err = cli(*words.split(), one, other)
    assert (status, out) == (2, b"")
    assert f"give {one} or {other}, not both" in err


@pytest.mark.parametrize("words", ["--state Bogus", "--type newest", "--state Stable --state stabel"])
def test_a_state_or_type_that_no_group_has_is_wrong_usage(cli: Cli, words: str):
    status, out, err = cli("groups", "list", *words.split())
    assert (status, out) == (2, b"")
    assert f"{words.split()[-1]!r} is not one of" in err
    assert cli("groups", "list", "--state", "empty", "--type", "Classic")[0] == 0


def test_a_record_that_the_broker_refuses_has_its_reason(cli: Cli):
    cli("topics", "create", "table", "-c", "cleanup.policy=compact")
    for lines, more in ((b"keyless\n", ""), (b"one\ntwo\nthree\n", " (and 2 more)")):
        status, _, err = cli("produce", "table", stdin=lines)
        assert (status, err) == (
            1,
            "tidelog: INVALID_RECORD: from line 1 on: table-0: One or more records have been rejected: "
            f"record 0 of the batch: a compacted topic takes no record without a key{more}\n",
        )


def test_a_pattern_that_the_broker_refuses_is_named(cli: Cli):
    status, _, err = cli("transactions", "list", "--include", "(")
    assert (status, err) == (1, "tidelog: INVALID_REGULAR_EXPRESSION: the pattern '(' for broker 1\n")


def test_a_record_that_is_too_large_fails(cli: Cli):
    status, _, err = cli("produce", "large", stdin=b"x" * 2_000_000 + b"\n")
    assert status == 1
    assert "MESSAGE_TOO_LARGE" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_consuming_ends_with_a_signal(cli: Cli, number: signal.Signals):
    cli("produce", "endless", stdin=b"1\n")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test under `nohup` ignores it, and so would the command
    timer = threading.Timer(0.7, os.kill, (os.getpid(), number))
    timer.start()
    try:
        started_s = time.monotonic()
        status, _, err = cli("consume", "endless", "--timeout-ms", "60000")
    finally:
        join(timer)
        signal.signal(signal.SIGHUP, before)
    assert (status, err) == (0, "0 records\n")
    assert time.monotonic() - started_s < 60


def test_nobody_at_the_address(cli: Cli):
    status, out, err = cli("topics", "list", "-b", "127.0.0.1:1", "-X", "socket.connection.setup.timeout.ms=300")
    assert (status, out) == (1, b"")
    assert "127.0.0.1:1" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("topics", "create", "n", "--partitions", "99999999999"), "num_partitions must be between"),
        (("topics", "alter", "n", "--partitions", "99999999999"), "counts['n'] must be between"),
        (("transactions", "list", "--producer-id", "9" * 20), "producer_ids must be between"),
        (("configs", "alter", "brokers", "99999999999", "--set", "log.retention.ms=5"), "must be the id of a broker"),
        (("elect-leaders", "--topic", "n", "--partition", "99999999999"), "there is no partition 99999999999 of 'n'"),
        (("groups", "describe", "\udcff"), "group_ids cannot be written as UTF-8"),
    ],
)
def test_a_value_that_no_request_can_have_is_a_wrong_use(cli: Cli, words: tuple[str, ...], text: str) -> None:
    cli("topics", "create", "n")
    status, out, error = cli(*words)
    assert (status, out) == (2, b"")
    assert text in error.splitlines()[-1]


@pytest.mark.parametrize("make", [os.pipe, os.openpty])
def test_consume_waits_for_a_slow_reader_on_its_loop(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], tuple[int, int]]
):
    """A group hears of its member meanwhile: otherwise it loses its partitions, and prints their records again."""
    reading, writing = make()
    data = b"".join(b"%06d %s\n" % (number, b"x" * 100) for number in range(3000))
    others_ran = threading.Event()
    received = bytearray()
    waited: list[bool] = []

    def read() -> None:
        waited.append(others_ran.wait(PATIENCE_S))
        while len(received.replace(b"\r", b"")) < len(data):
            received.extend(os.read(reading, 65536))

    async def write() -> None:
        writer = asyncio.create_task(consume._write(data))
        for _ in range(20):
            await asyncio.sleep(0.005)
        others_ran.set()
        await writer

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with open(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        asyncio.run(write())
        join(reader)
    os.close(reading)
    assert received.replace(b"\r", b"") == data
    assert waited == [True]
