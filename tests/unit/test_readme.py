"""What the README tells people to type works."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tidelog import EmbeddedBroker
from tidelog.broker.config.node_config import NodeConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.fixture
def bootstrap() -> Iterator[str]:
    with EmbeddedBroker() as broker:
        yield broker.bootstrap_servers


@pytest.mark.slow
def test_the_python_of_the_quick_start_runs(bootstrap: str):
    (code,) = [block for block in blocks("python") if "asyncio.run" in block]
    done = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:9092", bootstrap)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    sent, read = done.stdout.splitlines()
    assert sent.startswith("RecordMetadata(topic='greetings', partition=")
    assert read.endswith("b'en' b'hello'")


@pytest.mark.slow
def test_the_embedded_broker_of_the_quick_start_runs():
    (code,) = [block for block in blocks("python") if "EmbeddedBroker" in block]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", done.stdout)


@pytest.mark.slow
def test_the_commands_of_the_quick_start_run(bootstrap: str, tmp_path: Path):
    (commands,) = [block for block in blocks("") if "tidelog produce" in block and "topics create" in block]
    # The log that the last line looks into belongs to a node of its own.
    script = "\n".join(line for line in commands.splitlines() if "log dump" not in line)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f'tidelog() {{ "{sys.executable}" -m tidelog "$@"; }}\n{script}'],
        cwd=ROOT,
        env={"TIDELOG_BOOTSTRAP_SERVER": bootstrap, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Created topic greetings."
    assert sorted(line.split(maxsplit=2)[2] for line in lines[1:]) == ["en hello", "fr bonjour"]


def test_the_configuration_is_one(tmp_path: Path):
    (text,) = blocks("yaml")
    file = tmp_path / "node.yaml"
    file.write_text(text)
    assert NodeConfig.load(file)["num.partitions"] == 3


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_a_link_leads_somewhere(link: str):
    assert (ROOT / link).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`?make ([a-z-]+)", README))))
def test_a_target_is_in_the_makefile(target: str):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
