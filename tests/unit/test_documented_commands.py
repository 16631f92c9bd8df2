"""Every `tidelog` command line in README.md and docs/ is one that the command line takes: words, options, values."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from tidelog.cli.commands import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def command_lines() -> list[tuple[str, str]]:
    """(page, command line) of each line in a fenced block and each inline code that begins with `tidelog `."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```(?:\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.name, line.split("| ")[-1]) for line in lines if re.match(r"(.*\| )?tidelog \w", line)]
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        found += [(page.name, inline) for inline in re.findall(r"`(tidelog [a-z][^`\n]*)`", prose)]
    return found


def words_of(line: str) -> list[str]:
    """What stands before two blanks or a `#`; the text behind them explains it."""
    line = re.split(r"\s{2,}|\s#|\s\(|[;<>&]", line)[0]
    return shlex.split(line.replace("...", ""))[1:]


def parse(command: click.Command, words: list[str], parent: click.Context | None, name: str) -> None:
    context = command.make_context(name, list(words), parent=parent)
    if isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        if rest:
            inner_name, inner, inner_words = command.resolve_command(context, rest)
            assert inner is not None
            parse(inner, inner_words, context, inner_name or "")


def help_lines(group: click.Group, *path: str) -> list[tuple[str, str]]:
    """The examples in the help of every command."""
    found = []
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        lines = re.split(r"\n", (command.help or "").replace("Example: ", "\n"))
        found += [(" ".join((*path, name)), line.split("| ")[-1]) for line in lines if "tidelog " in line]
        if isinstance(command, click.Group):
            found += help_lines(command, *path, name)
    return [(where, line.strip()) for where, line in found if line.strip().startswith(("tidelog ", "ID=$(tidelog "))]


@pytest.mark.parametrize(("place", "line"), [*command_lines(), *help_lines(cli)])
def test_a_documented_command_is_understood(place: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("topics.json", "moves.json", "plan.json", "plan.csv"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    try:
        parse(cli, words_of(line.removeprefix("ID=$(").rstrip(")")), None, "tidelog")
    except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError, click.exceptions.MissingParameter):
        pass  # --help, or prose that names a command without all it takes


def test_the_pages_have_commands():
    assert len(command_lines()) > 60
