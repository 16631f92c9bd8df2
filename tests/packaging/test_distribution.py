"""What is built is what runs: the wheel and the sdist hold everything once and work outside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "tidelog/bench/results/"
ROOMS = {"protocol", "storage", "replication", "client", "broker", "cli", "testing", "spark_ingest", "bench"}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Output of a command that has to succeed, with nothing of the checkout on its path."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * PATIENCE_S,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def committed() -> set[str]:
    """The package's files under version control, or on disk where there is no git; without a benchmark's figures."""
    names = run("git", "ls-files", "tidelog", "pyspark_tidelog.py", cwd=ROOT).split()
    return {name for name in names if (ROOT / name).is_file() and not name.startswith(RESULTS)}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist, built from this checkout."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (found,) = built.glob("*.tar.gz")
    return found


def test_the_wheel_holds_the_package_once(wheel: Path):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert Counter(names).most_common(1)[0][1] == 1
    assert {name.split("/")[0] for name in names} == {"tidelog", "pyspark_tidelog.py"}
    assert committed() <= set(names)
    assert not [name for name in names if name.startswith(RESULTS)]


def test_the_sdist_holds_the_package_once_and_no_links(sdist: Path):
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = [member.name.partition("/")[2] for member in members if member.isfile()]
    assert Counter(names).most_common(1)[0][1] == 1
    tops = {name.split("/")[0] for name in names}
    assert not tops & ROOMS
    assert "tests" not in tops
    assert committed() <= set(names)
    assert not [name for name in names if name.startswith(RESULTS)]
    assert {"README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "pyproject.toml"} <= set(names)


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin directory of a fresh environment in which the distribution alone was installed.

    What it depends on is taken from this environment, read-only, so that the test needs no network.
    """
    distribution: Path = request.getfixturevalue(request.param)
    home = tmp_path_factory.mktemp(f"installed-from-{request.param}")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    packages = next(home.glob("lib/python*/site-packages"))
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    # Added after the fresh environment's own packages, and without running the .pth files in it: an editable
    # installation of this checkout stays out of sight.
    (packages / "dependencies.pth").write_text(dependencies + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", distribution, cwd=home)
    return home / "bin"


def test_the_command_answers_outside_the_checkout(installed: Path, tmp_path: Path):
    assert run(installed / "tidelog", "--version", cwd=tmp_path).startswith("tidelog 0.")
    assert "topics" in run(installed / "tidelog", "--help", cwd=tmp_path)


def test_the_packages_import_from_the_installation(installed: Path, tmp_path: Path):
    code = "import tidelog, pyspark_tidelog; print(tidelog.__file__); print(pyspark_tidelog.__file__)"
    for line in run(installed / "python", "-c", code, cwd=tmp_path).split():
        assert Path(line).is_relative_to(installed.parent), line


def test_the_rooms_are_not_importable_by_their_plain_names(installed: Path, tmp_path: Path):
    code = f"import importlib.util as u; print([n for n in {sorted(ROOMS)!r} if u.find_spec(n)])"
    assert run(installed / "python", "-c", code, cwd=tmp_path).strip() == "[]"


def test_importing_the_face_loads_no_room(installed: Path, tmp_path: Path):
    code = "import sys, tidelog; print([n for n in sys.modules if n.startswith('tidelog.') or n == 'asyncio'])"
    assert run(installed / "python", "-c", code, cwd=tmp_path).strip() == "['tidelog.version']"


def test_types_are_delivered(wheel: Path):
    assert "tidelog/py.typed" in zipfile.ZipFile(wheel).namelist()
