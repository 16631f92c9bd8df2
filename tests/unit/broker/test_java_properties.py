"""Java's `.properties` format."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidelog.broker.config.java_properties import PropertiesError, parse_properties
from tidelog.broker.config.node_config import NodeConfig
from tidelog.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("a=1\nb = 2 \n", {"a": "1", "b": "2"}),
        ("a:1\nb : 2\nc 3\nd\t=\t4", {"a": "1", "b": "2", "c": "3", "d": "4"}),
        ("# a=1\n ! b=2\n\n  c=3#4", {"c": "3#4"}),
        ("a=1,\\\n   2,\\\n  3\nb=4", {"a": "1,2,3", "b": "4"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=PLAINTEXT://:9092", {"a": "PLAINTEXT://:9092"}),
        ("a=b=c:d", {"a": "b=c:d"}),
        ("a=", {"a": ""}),
        (r"a\=b\:c\ d=e\tf\u00fcg\h", {"a=b:c d": "e\tfügh"}),
        ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
        ("a=1\na=2", {"a": "2"}),
        ("a=1\\", {"a": "1"}),
        ("", {}),
    ],
)
def test_what_java_reads(text: str, means: dict[str, str]):
    assert parse_properties(text) == means


@pytest.mark.parametrize("text", ["a=1\nnonsense", "a=1\n=b", "\n: c"])
def test_a_line_that_is_no_property_is_named(text: str):
    with pytest.raises(PropertiesError, match=r"^2: .* is not key=value$"):
        parse_properties(text)


def test_a_nodes_file_may_have_all_of_it(tmp_path: Path):
    file = tmp_path / "server.properties"
    file.write_text("num.partitions: 3\nlisteners=A://127.0.0.1:1,\\\n  B://127.0.0.1:2\n"
                    "listener.security.protocol.map=A:PLAINTEXT,B:PLAINTEXT\n")  # fmt: skip
    config = NodeConfig.load(file)
    assert (config["num.partitions"], [one.name for one in config.listeners]) == (3, ["A", "B"])
    file.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"server.properties:1: 'nonsense' is not key=value"):
        NodeConfig.load(file)
