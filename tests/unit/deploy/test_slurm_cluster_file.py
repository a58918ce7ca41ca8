"""The cluster file of a Slurm job: where processes run, and what nodes have from the base file."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner, Result

from common.config import load_cluster
from common.errors import ConfigError
from deploy.slurm.cluster_file import AllocatedHost, Wanted, main, place, read_hosts, sections_of

ROOT = Path(__file__).resolve().parents[3]
MODEL = {"model": {"path": str(ROOT / "deploy/tiny_models/tiny-target")}}


def hosts(count: int) -> list[AllocatedHost]:
    return [AllocatedHost(f"n{index}", f"10.0.0.{index}") for index in range(1, count + 1)]


@pytest.mark.parametrize(
    ("count", "prefill", "decode", "expected"),
    [
        (1, 1, 1, {"router": "n1", "prefill-0": "n1", "decode-0": "n1"}),
        (2, 1, 1, {"router": "n1", "prefill-0": "n1", "decode-0": "n2"}),
        (3, 1, 1, {"router": "n1", "prefill-0": "n2", "decode-0": "n3"}),
        (2, 2, 1, {"router": "n1", "prefill-0": "n1", "prefill-1": "n2", "decode-0": "n1"}),
    ],
)
def test_processes_are_spread_over_the_hosts(
    count: int, prefill: int, decode: int, expected: dict[str, str]
) -> None:
    placed = place(hosts(count), Wanted(prefill, decode))
    assert {each.name: each.host.name for each in placed} == expected


def sections(base: dict[str, Any], count: int = 2) -> dict[str, Any]:
    return sections_of(base, place(hosts(count), Wanted(2, 1)), 7100, Path("/job/keys"))


def test_nodes_have_addresses_of_their_hosts_and_ports_of_their_own() -> None:
    found = sections({})
    assert found == {
        "router": {"control_address": "tcp://10.0.0.1:7100"},
        "prefill": {
            "nodes": [
                {"name": "prefill-0", "peer_address": "tcp://10.0.0.1:7101"},
                {"name": "prefill-1", "peer_address": "tcp://10.0.0.2:7102"},
            ]
        },
        "decode": {"nodes": [{"name": "decode-0", "host": "10.0.0.1"}]},
        "security": {"keys": "/job/keys"},
    }


def test_the_first_node_of_a_role_is_the_template_of_all() -> None:
    first = {"name": "p", "device": "cuda:0", "peer_address": "tcp://10.9.9.9:1"}
    base: dict[str, Any] = {
        "prefill": {"nodes": [first, {"name": "q"}], "chunk_tokens": 512},
        "security": {"keys": "own"},
    }
    found = sections(base)
    assert [node["device"] for node in found["prefill"]["nodes"]] == ["cuda:0", "cuda:0"]
    assert [node["name"] for node in found["prefill"]["nodes"]] == ["prefill-0", "prefill-1"]
    assert found["prefill"]["chunk_tokens"] == 512
    assert found["security"] == {"keys": "own"}
    assert base["prefill"]["nodes"] == [first, {"name": "q"}], "the base is not changed"


def test_movable_nodes_have_an_entry_for_either_role_and_start_as_the_base_says() -> None:
    base: dict[str, Any] = {
        "decode": {"nodes": [{"name": "d", "device": "cuda:0"}]},
        "movable": {"nodes": [{"name": "x", "role": "prefill"}], "prefill_memory_fraction": 0.3},
    }
    placed = place(hosts(2), Wanted(1, 1, movable=2))
    assert [each.role for each in placed[-2:]] == ["deploy.movable_node"] * 2
    found = sections_of(base, placed, 7100, Path("/job/keys"))
    assert found["prefill"]["nodes"][1:] == [
        {"name": "flex-0", "peer_address": "tcp://10.0.0.1:7103"},
        {"name": "flex-1", "peer_address": "tcp://10.0.0.2:7104"},
    ]
    assert found["decode"]["nodes"][1:] == [
        {"name": "flex-0", "host": "10.0.0.1", "device": "cuda:0"},
        {"name": "flex-1", "host": "10.0.0.2", "device": "cuda:0"},
    ]
    assert found["movable"] == {
        "nodes": [{"name": "flex-0", "role": "prefill"}, {"name": "flex-1", "role": "prefill"}],
        "prefill_memory_fraction": 0.3,
    }
    pure = sections_of(base, place(hosts(2), Wanted(1, 1)), 7100, Path("/job/keys"))
    assert pure["movable"] == {"prefill_memory_fraction": 0.3}


def test_hosts_on_loopback_need_no_keys_and_ipv6_is_put_in_brackets() -> None:
    placed = place([AllocatedHost("n1", "::1")], Wanted(1, 1))
    found = sections_of({}, placed, 7100, Path("/job/keys"))
    assert "security" not in found
    assert found["router"] == {"control_address": "tcp://[::1]:7100"}
    assert found["decode"]["nodes"][0]["host"] == "::1"


def test_addresses_of_hosts_are_resolved() -> None:
    assert [each.address for each in read_hosts(["a=127.0.0.5", "b=127.0.0.1"])] == ["127.0.0.5", "127.0.0.1"]
    with pytest.raises(
        ConfigError, match=r"n7=no such host: has no address: .*; set NodeAddr in slurm\.conf"
    ):
        list(read_hosts(["n7=no such host"]))


def write(tmp_path: Path, out: str, *arguments: str, base: Any = MODEL) -> Result:
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    words = [str(tmp_path / "base.yaml"), str(tmp_path / out), "n1=127.0.0.1", "n2=127.0.0.1", *arguments]
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, words)


def test_the_file_can_be_loaded_and_the_plan_is_printed(tmp_path: Path) -> None:
    result = write(tmp_path, "job.yaml", "--decode", "2")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
        "router router n1",
        "prefill-0 prefill_node n1",
        "decode-0 decode_node n2",
        "decode-1 decode_node n1",
    ]
    assert (tmp_path / "job.yaml").is_file()


def test_a_job_with_movable_nodes_can_be_loaded(tmp_path: Path) -> None:
    result = write(tmp_path, "job.yaml", "--movable", "1")
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[-1] == "flex-0 deploy.movable_node n1"
    assert load_cluster(tmp_path / "job.yaml").cluster.movable.role_of("flex-0") == "decode"


def test_router_processes_share_the_first_host_and_have_the_first_ports(tmp_path: Path) -> None:
    result = write(tmp_path, "job.yaml", base={**MODEL, "router": {"processes": 3}})
    assert result.output.splitlines()[:4] == [
        *("router router n1", "router.1 router n1", "router.2 router n1", "prefill-0 prefill_node n1")
    ]
    found = yaml.safe_load((tmp_path / "job.yaml").read_text())
    assert found["router"]["control_address"] == "tcp://127.0.0.1:7100"
    assert found["prefill"]["nodes"][0]["peer_address"] == "tcp://127.0.0.1:7103"


@pytest.mark.parametrize(
    ("out", "base", "said"),
    [
        ("folder/job.yaml", MODEL, "must be in the folder of"),
        ("job.yaml", {**MODEL, "kv": {"page": 3}}, "kv.page"),
        ("job.yaml", {**MODEL, "decode": {"nodes": [{"name": "d", "tensor_parallel": 2}]}}, "a movable node"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, out: str, base: Any, said: str) -> None:
    result = write(tmp_path, out, "--movable", "1", base=base)
    assert result.exit_code == 2
    assert said in result.output


def test_the_batch_script_refuses_to_run_without_slurm() -> None:
    script = ROOT / "deploy/slurm/cluster.sbatch"
    for words, said in (([], "usage, in the checkout: sbatch"), (["base.yaml"], "run it with sbatch")):
        done = subprocess.run(["bash", script, *words], capture_output=True, text=True, check=False, env={})
        assert done.returncode == 2
        assert said in done.stderr


def test_a_file_that_is_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").symlink_to("job.yaml")
    result = write(tmp_path, "job.yaml")
    assert result.exit_code == 2
    assert os.strerror(errno.ELOOP) in result.output
