"""The command table, which loads a command's file on its first use, and the output of failures.

Each command's file defines one click command named `command`. This module does not depend on what a command does.
"""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module

import click

from tidelog.cli.common import HELP, cannot_write, fail, print_warnings, reason, swallow_output, with_advice
from tidelog.version import __version__

_COMMANDS = {
    "start": ("tidelog.cli.start", "Run a node: broker and controller in one."),
    "cluster": ("tidelog.cli.cluster.command", "Run a cluster of several nodes on this machine."),
    "format": ("tidelog.cli.format", "Give a node's directories the id of their cluster."),
    "topics": ("tidelog.cli.topics", "List, create, describe, alter, delete topics; their offsets."),
    "configs": ("tidelog.cli.configs", "Describe and alter configs of topics, brokers, groups."),
    "produce": ("tidelog.cli.produce", "Send lines of standard input to a topic."),
    "consume": ("tidelog.cli.consume", "Print the records of a topic."),
    "producers": ("tidelog.cli.producers", "Describe the idempotent producers of a topic."),
    "transactions": ("tidelog.cli.transactions", "List and describe transactions, find and end those that hang."),
    "groups": ("tidelog.cli.groups.command", "List and describe consumer groups, reset and delete their offsets."),
    "brokers": ("tidelog.cli.brokers.command", "List and describe brokers: roles, sizes, versions."),
    "log-dirs": ("tidelog.cli.brokers.log_dirs", "Describe the log directories of brokers."),
    "features": ("tidelog.cli.brokers.features", "Describe the feature levels of the cluster, move them."),
    "elect-leaders": ("tidelog.cli.elect_leaders", "Make first replicas leaders again, or any that lives."),
    "reassign": ("tidelog.cli.reassign.command", "Move partitions between brokers."),
    "quorum": ("tidelog.cli.quorum", "Describe the metadata quorum, change its voters."),
    "top": ("tidelog.cli.top.command", "Watch topics, groups and brokers with their rates."),
    "log": ("tidelog.cli.logs.command", "Look into the files of a data directory."),
    "bench": ("tidelog.bench.command", "Measure clusters: acks and replicas, scale, Apache Kafka beside."),
}


# A shell sets it and wants the completions of a line instead of its outcome.
_COMPLETION = "_TIDELOG_COMPLETE"
# A part of the text of the RuntimeError of `threading.Thread.start`.
_NO_THREAD = "start new thread"


class LazyGroup(click.Group):
    """A group that imports only the command that is run; its help imports none."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for an unknown one."""
        name = args[0]
        if name not in _COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            near = get_close_matches(name, _COMMANDS, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings=HELP)
@click.version_option(__version__, prog_name="tidelog", message="%(prog)s %(version)s")
def cli() -> None:
    """A Kafka-compatible broker in pure Python.

    \b
    Example, in three terminals:
      tidelog start
      tidelog consume greetings --from-beginning
      echo hello | tidelog produce greetings
    """


def run(words: list[str]) -> int:
    """Run one command. An expected failure becomes one line on standard error, and so does a Ctrl-C that the command
    does not handle.

    When the reader of the output has closed the pipe, as `head` does, it has what it wanted: that is no failure.
    A command that has more to do than to print goes on (`echo`).
    """
    _open_what_is_closed()
    print_warnings()
    code = _run(words)
    try:
        sys.stdout.flush()
    except OSError as error:
        failure = cannot_write(error)
        if not code and not isinstance(error, BrokenPipeError):
            code = fail(failure.message)
    return code


def _run(words: list[str]) -> int:
    from tidelog.protocol.errors import KafkaError

    try:
        if os.environ.get(_COMPLETION):
            cli.main(words, prog_name="tidelog")
        # Without `cli.main`, which writes an empty line to standard error for a Ctrl-C.
        with cli.make_context("tidelog", words) as context:
            outcome = cli.invoke(context)
    except click.exceptions.Exit as end:  # of --help and --version
        return end.exit_code
    except click.UsageError as error:
        if isinstance(error, click.BadParameter) and not isinstance(error, click.MissingParameter):
            return fail(error.format_message()) and error.exit_code
        error.show()
        if isinstance(error, click.NoSuchOption) and error.ctx and isinstance(error.ctx.command, click.Group):
            click.echo("Options go after the command, as in `tidelog topics list -b HOST:PORT`.", err=True)
        return 2
    except click.ClickException as error:
        return fail(error.format_message()) and error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return fail("interrupted")
    except KafkaError as error:
        return fail(with_advice(error))
    except BrokenPipeError:
        swallow_output()
        return 0
    except OSError as error:
        return fail(reason(error))
    except RuntimeError as error:
        if _NO_THREAD not in str(error):
            raise
        limits = "`ulimit -u` and `ulimit -v`, TasksMax of a systemd unit and pids.max of a container"
        return fail(f"{error} ({limits} limit threads)")
    return outcome if isinstance(outcome, int) else 0


def _open_what_is_closed() -> None:
    """Replace standard streams that the caller has closed (`<&-`, `>&-`): a command that reads or writes one fails, any
    other works. Messages on a closed standard error go nowhere.
    """
    if sys.stdin is None:
        sys.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "r")
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
