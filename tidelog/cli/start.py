"""`tidelog start`: runs one node in this process, until a signal ends it.

An external error (a configuration, a port, a directory) becomes one line on standard error. Any other exception is a
bug and shows its traceback. `broker/node.py` implements the node.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import click

from tidelog.broker.config.node_config import NodeConfig
from tidelog.cli.cluster.state import refuse_cluster_directories
from tidelog.cli.common import HELP, announce, end_signals, fail, overriding, reason
from tidelog.protocol.errors import ConfigError


@click.command("start", context_settings=HELP)
@click.argument("file", required=False, type=click.Path())
@overriding("One configuration value, by Kafka's name; wins over FILE.")
def command(file: str | None, overrides: dict[str, str]) -> int:
    """Run a node until SIGTERM or Ctrl-C, or until its terminal closes.

    Without arguments: broker and controller in one, on 127.0.0.1:9092, data in ./tidelog-data, which is created and
    formatted if it does not exist. FILE is YAML (or Java properties) with Kafka's own configuration names. The first
    line of output has the advertised address.

    \b
    Examples:
      tidelog start
      tidelog start node.yaml -o listeners=PLAINTEXT://127.0.0.1:19092 -o log.dirs=/var/lib/tidelog
    """
    return start(file, overrides)


def start(file: str | None, overrides: dict[str, str]) -> int:
    """Run a node until a signal stops it. Returns the exit code."""
    try:
        config = NodeConfig.load(Path(file) if file is not None else None, overrides)
        refuse_cluster_directories(config.log_dirs)
    except ConfigError as error:
        return fail(str(error))
    except OSError as error:
        return fail(reason(error))
    from tidelog.broker.logs import set_up
    from tidelog.broker.node import run_node
    from tidelog.replication.controller.metadata.records import MetadataError
    from tidelog.replication.quorum.driver import InconsistentVoters
    from tidelog.replication.quorum.raft.messages import CommittedRecordsMissing
    from tidelog.replication.quorum.raft.snapshot import CorruptSnapshot
    from tidelog.storage.files.disk import DirectoryInUse
    from tidelog.storage.files.meta_properties import ForeignDirectory
    from tidelog.storage.log.partition_log import CorruptLog

    set_up(config, sys.stderr)
    _allow_files()
    try:
        _event_loop_run(_until_stopped(partial(run_node, config, announce)))
    except (ConfigError, CorruptLog, DirectoryInUse, ForeignDirectory) as error:
        return fail(str(error))
    except (CommittedRecordsMissing, CorruptSnapshot, InconsistentVoters, MetadataError) as error:
        return fail(str(error))
    except OSError as error:
        hint = ""
        if error.errno == errno.EADDRINUSE:
            hint = (
                " (does a node run already? another port: `-o listeners=PLAINTEXT://HOST:PORT`, `-o metrics.port=PORT`)"
            )
        return fail(reason(error) + hint)
    return 0


def _allow_files() -> None:
    """Raise the limit of open files to the system's maximum, because shells and services start with a low one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS may refuse its own maximum
            pass


def _event_loop_run(main: Coroutine[Any, Any, None]) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] | None
    try:
        try:
            from uvloop import new_event_loop as factory
        except ImportError:  # without uvloop the node works, only slower
            factory = None
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main)
    finally:
        main.close()  # an interrupt may come before its first step


async def _until_stopped(run_node: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the node. The first signal of `end_signals` cancels it for a clean stop; later signals are ignored."""
    task = asyncio.ensure_future(run_node())
    loop = asyncio.get_running_loop()
    is_stopping = False

    def stop() -> None:
        nonlocal is_stopping
        if not is_stopping:
            is_stopping = True
            task.cancel()

    for number in end_signals():
        loop.add_signal_handler(number, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not is_stopping:
            raise
