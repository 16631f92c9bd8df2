"""How the client commands read lines and print records, without any broker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.patience import PATIENCE_S
from tidelog.cli.commands import cli
from tidelog.cli.common import key_values, with_ports
from tidelog.cli.main import main
from tidelog.cli.produce import Shape
from tidelog.cli.record_format import as_json, compile_template
from tidelog.client import ConsumerRecord

ROOT = Path(__file__).resolve().parents[3]
RECORD = ConsumerRecord("t", 3, 17, 1700000000000, 0, b"k", b"v\xff", (("h", b"1"), ("n", None)), 0)


def test_a_template_writes_bytes_as_they_are():
    render = compile_template(r"{topic}-{partition} {offset}\t{timestamp}\t{key}={value} {headers}")
    assert render(RECORD) == b"t-3 17\t1700000000000\tk=v\xff h=1,n=null\n"


def test_null_is_said():
    assert compile_template("{key}:{value}")(RECORD._replace(key=None, value=None)) == b"null:null\n"


@pytest.mark.parametrize("template", ["{value.__class__}", "{0}", "{value!r}", "{key:>10}", "{no}", "{"])
def test_a_template_has_nothing_but_fields(template: str):
    with pytest.raises(ValueError):
        compile_template(template)


def test_a_wrong_template_is_wrong_usage(capsys: pytest.CaptureFixture[str]):
    assert main(["consume", "t", "-f", "{nothing}"]) == 2
    assert "{nothing} is not one of {topic}" in capsys.readouterr().err
    assert main(["consume", "t", "-f", "{no\nthing}"]) == 2
    assert "{no\\nthing} is not one of {topic}" in capsys.readouterr().err, "an error is one line"


def test_json_keeps_text_as_text_and_the_rest_as_base64():
    shown = json.loads(as_json(RECORD))
    assert (shown["key"], shown["value_base64"]) == ("k", "dv8=")
    assert shown["headers"] == [{"name": "h", "value": "1"}, {"name": "n", "value": None}]
    assert json.loads(as_json(RECORD._replace(value=None, headers=()))).get("value", 0) is None


def test_a_line_is_a_value_or_a_key_and_a_value():
    assert Shape(None, None, ()).split(b"a:b") == (None, b"a:b")
    assert Shape(":", None, ()).split(b"a:b:c") == (b"a", b"b:c")
    assert Shape(":", "NULL", ()).split(b"a:NULL") == (b"a", None)
    assert Shape("::", "", ()).split(b"::") == (None, None)


def test_a_line_without_its_separator_is_refused():
    with pytest.raises(ValueError, match="no key separator"):
        Shape(":", None, ()).split(b"keyless")


def test_key_values():
    assert key_values(["a=1", "b.c = x=y"]) == {"a": "1", "b.c": "x=y"}
    for wrong in ("a", "=1"):
        with pytest.raises(click.BadParameter):
            key_values([wrong])


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("host", "host:9092"),
        ("host:1234", "host:1234"),
        ("a, b:1,c", "a:9092,b:1,c:9092"),
        ("[::1]", "[::1]:9092"),
        ("[::1]:7", "[::1]:7"),
        ("host:", "host:"),
        ("", ""),
    ],
)
def test_a_bootstrap_server_without_a_port_has_kafkas(given: str, meant: str):
    assert with_ports(given) == meant


def leaves(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if isinstance(found, click.Group):
            yield from leaves(found, *path, name)
        elif found is not None:
            yield " ".join((*path, name)), found


# A node's output is its log (log.format=json makes JSON of it), a profile is text of the profiler's, and a report is a
# page made of what `bench compare --output-json` has written.
WITHOUT_JSON = {"start", "bench profile", "bench report"}


@pytest.mark.parametrize(("name", "leaf"), list(leaves(cli)))
def test_every_command_has_an_example_and_prints_json(name: str, leaf: click.Command):
    assert f"tidelog {name} " in f"{leaf.help} ".replace("\n", " "), "an example of this very command"
    options = {option for parameter in leaf.params for option in parameter.opts}
    assert name in WITHOUT_JSON or options & {"--json", "--output-json"}


@pytest.mark.parametrize(("name", "leaf"), list(leaves(cli)))
def test_a_word_where_a_number_is_due_is_no_valid_integer_or_number(name: str, leaf: click.Command):
    """click calls it "not a valid integer range"."""
    for parameter in leaf.params:
        if isinstance(parameter.type, click.IntRange | click.FloatRange):
            with pytest.raises(click.BadParameter, match=r"'x' is not a valid (integer|number)\.$"):
                parameter.type("x", parameter, None)


@pytest.mark.parametrize("name", ["bench", "brokers", "cluster", "configs", "features", "groups", "log", "log-dirs",
                                  "quorum", "topics", "transactions"])  # fmt: skip
def test_the_help_of_a_group_has_whole_summaries(name: str, capsys: pytest.CaptureFixture[str]):
    assert main([name, "--help"]) == 0
    commands = capsys.readouterr().out.partition("\nCommands:\n")[2]
    assert commands
    assert "..." not in commands


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--version"], 0),
        (["--help"], 0),
        (["start", "--help"], 0),
        (["topics", "--help"], 0),
        (["topics", "create", "--help"], 0),
        (["produce", "--help"], 0),
        (["consume", "--help"], 0),
        (["log", "dump", "--help"], 0),
        ([], 2),
        (["nonsense"], 2),
        (["start", "-o", "nonsense"], 2),
        (["topics", "create", "t", "--partitions", "0"], 2),
        (["consume", "t", "-o", "soon"], 2),
        (["consume", "t", "-g", "g", "-p", "0"], 2),
        (["consume", "t", "--from-beginning", "-o", "5"], 2),
        (["topics", "list", "-X", "no.such.option=1"], 2),
        (["topics", "list", "-b", "nonsense:"], 2),
        (["consume", "t", "-o", "--5"], 2),
        (["consume", "t", "-f", "{value!r}"], 2),
        (["consume"], 2),
        (["consume", "t", "--include", "t.*"], 2),
        (["consume", "--include", "("], 2),
        (["consume", "t", "--from-time", "soon"], 2),
        (["consume", "t", "--from-time", "5", "-o", "5"], 2),
        (["consume", "t", "--from-time", "5", "--until-time", "4"], 2),
        (["consume", "t", "--until-time", "5", "-e"], 2),
        (["consume", "t", "-g", "g", "--until-time", "5"], 2),
        (["produce"], 2),
        (["produce", "t", "-F", "json", "-k", ":"], 2),
        (["produce", "t", "-F", "json", "--value-format", "hex"], 2),
        (["produce", "t", "-p", "1", "--repartition"], 2),
    ],
)
def test_exit_codes_without_a_broker(words: list[str], status: int, capsys: pytest.CaptureFixture[str]):
    assert main(words) == status
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    if "--help" in words:
        assert "Example" in shown.out


@pytest.mark.parametrize("shell", ["bash", *(pytest.param(name, marks=pytest.mark.slow) for name in ("zsh", "fish"))])
def test_a_shell_completes_commands(shell: str):
    """As documented: click answers when a variable of its own is set."""

    def ask(instruction: str, **words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "_TIDELOG_COMPLETE": f"{shell}_{instruction}", **words}
        code = "import sys; sys.argv[0] = 'tidelog'; from tidelog.cli.main import main; sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.stdout

    assert "_TIDELOG_COMPLETE" in ask("source")
    word = "2" if shell != "fish" else "de"
    offered = ask("complete", COMP_WORDS="tidelog topics de", COMP_CWORD=word)
    assert "describe" in offered
    assert "delete-records" in offered
    assert "create" not in offered
