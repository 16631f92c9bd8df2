"""A value that an option does not take is refused with the name of the option, before a connection is tried."""

from __future__ import annotations

import pytest

from tidelog.cli.commands import run

LINES = [
    ("topics create t -c x", "--config"),
    ("topics create t --assignment 1:x", "--assignment"),
    ("topics alter t --config x", "--config"),
    ("topics alter t --partitions 2 --assignment x", "--assignment"),
    ("topics delete-records t --before-time x", "--before-time"),
    ("topics offsets t --time x", "--time"),
    ("configs alter topics t --set x", "--set"),
    ("configs alter topics t --append x", "--append"),
    ("configs alter topics t --subtract x", "--subtract"),
    ("features upgrade --feature x", "--feature"),
    ("consume t --from-time x", "--from-time"),
    ("consume t --offset x", "--offset"),
    ("produce t -H x", "--header"),
    ("start -o x", "--override"),
    ("topics list -X x", "--property"),
    ("log-dirs describe --broker-list x", "--broker-list"),
    ("cluster balance --measure x", "--measure"),
    ("cluster balance --weight x", "--weight"),
    ("cluster balance --weight x=1", "--weight"),
    ("cluster balance --weight leaders=x", "--weight"),
    ("cluster balance --weight leaders=-1", "--weight"),
]


@pytest.mark.parametrize(("line", "option"), LINES)
def test_a_wrong_value_is_refused_with_the_name_of_its_option(
    line: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = line.split()
    value = words[-1].rpartition("=")[2] if "leaders=" in line else words[-1].partition("=")[0]
    assert run(words) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "Invalid value for" in message
    assert option in message
    assert f"{value!r}" in message
