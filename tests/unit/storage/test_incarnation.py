from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tidelog.storage.files.disk import OsDisk
from tidelog.storage.files.incarnation import (
    INCARNATION_FILE,
    WRITTEN_WITHIN_MS,
    surviving_epoch,
    write_incarnation,
)


def test_what_a_killed_process_wrote_is_there_until_the_machine_boots(tmp_path):
    write_incarnation(OsDisk(), str(tmp_path), 7, "boot 1")
    assert surviving_epoch(OsDisk(), str(tmp_path), "boot 1") == 7
    assert surviving_epoch(OsDisk(), str(tmp_path), "boot 2") == -1


def test_where_the_machine_does_not_tell_nothing_is_certain(tmp_path):
    write_incarnation(OsDisk(), str(tmp_path), 7, "")
    assert surviving_epoch(OsDisk(), str(tmp_path), "") == -1


@pytest.mark.parametrize("content", [None, b"", b"{}", b"[]", b'{"brokerEpoch":"x","bootId":"boot"}', b"\x00\xff" * 9])
def test_a_torn_or_missing_file_vouches_for_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / INCARNATION_FILE).write_bytes(content)
    assert surviving_epoch(OsDisk(), str(tmp_path), "boot") == -1


def test_a_copy_vouches_for_nothing(tmp_path):
    """A directory that was copied while it was in use, and copied back, lacks what was written meanwhile."""
    home, backup = tmp_path / "home", tmp_path / "backup"
    home.mkdir()
    write_incarnation(OsDisk(), str(home), 7, "boot")
    shutil.copytree(home, backup)
    assert surviving_epoch(OsDisk(), str(backup), "boot") == -1
    home.rename(tmp_path / "moved")
    assert surviving_epoch(OsDisk(), str(tmp_path / "moved"), "boot") == 7
    shutil.copytree(backup, home)
    assert surviving_epoch(OsDisk(), str(home), "boot") == -1
    write_incarnation(OsDisk(), str(home), 8, "boot")
    assert surviving_epoch(OsDisk(), str(home), "boot") == 8


AGE_S = 1.1 * WRITTEN_WITHIN_MS / 1000


class OneInodeDisk(OsDisk):
    """ext4, tmpfs and overlays give the inode number of a removed file to another one."""

    def identity(self, path: str) -> str:
        return "2049:11"


def as_new_file(file: Path) -> None:
    """As a restore after `rm -r`."""
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content)


def as_present_file(file: Path) -> None:
    """As `cp -a backup/. data/`."""
    status, content = file.stat(), file.read_bytes()
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def as_hard_link(file: Path) -> None:
    """As `cp -al` and a removal of the original. Segments that began after the copy are not in it."""
    link = file.with_name("link")
    os.link(file, link)
    file.unlink()
    link.rename(file)


@pytest.mark.parametrize("restore", [as_new_file, as_present_file, as_hard_link])
def test_a_file_with_the_same_inode_that_changed_since_vouches_for_nothing(tmp_path, restore):
    write_incarnation(OneInodeDisk(), str(tmp_path), 7, "boot")
    time.sleep(AGE_S)
    assert surviving_epoch(OneInodeDisk(), str(tmp_path), "boot") == 7
    restore(tmp_path / INCARNATION_FILE)
    assert surviving_epoch(OneInodeDisk(), str(tmp_path), "boot") == -1
    write_incarnation(OneInodeDisk(), str(tmp_path), 8, "boot")
    assert surviving_epoch(OneInodeDisk(), str(tmp_path), "boot") == 8


class MountedDisk(OsDisk):
    def __init__(self, mount: str) -> None:
        self.mount = mount

    def mount_of(self, path: str) -> str:
        return self.mount


def test_a_volume_that_was_mounted_again_vouches_for_nothing(tmp_path):
    """It may have been read-only after an error, and then it has lost what was not synced."""
    write_incarnation(MountedDisk("30144"), str(tmp_path), 7, "boot")
    assert surviving_epoch(MountedDisk("30144"), str(tmp_path), "boot") == 7
    assert surviving_epoch(MountedDisk("30198"), str(tmp_path), "boot") == -1


def test_where_the_system_tells_no_mounts_the_boot_decides(tmp_path):
    write_incarnation(MountedDisk(""), str(tmp_path), 7, "boot")
    assert surviving_epoch(MountedDisk(""), str(tmp_path), "boot") == 7


@pytest.mark.parametrize("name", ["mount", "file", "writtenMs"])
def test_a_file_of_an_earlier_release_says_less_and_does_not_count(tmp_path, name):
    write_incarnation(OsDisk(), str(tmp_path), 7, "boot")
    content = json.loads((tmp_path / INCARNATION_FILE).read_bytes())
    del content[name]
    (tmp_path / INCARNATION_FILE).write_text(json.dumps(content))
    assert surviving_epoch(OsDisk(), str(tmp_path), "boot") == -1


def run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    if done.returncode:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def mounted(path: Path, *options: str) -> Iterator[None]:
    run("mount", *options, str(path))
    try:
        yield
    finally:
        run("umount", str(path))


@pytest.mark.slow
def test_a_mount_of_ext4_is_told_from_the_next_and_not_from_a_bind_mount(tmp_path):
    """Needs to mount a file, so it is skipped where that is not allowed."""
    disk, image, volume, bound = OsDisk(), tmp_path / "image", tmp_path / "volume", tmp_path / "bound"
    volume.mkdir()
    bound.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    run("mkfs.ext4", "-q", "-F", str(image))
    with mounted(volume, "-o", "loop", str(image)):
        first = disk.mount_of(str(volume))
        assert first
        with mounted(bound, "--bind", str(volume)):
            assert disk.mount_of(str(bound)) == first
        run("mount", "-o", "remount,ro", str(volume))
        assert disk.mount_of(str(volume)) == first
    with mounted(volume, "-o", "loop", str(image)):
        assert disk.mount_of(str(volume)) not in ("", first)
