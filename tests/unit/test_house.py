"""The rules of the house that no tool checks by itself: purity of the deciders, who touches files, what documents say.

A pure module takes values and `now_ms` and returns what to do, so neither it nor anything of ours it imports may reach
for a clock, a socket, a file, a thread or a random number. Pure are those listed here and all that call themselves so.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.patience import PATIENCE_S
from tests.unit import architecture_map
from tests.unit.architecture_map import docstring

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tidelog"

# One noun with its state is one file: a class is not cut into pieces to obey a number.
FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
# Larger, each for its own reason, and not to grow: hot loops that are one function because a call costs too much, and
# what belongs together.
ALLOWED_LINES = {
    "protocol/batches/columnar_kernel.py:scan": 75,
    "storage/log/partition_log.py": 820,
}

ROOMS = ("protocol", "storage", "replication", "client", "broker", "cli", "testing", "spark_ingest", "bench")
TOP_LEVEL = (
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "constraints.txt",
    "docs",
    "pyproject.toml",
    "pyspark_tidelog.py",
    "tests",
    "tidelog",
)

PURE = (
    "protocol/**/*.py",
    "storage/segments/append.py",
    "storage/cleaner/choice.py",
    "storage/cleaner/filter.py",
    "storage/cleaner/keys.py",
    "storage/cleaner/transactions.py",
    "storage/files/log_names.py",
    "storage/producers/producer_state.py",
    "storage/segments/leader_epochs.py",
    "storage/segments/retention.py",
    "replication/isr.py",
    "broker/replicas/fetching/follower_linger.py",
    "replication/backoff.py",
    "replication/follower.py",
    "replication/quorum/raft/state.py",
    "replication/quorum/raft/election.py",
    "replication/quorum/raft/commit.py",
    "replication/quorum/raft/raft.py",
    "replication/controller/metadata/image.py",
    "replication/controller/metadata/records.py",
    "replication/controller/decisions/state.py",
    "replication/controller/decisions/placement.py",
    "replication/controller/decisions/leaders.py",
    "replication/controller/decisions/liveness.py",
    "replication/controller/decisions/balance.py",
    "client/assignment/partitioner.py",
    "client/producing/accumulator.py",
    "client/producing/producer_session.py",
    "client/consuming/subscription.py",
    "client/assignment/assignors.py",
    "client/assignment/sticky_assignor.py",
    "client/consuming/fetch_session.py",
    "client/model.py",
    "broker/scheduling/purgatory.py",
    "broker/network/connection_quotas.py",
    "broker/replicas/fetching/fetch_sessions.py",
    "broker/quotas.py",
    "broker/coordinators/outcome.py",
    "broker/coordinators/timers.py",
    "broker/coordinators/*/coordinator.py",
    "broker/coordinators/*/group.py",
    "broker/coordinators/*/joins.py",
    "broker/coordinators/*/offsets.py",
    "broker/coordinators/*/rebalance.py",
    "broker/coordinators/*/records.py",
    "broker/coordinators/*/states.py",
    "spark_ingest/java_pattern.py",
    "spark_ingest/option_table.py",
    "spark_ingest/options.py",
    "spark_ingest/planning.py",
    "spark_ingest/stream_planning.py",
)
IMPURE_IMPORTS = frozenset(
    "asyncio concurrent fcntl io logging mmap multiprocessing os pathlib queue random secrets select selectors shutil "
    "signal socket subprocess tempfile threading time uvloop".split()
)
# Which files are worth parsing for that.
IMPORTS_A_ROOM = re.compile(rf"^\s*(?:from|import)\b.*(?<![.\w])(?:{'|'.join(ROOMS)})\b", re.MULTILINE)
FILE_IMPORTS = frozenset({"fcntl", "glob", "io", "mmap", "os", "pathlib", "shutil", "tempfile"})


def modules(*patterns: str) -> list[Path]:
    return sorted({path for pattern in patterns for path in PACKAGE.glob(pattern)})


def pure_modules() -> list[Path]:
    """The modules above, and every other whose own docstring says that it is pure."""
    declared = [path for path in modules("**/*.py") if re.search(r"\bPure\b", docstring(source_of(path)))]
    return sorted({*modules(*PURE), *declared})


@cache
def source_of(path: Path) -> str:
    return path.read_text()


@cache
def tree_of(path: Path) -> ast.Module:
    """Only of the package: it is looked at in several tests."""
    return ast.parse(source_of(path))


def imported(source: str) -> Iterator[str]:
    """Every module named by an import anywhere in the source, except those for the type checker alone."""
    yield from imported_by(ast.parse(source))


def imported_by(tree: ast.AST) -> Iterator[str]:
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending.extend(ast.iter_child_nodes(node))


@cache
def imports_of(path: Path) -> frozenset[str]:
    return frozenset(imported_by(tree_of(path)))


@cache
def file_of(module: str) -> Path | None:
    path = ROOT / module.replace(".", "/")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def reachable(path: Path) -> dict[str, str]:
    """Every module outside ours that `path` imports, by itself or through modules of ours -> who imports it."""
    found: dict[str, str] = {}
    seen: set[Path] = set()
    pending = [path]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in imports_of(current):
            inner = file_of(name) if name.split(".")[0] == "tidelog" else None
            if inner is not None:
                pending.append(inner)
            else:
                found.setdefault(name.split(".")[0], str(current.relative_to(ROOT)))
    return found


def short(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", pure_modules(), ids=short)
def test_a_pure_module_reaches_nothing_of_the_world(path: Path):
    if path.name == "__init__.py":
        return
    offences = {name: where for name, where in reachable(path).items() if name in IMPURE_IMPORTS}
    assert not offences, f"{short(path)} is pure, but reaches {offences}"


def test_protocol_is_covered_whole():
    assert set((PACKAGE / "protocol").rglob("*.py")) <= set(modules(*PURE))


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import os.path", {"os.path"}),
        ("from time import monotonic", {"time", "time.monotonic"}),
        ("def f():\n    import random", {"random"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import asyncio", {"typing", "typing.TYPE_CHECKING"}),
    ],
)
def test_the_reader_of_imports_sees_what_it_should(source: str, names: set[str]):
    assert set(imported(source)) == names


@pytest.mark.parametrize("path", modules("storage/**/*.py"), ids=short)
def test_in_storage_only_the_disk_port_touches_files(path: Path):
    if path.name == "disk.py":
        return
    opens = [n.lineno for n in ast.walk(tree_of(path)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "open"]
    names = {name.split(".")[0] for name in imports_of(path)} & FILE_IMPORTS
    assert not names, f"{short(path)} imports {names}; files are reached through storage/files/disk.py"
    assert not opens, f"{short(path)} opens a file at lines {opens}"


def test_a_module_says_what_it_is_for():
    assert not [short(path) for path in modules("**/*.py") if not docstring(source_of(path))], (
        "they have no module docstring"
    )


def test_a_sentence_has_a_subject_that_exists():
    """A reader knows who "no client" is, and has to guess who "nobody" is."""
    vague = re.compile(r"\b(nobody|whoever)\b", re.IGNORECASE)
    assert not [short(path) for path in modules("**/*.py") if vague.search(source_of(path))]


def test_functions_stay_readable():
    lengths = {
        f"{short(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in modules("**/*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > ALLOWED_LINES.get(name, FUNCTION_LINES_MAX)} == {}


def test_files_stay_readable():
    lengths = {short(path): source_of(path).count("\n") for path in modules("**/*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > ALLOWED_LINES.get(name, FILE_LINES_MAX)} == {}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked archive does not say what is committed")
def test_the_top_level_holds_what_a_reader_looks_for():
    """What a command left there was committed once."""
    command = ["git", "ls-files", "-z"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=PATIENCE_S)
    names = {name.partition("/")[0] for name in done.stdout.split("\0") if name}
    assert names == {*TOP_LEVEL, *ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_a_link_leads_to_each_room(room: str):
    link = ROOT / room
    assert link.is_symlink()
    assert str(link.readlink()) == f"tidelog/{room}"


def test_nobody_imports_through_a_link():
    files = [path for folder in (PACKAGE, ROOT / "tests") for path in folder.rglob("*.py")]
    offenders = {
        str(path.relative_to(ROOT))
        for path in files
        if IMPORTS_A_ROOM.search(source := path.read_text())
        for name in imported(source)
        if name.split(".")[0] in ROOMS
    }
    assert not offenders


def defined_in(path: Path) -> set[str]:
    """Names of a module's functions and classes, and of the methods of its classes as Class.method."""
    names: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.AsyncFunctionDef)}
    return names


def test_what_the_architecture_points_at_is_there():
    text = (ROOT / "docs" / "ARCHITECTURE.md").read_text()
    references = re.findall(r"`((?:\w+/)+\w+\.py)(?::([\w.]+))?`", text)
    assert len(references) > 30
    for file, name in references:
        path = ROOT / file if file.startswith("tests/") else PACKAGE / file
        assert path.is_file(), f"docs/ARCHITECTURE.md points at {file}, which is not there"
        assert not name or name in defined_in(path), f"docs/ARCHITECTURE.md points at {name}, which is not in {file}"


def test_the_index_of_decisions_is_complete():
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}


def test_there_is_no_circle_of_imports():
    """Imports for the type checker alone count, too: who needs a name to be understood stands on it."""
    graph = grimp.build_graph("tidelog", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imports.values())) > 1000
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' <- '.join(error.args[1])}")


def test_files_that_a_module_names_are_there():
    files = {short(path) for path in modules("**/*.py")}
    ends = {file.split("/", depth)[-1] for file in files for depth in range(file.count("/") + 1)}
    missing = {
        short(path): name
        for path in modules("**/*.py")
        for name in re.findall(r"`((?:\w+/)*\w+\.py)`", source_of(path))
        if name not in ends and not (ROOT / name).is_file()
    }
    assert missing == {}


def test_the_map_of_the_architecture_is_what_the_docstrings_say():
    rendered = architecture_map.rendered()
    assert architecture_map.PAGE.read_text() == rendered, "run: python -m tests.unit.architecture_map"
    assert "    dispatch.py - One frame in, one answer out" in rendered
