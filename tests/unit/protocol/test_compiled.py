"""The cache of compiled loops: a file that is empty or damaged, as after a loss of power, costs a compilation."""

from __future__ import annotations

import errno
import gc
import importlib.util
import sys
from pathlib import Path

import pytest

numba = pytest.importorskip("numba")
caching = pytest.importorskip("numba.core.caching")


@pytest.fixture
def double(tmp_path, monkeypatch):
    """A function to compile, from a file as numba's cache needs it."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    source = tmp_path / "loops.py"
    source.write_text("def double(x):\n    return 2 * x\n")
    spec = importlib.util.spec_from_file_location("loops", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loops", module)  # a loop that is loaded from the cache looks for its module
    spec.loader.exec_module(module)
    return module.double


def cache_hits(function) -> int:
    from tidelog.protocol.batches.compiled import compiled

    gc.collect()  # what numba keeps of the loop before: a later process has nothing of it
    loop = compiled(function)
    assert loop(21) == 42
    return sum(loop.stats.cache_hits.values())


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def hole(path: Path) -> None:
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(64)
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [empty, zero, cut, hole])
@pytest.mark.parametrize("pattern", ["*.nbi", "*.nbc"])
def test_a_damaged_cache_is_made_anew(double, tmp_path, pattern, damage):
    assert [cache_hits(double) for _ in range(2)] == [0, 1]
    files = list((tmp_path / "cache").rglob(pattern))
    assert files
    for path in files:
        damage(path)
    assert [cache_hits(double) for _ in range(2)] == [0, 1]


def test_code_of_another_kind_is_not_run(double, tmp_path):
    """numba may give two processes that compile at once, for other types or processors, the same file."""
    from tidelog.protocol.batches.compiled import compiled

    assert compiled(double)(21) == 42
    (whole,) = (tmp_path / "cache").rglob("*.nbc")
    assert compiled(double)(1.25) == 2.5
    (fraction,) = set((tmp_path / "cache").rglob("*.nbc")) - {whole}
    fraction.write_bytes(whole.read_bytes())
    loop = compiled(double)
    assert loop(1.25) == 2.5
    assert not loop.stats.cache_hits


def test_a_cache_that_cannot_be_written_is_none(double, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "save", refuse)
    assert [cache_hits(double) for _ in range(2)] == [0, 0]
