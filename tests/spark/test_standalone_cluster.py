"""The command of docs/spark.md on a standalone cluster of Spark: a master, two workers, the package shipped."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.patience import PATIENCE_S
from tidelog.client.model import NewTopic
from tidelog.client.sync import Admin

pytestmark = [pytest.mark.hunt, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).resolve().parents[2]
ROWS = 3000
SETTINGS = """\
spark.ui.enabled false
spark.driver.host 127.0.0.1
spark.driver.bindAddress 127.0.0.1
spark.executor.memory 512m
spark.driver.memory 512m
spark.sql.shuffle.partitions 2
spark.python.authenticate.socketTimeout 300s
spark.driver.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.executor.extraJavaOptions -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
"""


def documented_command() -> str:
    page = (ROOT / "docs/spark.md").read_text()
    (command,) = re.findall(r"```bash\n(cp [^`]*spark-submit[^`]*)```", page)
    return str(command)


def environment(directory: Path) -> dict[str, str]:
    """Of the processes of Spark. The checkout is not on their path."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return inherited | {
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "SPARK_CONF_DIR": str(directory / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "PYSPARK_PYTHON": sys.executable,
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where the job is started: the wheel in `dist`, and the job."""
    if shutil.which("java") is None:
        pytest.skip("needs Java")
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/spark-defaults.conf").write_text(SETTINGS)
    shutil.copy(Path(__file__).with_name("cluster_job.py"), tmp_path / "job.py")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=8 * PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return tmp_path


def wait_for(output: Path, pattern: str, count: int = 1) -> str:
    """Wait until a process has written the pattern so often; the last match. Three machines of Java start."""
    deadline = time.monotonic() + 5 * PATIENCE_S
    while len(found := re.findall(pattern, output.read_text())) < count:
        assert time.monotonic() < deadline, f"{pattern!r} is not {count} times in {output}"
        time.sleep(0.2)
    return str(found[-1])


def start(directory: Path, name: str, *arguments: str) -> tuple[subprocess.Popen[bytes], Path]:
    output = directory / f"{name}.log"
    stream: IO[bytes]
    with output.open("wb") as stream:
        command = ["spark-class", *arguments]
        process = subprocess.Popen(command, env=environment(directory), stdout=stream, stderr=subprocess.STDOUT)
    return process, output


@pytest.fixture
def master(directory: Path) -> Iterator[str]:
    """The address of a master with two workers."""
    processes = []
    try:
        deploy = "org.apache.spark.deploy"
        flags = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        process, output = start(directory, "master", f"{deploy}.master.Master", *flags)
        processes.append(process)
        address = wait_for(output, r"Starting Spark master at (spark://\S+)")
        for number in range(2):
            work = str(directory / f"work-{number}")
            process, _ = start(
                directory,
                f"worker-{number}",
                f"{deploy}.worker.Worker",
                *(*flags, "--cores", "1", "--memory", "1g", "--work-dir", work, address),
            )
            processes.append(process)
        wait_for(output, "Registering worker", count=2)
        yield address
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(PATIENCE_S)


def submit(directory: Path, master: str, plan: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    command = documented_command().replace("spark://127.0.0.1:7077", master).rstrip()
    assert master in command
    return subprocess.run(
        ["bash", "-ec", f'{command} "$0"', json.dumps(plan)],
        cwd=directory,
        env=environment(directory),
        capture_output=True,
        text=True,
        check=False,
        timeout=8 * PATIENCE_S,
    )


def test_the_documented_command_reads_and_writes_exactly_once_on_a_cluster(node, directory: Path, master: str) -> None:
    done = None
    for attempt in range(3):
        topics = (f"cluster-in-{attempt}", f"cluster-out-{attempt}")
        with Admin(bootstrap_servers=node.bootstrap_servers) as admin:
            admin.create_topics([NewTopic(name, 4) for name in topics])
        plan = {"bootstrap": node.bootstrap_servers, "source": topics[0], "target": topics[1], "rows": ROWS}
        done = submit(directory, master, plan | {"checkpoint": str(directory / topics[1])})
        # Spark gives a worker of Python ten seconds to start, whatever the machine does meanwhile.
        if "connect back" not in done.stderr:
            break
    assert done is not None
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found[topics[0]] == found[topics[1]] == list(range(ROWS))
    assert found["executors"] == 2
    assert found["homes"], "no task has run"
    assert all("tidelog.zip/tidelog/" in home for home in found["homes"]), found["homes"]
