from __future__ import annotations

import shutil

import pytest

from tidelog.storage.files.disk import OsDisk
from tidelog.storage.files.incarnation import INCARNATION_FILE, surviving_epoch, write_incarnation


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
