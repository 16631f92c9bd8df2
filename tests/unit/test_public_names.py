"""What `from tidelog import ...` gives: every name, none of it loaded before it is asked for, all of it documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidelog
from tests.patience import PATIENCE_S
from tidelog.broker.config.node_config import NodeConfig
from tidelog.client import sync

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(set(tidelog.__all__) - {"__version__"})


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_what_its_home_defines(name: str) -> None:
    assert getattr(tidelog, name).__name__ == name


def test_every_public_name_has_a_home_and_is_in_the_documentation() -> None:
    assert sorted(tidelog._HOMES) == NAMES
    section = (ROOT / "docs" / "client.md").read_text().partition("## Names")[2].partition("\n## ")[0]
    assert set(NAMES) <= set(re.findall(r"`(\w+)`", section))


def test_importing_the_package_loads_none_of_it() -> None:
    code = (
        "import sys, tidelog; loaded = {name for name in sys.modules if name.startswith('tidelog')};"
        "assert loaded == {'tidelog', 'tidelog.version'}, loaded;"
        "tidelog.KafkaError, tidelog.Producer;"
        "assert not any(name.startswith(('tidelog.broker', 'tidelog.storage')) for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=PATIENCE_S)


def test_a_wrong_option_of_a_client_and_a_wrong_key_of_a_broker_are_caught_alike() -> None:
    with pytest.raises(tidelog.ConfigError, match="no_such_option"):
        sync.Producer(no_such_option=1)
    with pytest.raises(tidelog.ConfigError, match=r"num\.partitions"):
        NodeConfig.load(None, {"num.partitions": "many"})


def test_a_name_that_is_not_public_is_none() -> None:
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = tidelog.NoSuchName
