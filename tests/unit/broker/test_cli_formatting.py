"""`tidelog format`: whose a directory is, and the first voters of a quorum that can change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidelog.cli.main import main
from tidelog.protocol.uuids import uuid_from_text, uuid_to_text
from tidelog.replication.quorum.raft.snapshot import Snapshot, decode_snapshot
from tidelog.storage.files.checkpoints import decode_clean_shutdown, encode_clean_shutdown

CLUSTER = "AQEBAQEBQEGBAQEBAQEBAQ"
OTHER = "AgICAgICQkKCAgICAgICAg"
SNAPSHOT = "__cluster_metadata-0/00000000000000000000-0000000000.checkpoint"


def options(home: Path, node_id: int = 3, *, roles: str = "controller", **more: str) -> list[str]:
    config = {
        "node.id": str(node_id),
        "process.roles": roles,
        "listeners": "CONTROLLER://127.0.0.1:9093" if roles == "controller" else "PLAINTEXT://127.0.0.1:9092",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.bootstrap.servers": "127.0.0.1:9093",
        "log.dirs": str(home),
        **{key.replace("_", "."): value for key, value in more.items()},
    }
    return [word for key, value in config.items() if value for word in ("-o", f"{key}={value}")]


def properties(home: Path) -> dict[str, str]:
    return dict(line.split("=", 1) for line in (home / "meta.properties").read_text().splitlines() if "=" in line)


def snapshot(home: Path) -> Snapshot:
    return decode_snapshot((home / SNAPSHOT).read_bytes())


def test_directories_are_given_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = tmp_path / "data"
    assert main(["format", *options(home), "-t", CLUSTER]) == 0
    assert capsys.readouterr() == (f"{CLUSTER}\n", f"{home}: node 3 of cluster {CLUSTER}\n")
    assert {key: properties(home)[key] for key in ("cluster.id", "node.id")} == {"cluster.id": CLUSTER, "node.id": "3"}
    assert not (home / SNAPSHOT).exists(), "its voters are those of the configuration"
    before = properties(home)
    assert main(["format", *options(home), "-t", CLUSTER]) == 0
    assert properties(home) == before
    assert main(["format", *options(home), "-t", OTHER]) == 1
    assert f"belongs to cluster {CLUSTER}" in capsys.readouterr().err


def test_a_directory_that_is_formatted_already_keeps_the_broker_epoch_of_its_clean_stop(tmp_path: Path):
    """With another epoch, the controller would take the stop for an unclean one (KIP-966)."""
    home = tmp_path / "data"
    assert main(["format", *options(home), "-t", CLUSTER]) == 0
    marker = home / ".kafka_cleanshutdown"
    marker.write_bytes(encode_clean_shutdown(17))
    assert main(["format", *options(home), "-t", CLUSTER]) == 0
    assert decode_clean_shutdown(marker.read_bytes()) == 17


def test_a_controller_is_the_first_voter(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = tmp_path / "data"
    assert main(["format", *options(home), "-t", CLUSTER, "--standalone"]) == 0
    assert f"{home}: first voters 3\n" in capsys.readouterr().err
    found = snapshot(home)
    assert (found.kraft_version, found.values) == (1, [])
    assert found.voters is not None
    (voter,) = found.voters.voters
    assert (voter.voter_id, uuid_to_text(voter.voter_directory_id)) == (3, properties(home)["directory.id"])
    assert [(at.name, at.host, at.port) for at in voter.endpoints] == [("CONTROLLER", "127.0.0.1", 9093)]
    assert (voter.k_raft_version_feature.min_supported_version, voter.k_raft_version_feature.max_supported_version) == (
        0,
        1,
    )


def test_a_script_gets_the_id_alone_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = tmp_path / "data"
    assert main(["format", *options(home)]) == 0
    cluster_id = capsys.readouterr().out.strip()
    assert len(uuid_from_text(cluster_id)) == 16
    assert main(["format", *options(home), "--standalone", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "cluster_id": cluster_id,
        "node_id": 3,
        "directories": {str(home): properties(home)["directory.id"]},
        "first_voters": [3],
    }


@pytest.mark.parametrize("begun", ["quorum-state", "00000000000000000007-0000000002.checkpoint", f"{0:020}.log"])
def test_a_quorum_that_has_begun_keeps_its_voters(tmp_path: Path, capsys: pytest.CaptureFixture[str], begun: str):
    home = tmp_path / "data"
    assert main(["format", *options(home), "-t", CLUSTER]) == 0
    (home / "__cluster_metadata-0").mkdir()
    (home / "__cluster_metadata-0" / begun).write_bytes(b"x")
    assert main(["format", *options(home), "-t", CLUSTER, "--standalone"]) == 0
    shown = capsys.readouterr().err
    assert "first voters" not in shown
    assert "its quorum has begun already, and keeps its voters" in shown
    assert not (home / SNAPSHOT).exists()


def test_a_node_that_only_waited_for_a_quorum_can_be_made_its_first_voter(tmp_path: Path):
    home = tmp_path / "data"
    assert main(["format", *options(home), "-t", CLUSTER]) == 0
    (home / "__cluster_metadata-0").mkdir()
    (home / "__cluster_metadata-0" / f"{0:020}.log").touch()
    (home / "__cluster_metadata-0" / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAAAAAAAAAAAAAAQ\n")
    assert main(["format", *options(home), "-t", CLUSTER, "--standalone"]) == 0
    assert snapshot(home).voters is not None


def test_several_first_voters_are_the_same_on_each(tmp_path: Path):
    both = f"3@127.0.0.1:9093:{OTHER},4@[::1]:9094:{CLUSTER}"
    homes = {3: tmp_path / "three", 4: tmp_path / "four"}
    for node_id, home in homes.items():
        assert main(["format", *options(home, node_id), "-t", CLUSTER, "--initial-controllers", both]) == 0
    assert (properties(homes[3])["directory.id"], properties(homes[4])["directory.id"]) == (OTHER, CLUSTER)
    told = []
    for home in homes.values():
        voters = snapshot(home).voters
        assert voters is not None
        told.append([(each.voter_id, each.voter_directory_id, each.endpoints[0].host) for each in voters.voters])
    assert told[0] == told[1]
    assert told[0] == [(3, uuid_from_text(OTHER), "127.0.0.1"), (4, uuid_from_text(CLUSTER), "::1")]


@pytest.mark.parametrize(
    ("words", "changes", "problem"),
    [
        (["-t", "short"], {}, "no cluster id"),
        (["-s"], {"roles": "broker"}, "only a node with the controller role"),
        (["-s"], {"controller_quorum_bootstrap_servers": "", "controller_quorum_voters": "3@h:1"}, "names the voters"),
        (["-s", "-I", f"3@h:1:{OTHER}"], {}, "exclude each other"),
        (["-I", f"4@h:1:{OTHER}"], {}, "does not name this node, 3"),
        (["-I", f"3@h:1:{OTHER},3@h:2:{CLUSTER}"], {}, "there twice"),
        (["-I", "3@h:1"], {}, "not of the form"),
        (["-I", f"3@h:99999:{OTHER}"], {}, "not of the form"),
        (["-I", "3@h:1:zzz"], {}, "not of the form"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], changes: dict[str, str], problem: str
):
    home = tmp_path / "data"
    assert main(["format", *options(home, 3, **changes), *words]) == 1
    shown = capsys.readouterr()
    assert problem in shown.err
    assert shown.err.count("\n") == 1
    assert not home.exists()


def test_first_voters_of_a_node_without_a_quorum_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    quorum = ["-o", "controller.quorum.bootstrap.servers=h:1"]
    for words, problem in (
        (["-I", f"1@h:1:{OTHER}"], "controller.quorum.bootstrap.servers must say"),
        (["-I", f"1@h:1:{OTHER}", *quorum], "controller.listener.names must name"),
        (["-s", *quorum], "controller.listener.names must name"),
    ):
        assert main(["format", *words]) == 1
        shown = capsys.readouterr()
        assert problem in shown.err
        assert shown.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_directory_than_the_one_formatted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    home = tmp_path / "data"
    assert main(["format", *options(home), "-t", CLUSTER]) == 0
    words = ["--initial-controllers", f"3@127.0.0.1:9093:{OTHER}"]
    assert main(["format", *options(home), "-t", CLUSTER, *words]) == 1
    assert f"not {OTHER}" in capsys.readouterr().err
