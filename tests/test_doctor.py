"""The doctor: what it measures on two ranks, how it judges, what it forecasts; and the report for issues."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks
from typer.testing import CliRunner

from shardmp import budgeting, budgets, doctor, doctor_findings, doctor_wire, environment_report, host_facts, network
from shardmp.budget_words import ITEMSIZE, entries_of_count
from shardmp.cli import app
from shardmp.doctor_board import Board
from shardmp.doctor_findings import Cluster, Thresholds
from shardmp.doctor_forecast import Ways, step
from shardmp.doctor_visit import Visit, merged
from shardmp.layout import Entry
from shardmp.world import World

SMALL = doctor.Settings(most_bytes=2**16, timeout=10.0)


def cluster(*hosts: str, **changed: dict[int, Any]) -> Cluster:
    """A rank on each of these hosts, all alike; `key={rank: value}` changes a fact of a rank."""
    facts = []
    for rank, host in enumerate(hosts):
        said = {
            "host": host,
            "host_id": host,
            "versions": {"shardmp": "1", "shardmp source": "aa", "torch": "2", "python": "3.11.7"},
            "environment": {"NCCL_DEBUG": "WARN", "RANK": str(rank), "GLOO_SOCKET_IFNAME": f"eth{rank}"},
            "interface": {"name": "eth0", "mtu": 1500, "speed": None},
            "gpu": None,
            "gpus": [],
            "infiniband": [],
            "shared_memory": {"size": 2**34, "free": 2**34},
            "limits": {"open files": 10000, "locked memory": 2**16},
            "cpu": {"threads": 1, "cores": 2},
        }
        facts.append(said | {key: values[rank] for key, values in changed.items() if rank in values})
    return Cluster.of(facts)


def versions(**changed: str) -> dict[str, str]:
    return cluster("a").facts[0]["versions"] | changed


# -- what differs, and what is too small


def test_hosts_that_are_alike_have_no_finding() -> None:
    """The rank's own number and the card's name may differ."""
    assert doctor_findings.differences(cluster("a", "b", "c")) == []
    assert doctor_findings.limits(cluster("a", "b", "c"), Thresholds()) == []


def test_the_minority_is_the_one_to_look_at() -> None:
    other = cluster("a", "b", "c", versions={1: versions(torch="2.1")})
    (finding,) = doctor_findings.differences(other)
    assert finding.hosts == ("b",)
    assert finding.text == "torch is 2 on hosts a, c, 2.1 on host b"
    assert finding.severity == "error"


def test_another_version_is_one_finding_and_an_edited_copy_another() -> None:
    """The checksum of the files tells what the version does not."""
    newer = versions(shardmp="2") | {"shardmp source": "bb"}
    assert [f.text for f in doctor_findings.differences(cluster("a", "b", "c", versions={2: newer}))] == [
        "shardmp is 1 on hosts a, b, 2 on host c"
    ]
    (edited,) = doctor_findings.differences(cluster("a", "b", versions={1: versions(**{"shardmp source": "bb"})}))
    assert edited.text == "shardmp source is aa on host a, bb on host b"


def test_a_variable_or_an_mtu_that_differs_is_found() -> None:
    other = cluster("a", "b", "c", environment={0: {}}, interface={2: {"name": "eth0", "mtu": 9000, "speed": None}})
    variable, mtu = doctor_findings.differences(other)
    assert variable.text == "NCCL_DEBUG is WARN on hosts b, c, not set on host a"
    assert variable.severity == "warning"
    assert (mtu.hosts, mtu.severity) == (("c",), "error")


def test_limits_that_are_too_small_are_named_with_the_cure() -> None:
    small = cluster(
        "a", "b",
        shared_memory={1: {"size": 2**26, "free": 2**26}},
        limits={0: {"open files": 256, "locked memory": None}, 1: {"open files": None, "locked memory": 2**16}},
        infiniband={0: ["mlx5_0"], 1: ["mlx5_0"]},
    )  # fmt: skip
    found = {finding.check: finding for finding in doctor_findings.limits(small, Thresholds())}
    assert {check: finding.hosts for check, finding in found.items()} == {
        "open files": ("a",), "shared memory": ("b",), "locked memory": ("b",),
    }  # fmt: skip
    assert "--shm-size" in found["shared memory"].cure
    assert "ulimit -n 520" in found["open files"].cure  # 512 + 4 for each rank
    assert "memlock" in found["locked memory"].cure


def test_locked_memory_matters_where_a_card_or_a_gpu_needs_it_alone() -> None:
    """NVIDIA/nccl-tests#206: ibv_reg_mr failed. gloo on the CPU locks nothing."""
    gpu = [{"name": "V100"}]
    severities = [
        [finding.severity for finding in doctor_findings.limits(cluster("a", **facts), Thresholds())]
        for facts in ({}, {"gpus": {0: gpu}}, {"infiniband": {0: ["mlx5_0"]}})
    ]
    assert severities == [[], ["warning"], ["error"]]


def test_more_threads_than_cores_is_a_warning() -> None:
    facts = cluster("a", "b", cpu={0: {"threads": 2, "cores": 2}, 1: {"threads": 2, "cores": 2}}).facts
    one_host = Cluster.of([{**said, "host_id": "a", "host": "a"} for said in facts])
    (finding,) = doctor_findings.limits(one_host, Thresholds())
    assert (finding.severity, finding.cure) == ("warning", "Set OMP_NUM_THREADS=1")


def test_hosts_that_share_a_name_are_told_apart() -> None:
    facts = [{**said, "host": "localhost"} for said in cluster("a", "b").facts]
    assert [Cluster.of(facts).name(rank) for rank in (0, 1)] == ["localhost (rank 0)", "localhost (rank 1)"]


# -- clocks, ports, values


def clock(seconds: float) -> dict[str, float]:
    return {"clock": seconds, "clock_error": 0.001}


def test_a_clock_that_is_ahead_or_behind_is_named() -> None:
    hosts = cluster("a", "b", "c")
    (finding,) = doctor_findings.clocks(hosts, {1: clock(0.5), 2: clock(-90.0)}, Thresholds())
    assert finding.hosts == ("c",)
    assert "90 s behind that of host a" in finding.text
    (own,) = doctor_findings.clocks(hosts, {1: clock(90.0), 2: clock(90.0)}, Thresholds())
    assert own.hosts == ("a",)  # not both of the others
    assert doctor_findings.clocks(hosts, {1: {"clock": 1.2, "clock_error": 0.3}}, Thresholds()) == []


def test_closed_ports_and_wrong_values_name_both_ends() -> None:
    hosts = cluster("a", "b")
    closed = {"from": 0, "to": 1, "closed": ["10.0.0.2 port 40001: no answer"], "tried": 8, "range": [32768, 60999]}
    (port,) = doctor_findings.ports(hosts, [closed])
    assert port.hosts == ("a", "b")
    assert "10.0.0.2 port 40001" in port.text
    assert "ports 32768 to 60999" in port.cure
    wrong = {
        "rank": 0,
        "operation": "all-to-all",
        "dtype": "float16",
        "source": 1,
        "element": 3,
        "expected": 1.0,
        "got": 2.0,
    }
    (value,) = doctor_findings.values(hosts, [wrong])
    assert value.hosts == ("a", "b")
    assert "in what comes from rank 1 on host b: element 3 is 2, expected 1" in value.text


# -- links


def mesh(count: int, speed: float = 1e9) -> dict[tuple[int, int], float]:
    return {(a, b): speed for a in range(count) for b in range(count) if a != b}


@pytest.mark.parametrize(("index", "verb"), [(0, "sends"), (1, "receives")])
def test_a_capped_host_is_named_and_not_its_partners(index: int, verb: str) -> None:
    """pytorch/torchtitan#915: one host's card at a tenth of the others'."""
    speeds = {pair: 1e8 if pair[index] == 2 else speed for pair, speed in mesh(4).items()}
    (finding,) = doctor_findings.slow_links(cluster(*"abcd"), speeds, Thresholds())
    assert finding.hosts == ("c",)
    assert f"host c (rank 2) {verb} at 100 MB/s at best; the usual here is 1 GB/s" in finding.text


def test_one_slow_link_or_two_hosts_are_named_as_a_pair() -> None:
    speeds = mesh(4) | {(1, 3): 1e8}
    (finding,) = doctor_findings.slow_links(cluster(*"abcd"), speeds, Thresholds())
    assert finding.hosts == ("b", "d")
    (two,) = doctor_findings.slow_links(cluster("a", "b"), {(0, 1): 1e9, (1, 0): 1e8}, Thresholds())
    assert two.hosts == ("b", "a")
    assert "outgoing side" in two.cure


def test_links_that_are_all_slow_are_found_only_by_what_was_asked_for() -> None:
    speeds = mesh(3, 1e8)
    assert doctor_findings.slow_links(cluster(*"abc"), speeds, Thresholds()) == []
    asked = doctor_findings.slow_links(cluster(*"abc"), speeds, Thresholds(bandwidth=5e8))
    assert len(asked) == 6
    late = doctor_findings.late_links(cluster(*"ab"), {(0, 1): 0.02}, Thresholds(latency=0.01))
    assert "20 ms" in late[0].text
    assert doctor_findings.late_links(cluster(*"ab"), {(0, 1): 0.02}, Thresholds()) == []


def test_what_looks_slow_is_measured_again_and_the_better_counts() -> None:
    speeds = mesh(3) | {(2, 0): 1e8}
    assert doctor_findings.to_measure_again(speeds, Thresholds()) == [(0, 2)]
    assert doctor_findings.to_measure_again(mesh(3), Thresholds()) == []
    one = {"pair": [0, 2], "latency": 2.0, "to": 1.0, "from": 5.0, "both": 1.0}
    assert merged([[one], None, [{**one, "latency": 1.0, "to": 3.0}]]) == {
        (0, 2): {"latency": 1.0, "to": 3.0, "from": 5.0, "both": 1.0}
    }


@pytest.mark.parametrize("count", range(10))
def test_rounds_are_disjoint_pairs_and_meet_all_once(count: int) -> None:
    """The circle method of round-robin tournaments."""
    rounds = list(doctor_wire.rounds(count, 100))
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs)) == count * (count - 1) // 2
    for pairs in rounds:
        assert len({number for pair in pairs for number in pair}) == 2 * len(pairs)


def test_of_many_hosts_each_meets_some() -> None:
    pairs = [pair for pairs in doctor_wire.rounds(1000, 16) for pair in pairs]
    assert len(pairs) == 16 * 500
    assert {number for pair in pairs for number in pair} == set(range(1000))


# -- the forecast

RUN = budgets.Run(entries_of_count(3 * 2**20, "fp16", 1.0), bucket_mb=1.0)


def rows(found: dict[str, Any], key: str) -> list[Any]:
    return [row[key] for row in found["collectives"]]


def test_bytes_and_calls_of_a_step_are_those_of_the_budget() -> None:
    ways = Ways(1e9, 0.0, 1e9, 0.0)
    for sizes in ([2], [4], [2, 2], [4, 4], [1, 1, 1]):
        ranks, hosts = sum(sizes), len(sizes)
        run = dataclasses.replace(RUN, ranks=ranks, ranks_per_host=ranks // hosts)
        layout = run.layout()
        found = step(RUN, sizes, ways)
        assert sum(rows(found, "rank_bytes")) == run.sent(layout)
        card = budgeting.card_bytes(layout, ITEMSIZE, ranks_per_host=ranks // hosts)
        assert rows(found, "card_bytes") == [card["reduction"], card["gather"], card["verdict"]]
        assert rows(found, "calls") == [len(layout.buckets), len(layout.buckets), 1]


def test_the_slower_way_decides_and_each_call_has_its_latency() -> None:
    """2 ranks, 6 MiB in 6 buckets: each sends the other half of 6 MiB, twice; the verdict goes there and back."""
    one_host = step(RUN, [2], Ways(2**20, 0.001, None, None))
    assert rows(one_host, "seconds")[:2] == pytest.approx([3 + 0.006, 3 + 0.006])
    slow_card = step(RUN, [1, 1], Ways(None, None, 2**19, 0.0))
    assert rows(slow_card, "seconds")[:2] == pytest.approx([6, 6])
    both = step(RUN, [2, 2], Ways(2**20, 0.0, 2**30, 0.0))  # 1.5 MiB to the other rank here; the card is not the limit
    assert rows(both, "seconds")[1] == pytest.approx(1.5)


def test_hosts_of_unequal_size_take_one_hop_through_the_busiest_card() -> None:
    """3 + 1 ranks: each card carries 3 x 1 rows of a quarter of 6 MiB, in each direction of the step."""
    found = step(RUN, [3, 1], Ways(1e9, 0.0, 1e9, 0.0))
    assert rows(found, "card_bytes")[:2] == [3 * 6 * 2**20 // 4] * 2


def test_a_step_of_several_backwards_reduces_in_each() -> None:
    run = dataclasses.replace(RUN, backwards=3, entries=(Entry("w", 2**20, "fp16"),))
    found = step(run, [2], Ways(2**20, 0.0, None, None))
    assert rows(found, "seconds")[0] == pytest.approx(3 * rows(found, "seconds")[1])


# -- on two ranks


@on_ranks(2)
def test_a_visit_on_two_ranks_is_healthy_and_both_know_it(rank: int) -> None:
    verdict = doctor.examine(dataclasses.replace(SMALL, run=RUN))
    assert verdict.ok, verdict.findings
    assert (verdict.report is None) == (rank == 1)
    if verdict.report is not None:
        report = json.loads(json.dumps(verdict.report))
        (link,) = report["links"]["measured"]
        assert (link["first"], link["second"]) == (0, 1)
        assert min(link["to"], link["from"], link["both"]) > 1e5
        assert 0 < link["latency"] < 1
        assert abs(report["clocks"][0]["clock"]) <= report["clocks"][0]["clock_error"] + 0.01
        assert report["step"]["seconds"] > 0
        assert report["values"]["wrong"] == []
        assert [said["rank"] for said in report["ranks"]] == [0, 1]


def test_links_inside_a_host_are_not_what_those_between_hosts_are_measured_by() -> None:
    """--every-rank: a copy in memory, or NVLink, is faster than any network."""
    world = World(0, 4, 0, torch.device("cpu"), "gloo", "host0")
    visit = Visit(
        world, Board(dist.HashStore(), 0, 4, 1.0), Thresholds(),
        timeout=1.0, every_rank=True, most_bytes=2**16, run=None,
    )  # fmt: skip
    visit.hosts, visit.cluster = [[0, 1], [2, 3]], cluster("a", "a", "b", "b")
    fast, usual = {"latency": 1e-5, "to": 1e10, "from": 1e10, "both": 1e10}, 1e9
    network_link = {"latency": 1e-4, "to": usual, "from": usual, "both": usual}
    pairs = [(a, b) for a in range(4) for b in range(a + 1, 4)]
    visit._judge_links(range(4), {pair: fast if pair in ((0, 1), (2, 3)) else network_link for pair in pairs}, {})
    assert visit.findings == []


@on_ranks(4)
def test_hosts_of_two_ranks_are_measured_between_and_inside(rank: int) -> None:
    """Only the first rank of a host speaks to other hosts, and the others take part in what all must."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "host_id", lambda: f"host{rank // 2}")
        settings = dataclasses.replace(SMALL, run=RUN, thresholds=Thresholds(slow=1e-6))
        verdict = doctor.examine(settings)
    assert verdict.ok, verdict.findings
    assert verdict.speaks == (rank in (0, 2))
    if verdict.report is not None:
        assert verdict.report["links"]["ends"] == [0, 2]
        measured = {(link["first"], link["second"]) for link in verdict.report["links"]["measured"]}
        assert measured == {(0, 2), (0, 1), (2, 3)}
        assert [host["ranks"] for host in verdict.report["hosts"]] == [[0, 1], [2, 3]]
        assert all(row["card_bytes"] > 0 for row in verdict.report["step"]["collectives"])


def _visit_with(fault: str) -> tuple[bool, list[str]]:
    """A visit of two ranks that pretend to be two hosts, with something wrong on one of them; the errors."""
    rank = dist.get_rank()
    host, calls = f"host{rank}", itertools.count()
    exchange, knock, now = dist.all_to_all_single, network.knock, time.time

    def corrupting(received: torch.Tensor, sent: torch.Tensor) -> None:
        exchange(received, sent)
        if received.dtype == torch.bfloat16:
            received[1030] += 1  # element 6 of the row of 1024 that comes from rank 1

    def failing(*_: Any) -> None:
        raise RuntimeError("the card is on fire")

    def knocking(*door: Any) -> str:
        return "no answer within 2 s" if next(calls) % 2 else knock(*door)

    faults: dict[str, tuple[int, Any, str, Any]] = {
        "values": (0, dist, "all_to_all_single", corrupting),
        "ports": (1, network, "knock", knocking),
        "clock": (1, time, "time", lambda: now() - 30.0),
        "failure": (1, dist, "all_reduce", failing),
    }
    ill, module, name, replacement = faults[fault]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "host_id", lambda: host)
        if rank == ill:
            patch.setattr(module, name, replacement)
        settings = dataclasses.replace(SMALL, timeout=3.0, thresholds=Thresholds(slow=1e-6))
        verdict = doctor.examine(settings)
    return verdict.ok, [text for text in verdict.findings if text.startswith("error")]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("values", "values: all-to-all in bfloat16 is wrong on rank 0, host {host} (rank 0) in what comes from rank 1"),
        ("ports", "ports: host {host} (rank 1) reaches host {host} (rank 0) at some ports and not at others"),
        ("clock", "clock: the clock of host {host} (rank 1) is 30 s behind that of host {host} (rank 0)"),
        ("failure", "values: rank 1 on host {host} (rank 1) failed: the card is on fire"),
    ],
)
def test_a_fault_on_one_rank_is_the_verdict_of_both(fault: str, expected: str) -> None:
    first, second = run_ranks(_visit_with, 2, fault, fresh=fault == "failure", group_timeout=3.0)
    assert first == second
    ok, findings = first
    assert not ok
    assert findings[0].startswith(f"error: {expected.format(host=socket.gethostname())}")
    assert len(findings) == 1


# -- one rank, options, the report for issues


def invoke(*arguments: str, **env: str) -> Any:
    alone = {name: None for name in os.environ if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "OMPI_"))}
    return CliRunner().invoke(app, list(arguments), env=alone | env)


def test_one_rank_alone_is_examined_without_a_network(tmp_path: Any) -> None:
    done = invoke("doctor", "--min-shm", "1KiB", "--report", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    assert "Healthy: 1 rank on 1 host" in done.stdout
    assert json.loads((tmp_path / "report.json").read_text())["findings"] == []


def test_what_is_wrong_is_exit_code_1_and_the_report_is_written_all_the_same() -> None:
    done = invoke("doctor", "--min-shm", "1000TiB", "--json")
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert [finding["check"] for finding in report["findings"]] == ["shared memory"]
    assert "error: shared memory: /dev/shm of host" in done.stderr


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--slow", "0"), ("--slow", "1.5"), ("--max-skew", "-1"), ("--min-shm", "much"), ("--pair-mb", "0"),
        ("--timeout", "0"), ("--arrival-timeout", "nan"), ("--params", "many"), ("--backend", "mpi"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_right_is_named(option: str, value: str) -> None:
    done = invoke("doctor", option, value)
    assert done.exit_code == 2
    assert option.removeprefix("--") in done.stderr


def test_the_step_that_is_forecast_is_one_that_shard_can_make() -> None:
    for options, named in ((("--precision", "fp8"), "--precision"), (("--stage", "9"), "--stage")):
        done = invoke("doctor", "--params", "1e6", *options)
        assert done.exit_code == 2
        assert named in done.stderr


def test_env_describes_this_machine_without_secrets() -> None:
    env = {
        "NCCL_DEBUG": "INFO",
        "SHARDMP_TOKEN": "hush1",
        "PYTHONPATH": "https://me:hush2@index/simple",
        "HOME_KEY": "hush3",
    }
    done = invoke("env", **env)
    assert done.exit_code == 0
    assert f"torch: {torch.__version__}" in done.stdout
    assert "NCCL_DEBUG=INFO" in done.stdout
    assert "SHARDMP_TOKEN=(set, not shown)" in done.stdout
    assert "hush" not in done.stdout
    found = json.loads(invoke("env", "--json", **env).stdout)
    assert found["limits"].keys() == {"open files", "processes", "locked memory"}
    assert found["versions"]["shardmp source"] == host_facts.source_checksum()


def test_env_works_where_the_variables_contradict_each_other() -> None:
    """That is when a user writes an issue."""
    done = invoke("env", RANK="1")
    assert done.exit_code == 0
    assert "launcher: none that makes sense: the environment sets RANK but not WORLD_SIZE" in done.stdout


def test_a_system_without_proc_leaves_facts_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS has no /proc and no /dev/shm."""
    monkeypatch.setattr(host_facts, "_read", lambda path: "")
    monkeypatch.setattr(host_facts, "shared_memory", lambda: None)
    text = "\n".join(environment_report.lines(environment_report.report()))
    assert "/dev/shm: not there" in text
    assert "ports" not in text
    assert host_facts.memory()["limit"] is None
