"""A benchmark that is ended from outside: what it shows and writes then, and that it leaves no process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from array import array
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import click
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from tests.patience import PATIENCE_S, wait_until
from tidelog.bench import compare, scale_node
from tidelog.bench.acks import command as acks_command
from tidelog.bench.acks import contest
from tidelog.bench.acks.sending import Sent
from tidelog.bench.clients import command as clients_command
from tidelog.bench.clusters import Alone, RunningCluster
from tidelog.bench.command import command as bench
from tidelog.bench.keeping import ResultFile, signals_as_interrupt
from tidelog.bench.scenarios.base import Contestant, Metric, Scenario
from tidelog.bench.spark import command as spark_command
from tidelog.bench.spark import compare as spark_compare
from tidelog.bench.studies import planning
from tidelog.testing.processes import ServerFailed, ServerProcess

SIGNALS = [signal.SIGTERM, signal.SIGHUP]


def end_by(number: int) -> None:
    """Send it to this process, which handles it."""
    assert callable(signal.getsignal(number)), "the signal would end the tests"
    os.kill(os.getpid(), number)
    time.sleep(PATIENCE_S)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_an_interrupt_and_a_second_one_does_not_disturb_the_clean_up(number: int):
    before = [signal.getsignal(each) for each in SIGNALS]
    cleaned = []

    def work() -> None:
        try:
            end_by(number)
        finally:
            for each in SIGNALS:
                os.kill(os.getpid(), each)
            cleaned.append(True)

    with pytest.raises(KeyboardInterrupt), signals_as_interrupt():
        work()
    assert cleaned == [True]
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_a_signal_cancels_what_asyncio_runs_and_waits_for_its_end():
    ended = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(PATIENCE_S)
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    # Where the tests run in the background they ignore SIGINT, and asyncio then has no handler of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), signals_as_interrupt():
            asyncio.run(work())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True]


def test_a_signal_that_the_caller_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_as_interrupt():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupt_kills_the_nodes(tmp_path: Path):
    # In good order a node may take a minute.
    class Slow(ServerProcess):
        def command(self) -> list[str]:
            return [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(1000)"]

        def is_ready(self) -> bool:
            return True

    node = Slow(tmp_path)
    with pytest.raises(KeyboardInterrupt), RunningCluster(Alone(node)):
        raise KeyboardInterrupt
    assert node.exit_code == -signal.SIGKILL


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path):
    errors = Mock(spec=Console)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(click.ClickException, match=r"cannot write .*taken/figures\.json"):
        ResultFile(tmp_path / "taken" / "figures.json", str, errors)
    found: list[int] = []
    file = ResultFile(tmp_path / "new" / "figures.json", lambda: json.dumps(found), errors)
    found.append(1)
    file.write()
    assert (tmp_path / "new" / "figures.json").read_text() == "[1]\n"
    (tmp_path / "new" / "figures.json.part").mkdir()
    file.write()  # later it is only told: the figures are still shown at the end
    assert errors.print.call_count == 1
    assert [file.name for file in (tmp_path / "new").iterdir() if file.is_file()] == ["figures.json"]


class Interrupt:
    """A stand-in that works so many times, and is interrupted after that."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if not self._answers:
            raise KeyboardInterrupt
        answer = self._answers.pop(0)
        return answer(*arguments, **named) if callable(answer) else answer


def invoke(*words: object) -> Result:
    return CliRunner().invoke(bench, [str(word) for word in words], catch_exceptions=False)


def test_interrupted_clients_show_and_write_what_was_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    round_of = {"cpu_s": 2.0, "elapsed_s": 4.0, "records": 1_000_000, "latencies_us": []}
    monkeypatch.setattr(clients_command, "RunningCluster", lambda cluster: nullcontext(Mock()))
    for arguments, output in ((["--json"], "json"), (["--markdown"], "markdown"), ([], "table")):
        monkeypatch.setattr(clients_command, "_measure", Interrupt(round_of, round_of))
        ended = invoke("clients", "--kind", "produce", "--size", 100, "--save", tmp_path / output, *arguments)
        assert ended.exit_code == 130
        saved = json.loads((tmp_path / output).read_text())
        assert [cost["cpu_us"] for cost in saved][:3] == [[2.0], [2.0], []]
        assert "produce, 100 B: tidelog: CPU 2 us a record, 250,000 records/s\n" in ended.stderr
        if output == "json":
            assert json.loads(ended.stdout) == saved
        elif output == "markdown":
            assert len(ended.stdout.splitlines()) == 4
        else:
            assert "250,000" in ended.stdout


def test_an_interrupt_is_said_where_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(planning, "measure_costs", Interrupt())
    ended = invoke("plan", "--mb-in", 5)
    assert (ended.exit_code, ended.stdout, ended.stderr) == (130, "", "tidelog: interrupted\n")


def test_a_client_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch):
    def run(cost: clients_command.ClientCost, *_: Any) -> dict[str, Any]:
        tried.append(cost.client)
        if cost.client == "tidelog":
            raise ServerFailed("no\nanswer")
        return {"cpu_s": 2.0, "elapsed_s": 4.0, "records": 1_000_000, "latencies_us": []}

    tried: list[str] = []
    monkeypatch.setattr(clients_command, "RunningCluster", lambda cluster: nullcontext(Mock()))
    monkeypatch.setattr(clients_command, "_measure", run)
    monkeypatch.setattr(clients_command, "_is_installed", lambda name: name in ("tidelog", "aiokafka"))
    ended = invoke("clients", "--kind", "produce", "--size", 100, "--rounds", 2, "--json")
    assert (ended.exit_code, tried) == (1, ["tidelog", "aiokafka", "aiokafka"])
    assert "produce, 100 B: tidelog failed: no answer\n" in ended.stderr
    assert [(cost["failure"], cost["cpu_us"]) for cost in json.loads(ended.stdout)] == [
        ("no answer", []),
        ("", [2.0, 2.0]),
    ]


def test_interrupted_rows_are_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    unit = "us a request " * 10 + "of each"  # a line is not folded

    class Once(Scenario):
        metrics = (Metric("cpu", unit),)
        measure = Interrupt({"cpu": 7.0})

    @contextmanager
    def pretend(names: Any, brokers: int, running: bool, refused: Any) -> Any:
        yield [Contestant(name, Alone(ServerProcess("/nowhere")), Mock(), Path("/nowhere")) for name in names]

    monkeypatch.setattr(compare, "contestants", pretend)
    monkeypatch.setattr(compare, "select", lambda _: [Once("x", "X"), Once("y", "Y")])
    ended = invoke("compare", "--quick", "--only", "tidelog", "--json", "--save", tmp_path / "figures")
    assert ended.exit_code == 130
    assert f"x, tidelog: cpu 7 {unit}\n" in ended.stderr
    rows = json.loads(ended.stdout)["rows"]
    assert rows == json.loads((tmp_path / "figures").read_text())["rows"]
    assert [row["rounds"] for row in rows] == [{"tidelog": [7.0]}, {}]


def test_interrupted_rows_of_spark_are_shown_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def run(measured: Any, on_measured: Any, **_: Any) -> None:
        measured[0].figures["tidelog", "rows/s"] = [1000.0]
        on_measured(measured[0], "tidelog")
        assert json.loads((tmp_path / "figures").read_text())[0]["figures"] == {"tidelog, rows/s": [1000.0]}
        raise KeyboardInterrupt

    monkeypatch.setattr(spark_command, "find_spec", lambda _: Mock())
    monkeypatch.setattr(spark_command, "which", lambda _: "java")
    monkeypatch.setattr(spark_compare, "run", run)
    for command in ("spark", "compare"):
        ended = invoke(command, "--rows", "spark-sink", "--json", "--save", tmp_path / "figures")
        assert ended.exit_code == 130
        assert "spark-sink-100b-none, tidelog: rows/s 1,000\n" in ended.stderr
        assert json.loads(ended.stdout) == json.loads((tmp_path / "figures").read_text())


def test_an_interrupted_scale_shows_the_steps_until_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    def run(name: str, size: int, connections: int, progress: Any, result: Any) -> None:
        result.figures["create, s"] = 1.5
        progress("the next step")
        assert json.loads((tmp_path / "figures").read_text())["runs"][0]["figures"] == {"create, s": 1.5}
        raise KeyboardInterrupt

    monkeypatch.setattr(scale_node, "run", run)
    ended = invoke("scale", "--brokers", 1, "--json", "--save", tmp_path / "figures")
    assert ended.exit_code == 130
    assert json.loads(ended.stdout)["runs"][0]["figures"] == {"create, s": 1.5}


def test_an_interrupted_study_of_acks_shows_the_settings_until_then(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    @contextmanager
    def pretend(names: Any, brokers: int, refused: Any) -> Any:
        yield [Contestant(name, Alone(ServerProcess("/nowhere")), Mock(), Path("/nowhere")) for name in names]

    sent = Sent(100, 0.5, array("q"))
    monkeypatch.setattr(contest, "contestants", pretend)
    monkeypatch.setattr(acks_command, "find_spec", lambda _: None)  # no chart
    for arguments in (["--json"], []):
        monkeypatch.setattr(contest, "_measure", Interrupt(*[sent] * 8))
        ended = invoke(
            "acks", "--study", 2, "--chart", tmp_path / "chart.png", "--save", tmp_path / "figures", *arguments
        )
        assert ended.exit_code == 130
        assert "200" in ended.stdout
        assert "200.0" in (tmp_path / "figures").read_text()


def test_a_node_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        clients_command, "RunningCluster", Mock(side_effect=ServerFailed("tidelog ended with 1:\nno disk"))
    )
    ended = invoke("clients", "--quick", "--kind", "produce")
    assert (ended.exit_code, ended.stderr.splitlines()[-1]) == (1, "Error: tidelog ended with 1: no disk")


def processes_naming(path: Path) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(path).encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            pass
    return found


@pytest.mark.slow
def test_a_benchmark_that_is_ended_leaves_no_process_and_no_directory_and_keeps_its_figures(tmp_path: Path):
    scratch, figures = tmp_path / "scratch", tmp_path / "figures"
    scratch.mkdir()
    words = [
        "clients",
        "--kind",
        "one at a time",
        "--size",
        "100",
        "--rounds",
        "100000",
        "--json",
        "--save",
        str(figures),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "tidelog", "bench", *words],
        env={**os.environ, "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: figures.exists() and json.loads(figures.read_text())[0]["rate"])
        assert processes_naming(scratch)
        process.send_signal(signal.SIGTERM)
        shown = json.loads(process.communicate(timeout=PATIENCE_S)[0])
        assert process.returncode == 130
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert shown[0]["rate"]
    assert shown == json.loads(figures.read_text())
    assert processes_naming(scratch) == []
    assert list(scratch.glob("tidelog-bench-*")) == []
