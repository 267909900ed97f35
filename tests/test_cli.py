"""The `shardmp` command: what `launch` makes of its options, what it refuses, and the separate rendezvous store."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, parse_args
from typer.testing import CliRunner

from shardmp import cli, launch, network

SHARDMP = [sys.executable, "-m", "shardmp.cli"]
NODE0, NODE1, IPV6 = "10.77.0.10", "10.77.0.11", "fd00:77::11"
ELSEWHERE = "10.77.0.99"
SHARING_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.fixture
def node1(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process on a host of a cluster: one card, and a name that leads to 127.0.1.1 as Debian writes it."""
    cards = {"lo": ["127.0.0.1", "::1"], "eth0": [NODE1, IPV6, "fe80::1"]}
    names = {"node0": [NODE0], "node1": ["127.0.1.1"], "alias1": [NODE1], "far": ["172.31.0.1"]}
    routes = {NODE0: NODE1, ELSEWHERE: NODE1, NODE1: NODE1, IPV6: IPV6, "fd00:77::10": IPV6, "127.0.1.1": "127.0.0.1"}
    numbers = {address: [address] for address in (*routes, "172.31.0.1")}
    monkeypatch.setattr(network, "interfaces", lambda: cards)
    monkeypatch.setattr(network, "source_address", routes.get)
    monkeypatch.setattr(network, "resolve", lambda name: (names | numbers).get(name, []))
    monkeypatch.setattr(network, "RESOLVE_LIMIT", 0.0)


def dry_run(*arguments: str, environ: dict[str, str] | None = None) -> tuple[list[str], dict[str, str], str]:
    """torchrun's arguments, the variables set beside, and what was said about it."""
    unset = dict.fromkeys(("OMP_NUM_THREADS", "PYTHONUNBUFFERED"))
    shown = CliRunner().invoke(cli.app, ["launch", "--dry-run", *arguments], env={**unset, **(environ or {})})
    assert shown.exit_code == 0, shown.output
    words = shlex.split(shown.stdout)
    first = words.index(sys.executable)
    variables = dict(word.split("=", 1) for word in words[:first])
    return words[first:], variables, shown.stderr


def refusal(*arguments: str) -> str:
    shown = CliRunner().invoke(cli.app, ["launch", "--dry-run", *arguments])
    assert shown.exit_code == 2, shown.output
    assert shown.stdout == ""
    return shown.stderr


def as_torchrun_reads(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> tuple[LaunchConfig, list[str]]:
    """The installed torchrun's own reading of a command line, and the command of a rank."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or torchrun sets it, in this process
    assert list(command[:3]) == [sys.executable, "-m", "shardmp.torchrun"]
    config, _, worker = config_from_args(parse_args(command[3:]))
    return config, worker


# -- shardmp launch: the command


def test_one_machine_needs_no_endpoint_and_no_name(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks meet at 127.0.0.1: the host's own name need not resolve (pytorch/pytorch#85604)."""
    command, variables, _ = dry_run("--nproc-per-node", "2", script)
    config, worker = as_torchrun_reads(command, monkeypatch)
    assert "--standalone" in command
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 2, 0)
    assert config.local_addr == "127.0.0.1"
    assert worker == ["-u", script]
    assert variables == {"OMP_NUM_THREADS": "1"}


@pytest.mark.usefixtures("node1")
@pytest.mark.parametrize(
    ("endpoint", "is_host", "address"),
    [
        (f"{NODE0}:29500", "0", NODE1),
        ("node0:29500", "0", NODE1),
        (f"{NODE1}:29500", "1", NODE1),
        ("alias1:29500", "1", NODE1),
        ("node1:29500", "1", NODE1),
        (f"[{IPV6}]:29500", "1", IPV6),
        ("[fd00:77::10]:29500", "0", IPV6),
    ],
)
def test_the_host_of_the_endpoint_is_known_by_its_addresses(
    endpoint: str, is_host: str, address: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by its name, which may be unknown or lead to 127.0.1.1 (pytorch/pytorch#73656, #79388, #69197, #150532)."""
    monkeypatch.setattr(socket, "gethostname", lambda: "a-name-that-nobody-knows")
    command, variables, said = dry_run("--nnodes", "2", "--rdzv-endpoint", endpoint, "--rdzv-id", "job7", script)
    config, _ = as_torchrun_reads(command, monkeypatch)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", endpoint, "job7")
    assert config.rdzv_configs["is_host"] == is_host
    assert config.local_addr == address
    assert f"{'hosts' if is_host == '1' else 'joins'} the rendezvous at {endpoint} and speaks from {address}" in said
    assert SHARING_OFF not in variables


@pytest.mark.usefixtures("node1")
def test_a_name_that_appears_a_moment_later_is_found(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod's name comes into the cluster's DNS after the pod has started."""
    answers = iter([[], [NODE0]])
    monkeypatch.setattr(network, "RESOLVE_LIMIT", 8.0)
    monkeypatch.setattr(network, "resolve", lambda name: next(answers))
    command, _, _ = dry_run("--nnodes", "2", "--rdzv-endpoint", "pod-0.train:29500", script)
    assert as_torchrun_reads(command, monkeypatch)[0].local_addr == NODE1


@pytest.mark.usefixtures("node1")
def test_the_address_that_the_user_names_wins(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeedai/DeepSpeed#5136: the first card was taken and the given address ignored."""
    options = ["--nnodes", "2", "--rdzv-endpoint", "node0:29500", "--local-addr", IPV6]
    command, _, _ = dry_run(*options, script)
    assert as_torchrun_reads(command, monkeypatch)[0].local_addr == IPV6


@pytest.mark.usefixtures("node1")
def test_elastic_nodes_can_come_back(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#135712: with the shared store a new agent waits for a key that nobody writes."""
    options = ["--nnodes", "1:4", "--rdzv-endpoint", "node0:29500", "--keep-alive", "6"]
    command, variables, _ = dry_run(*options, script)
    config, _ = as_torchrun_reads(command, monkeypatch)
    assert variables[SHARING_OFF] == "1"
    assert (config.min_nodes, config.max_nodes, config.max_restarts) == (1, 4, 3)
    assert config.rdzv_configs["keep_alive_interval"] == "2"
    assert config.rdzv_configs["keep_alive_max_attempt"] == "3"


@pytest.mark.usefixtures("node1")
@pytest.mark.parametrize("option", [["--max-restarts", "1"], ["--separate-store"]])
def test_a_restarted_node_of_a_fixed_number_can_come_back(option: list[str], script: str) -> None:
    """kubeflow/trainer#1638: a restarted pod could not join."""
    _, variables, _ = dry_run("--nnodes", "2", "--rdzv-endpoint", "node0:29500", *option, script)
    assert variables[SHARING_OFF] == "1"


@pytest.mark.usefixtures("node1")
def test_no_node_hosts_a_separate_store(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#67742: otherwise the job ends with node 0. The store may also run beside a node."""
    for endpoint in (f"{NODE1}:29500", f"{NODE0}:29500"):
        command, _, said = dry_run("--nnodes", "2", "--rdzv-endpoint", endpoint, "--separate-store", script)
        assert as_torchrun_reads(command, monkeypatch)[0].rdzv_configs["is_host"] == "0"
        assert f"expects `shardmp rendezvous` at {endpoint}" in said
        assert "give --rdzv-id" in said  # the name of a job that is over is closed in the store, or hangs


@pytest.mark.usefixtures("node1")
def test_a_node_rank_fixes_the_order_of_nodes(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, _, said = dry_run("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node0:29500", script)
    config, _ = as_torchrun_reads(command, monkeypatch)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("static", "node0:29500", 1)
    assert "joins the rendezvous" in said


def test_each_rank_has_a_log_where_one_is_wanted(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, variables, _ = dry_run("--log-dir", str(tmp_path / "my logs"), script)
    config, _ = as_torchrun_reads(command, monkeypatch)
    assert config.logs_specs is not None
    assert config.logs_specs.root_log_dir.startswith(str(tmp_path / "my logs"))
    assert variables["PYTHONUNBUFFERED"] == "1"  # or lines of the two streams come in the wrong order


def test_the_time_between_sigterm_and_sigkill_is_passed_on(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch/pytorch#119856, #68258: SIGKILL after 30 s cut a checkpoint short."""
    command, _, _ = dry_run("--shutdown-timeout", "120", script)
    assert as_torchrun_reads(command, monkeypatch)[0].shutdown_timeout == 120


def test_an_option_that_this_torchrun_lacks_is_refused() -> None:
    """torch 2.11 and 2.12 have no --shutdown-timeout."""
    with pytest.raises(
        ValueError, match=r"--no-such-option: the torchrun of torch 2\.\d+.* does not have it; leave it out"
    ):
        launch._check_torchrun_has("--no-such-option")


def test_what_follows_the_script_belongs_to_it(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ["--nnodes", "7", "--dry-run", "a b", "$HOME", "-m"]
    command, _, _ = dry_run(script, *own)
    config, worker = as_torchrun_reads(command, monkeypatch)
    assert worker == ["-u", script, *own]
    assert config.max_nodes == 1


@pytest.mark.parametrize(("ranks", "given"), [("1", None), ("auto", None), ("gpu", None), ("4", "3")])
def test_threads_are_limited_only_as_torchrun_would(ranks: str, given: str | None, script: str) -> None:
    """One rank keeps all cores; with auto torchrun counts, and decides, itself; what the user has set stays."""
    environ = {"OMP_NUM_THREADS": given} if given else {}
    _, variables, said = dry_run("--nproc-per-node", ranks, script, environ=environ)
    assert "OMP_NUM_THREADS" not in variables
    assert "OMP_NUM_THREADS" not in said


@pytest.mark.usefixtures("node1")
def test_kubeflows_variables_stand_for_options(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them four pods would train alone, each as the only rank."""
    pod = {"PET_NNODES": "4", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "2"}
    command, _, _ = dry_run(script, environ={**pod, "PET_MASTER_ADDR": "node0", "PET_MASTER_PORT": "29400"})
    config, _ = as_torchrun_reads(command, monkeypatch)
    assert (config.max_nodes, config.nproc_per_node, config.rdzv_configs["rank"]) == (4, 8, 2)
    assert config.rdzv_endpoint == "node0:29400"


# -- shardmp launch: what it refuses


@pytest.mark.usefixtures("node1")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nnodes", "2"], ["--nnodes 2 needs --rdzv-endpoint"]),
        (["--nnodes", "1:2"], ["--nnodes 1:2 needs --rdzv-endpoint"]),
        (["--nnodes", "0"], ["--nnodes 0", "1 <= MIN <= MAX"]),
        (["--nnodes", "3:2"], ["--nnodes 3:2", "1 <= MIN <= MAX"]),
        (["--nnodes", "two"], ["--nnodes two"]),
        (["--nproc-per-node", "0"], ["--nproc-per-node 0", "auto, gpu or cpu"]),
        (["--nproc-per-node", "all"], ["--nproc-per-node all"]),
        (["--max-restarts", "-1"], ["--max-restarts -1"]),
        (["--shutdown-timeout", "-1"], ["--shutdown-timeout -1"]),
        (["--keep-alive", "2"], ["--keep-alive 2", "3 seconds"]),
        (["--rdzv-id", " "], ["--rdzv-id"]),
        (["--separate-store"], ["--separate-store needs --rdzv-endpoint"]),
        (["--local-addr", NODE1], ["--local-addr needs --rdzv-endpoint"]),
        (["--node-rank", "1"], ["--node-rank 1", "0..0"]),
        (["--rdzv-endpoint", "node0"], ["--rdzv-endpoint node0", "HOST:PORT"]),
        (["--rdzv-endpoint", "node0:0"], ["--rdzv-endpoint node0:0", "1..65535"]),
        (["--rdzv-endpoint", f"{IPV6}:29500"], ["HOST:PORT", "[fd00::1]:29500"]),
        (["--no-such-option"], ["--no-such-option"]),
    ],
)
def test_wrong_and_half_options_are_refused(options: list[str], words: list[str], script: str) -> None:
    message = refusal(*options, script)
    for word in words:
        assert word in message


@pytest.mark.usefixtures("node1")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rdzv-endpoint", "localhost:29500"], ["loopback", f"eth0 ({NODE1}"]),
        (["--rdzv-endpoint", "127.0.0.1:29500"], ["loopback", f"eth0 ({NODE1}"]),
        (["--rdzv-endpoint", "[::1]:29500"], ["loopback"]),
        (["--rdzv-endpoint", "nobody:29500"], ["cannot resolve nobody", "/etc/hosts"]),
        (["--rdzv-endpoint", "far:29500"], ["no route to 172.31.0.1", f"eth0 ({NODE1}"]),
        (["--rdzv-endpoint", "node0:1", "--local-addr", ELSEWHERE], [f"--local-addr {ELSEWHERE}", NODE1]),
        (["--rdzv-endpoint", "node0:1", "--local-addr", "eth0"], ["--local-addr eth0", NODE1]),
        (["--rdzv-endpoint", "node0:1", "--node-rank", "2"], ["--node-rank 2", "0..1"]),
        (["--rdzv-endpoint", "node0:1", "--node-rank", "0", "--max-restarts", "1"], ["--node-rank", "--max-restarts"]),
        (["--rdzv-endpoint", "node0:1", "--node-rank", "0", "--separate-store"], ["--node-rank", "--separate-store"]),
        (["--rdzv-endpoint", "node0:1", "--node-rank", "0", "--nnodes", "1:2"], ["--node-rank 0", "1:2"]),
    ],
)
def test_several_nodes_that_could_not_meet_are_refused(options: list[str], words: list[str], script: str) -> None:
    """nebius/nebius-solutions-library#177: `hostname --ip-address` gave a loopback address, and nodes never met."""
    message = refusal("--nnodes", "2", *options, script)
    for word in words:
        assert word in message


@pytest.mark.usefixtures("node1")
def test_a_name_that_leads_to_loopback_needs_an_address_where_there_are_two_cards(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards = {"lo": ["127.0.0.1"], "eth0": [NODE1], "docker0": ["172.30.0.1"]}
    monkeypatch.setattr(network, "interfaces", lambda: cards)
    message = refusal("--nnodes", "2", "--rdzv-endpoint", "node1:29500", script)
    for word in ("127.0.1.1", "--local-addr", f"eth0 ({NODE1})", "docker0 (172.30.0.1)"):
        assert word in message


def test_a_missing_script_is_refused_by_name() -> None:
    message = refusal("trian.py")
    assert f"script trian.py: no such file in {Path.cwd()}" in message


# -- shardmp launch: for real


def test_launch_becomes_torchrun_and_passes_signals_on(tmp_path: Path) -> None:
    """The process id stays, so SIGTERM from docker stop, scancel or kubectl delete reaches the ranks."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os, pathlib, signal, sys, time\n"
        "here = pathlib.Path(sys.argv[1], os.environ['RANK'])\n"
        "def stop(*_):\n"
        "    here.with_suffix('.stopped').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "names = ('WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'OMP_NUM_THREADS')\n"
        "text = json.dumps({'parent': os.getppid(), **{name: os.environ[name] for name in names}})\n"
        "here.with_suffix('.tmp').write_text(text)\n"
        "here.with_suffix('.tmp').rename(here.with_suffix('.json'))\n"
        "time.sleep(100)\n"
    )
    plain = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")}
    command = [*SHARDMP, "launch", "--nproc-per-node", "2", str(script), str(tmp_path)]
    with subprocess.Popen(command, env=plain, stderr=subprocess.PIPE, text=True) as process:
        try:
            ready = [tmp_path / "0.json", tmp_path / "1.json"]
            deadline = time.monotonic() + 60
            while not all(path.exists() for path in ready) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            process.terminate()
            _, said = process.communicate(timeout=40)
        finally:
            process.kill()
    ranks = [json.loads(path.read_text()) for path in ready]
    assert [rank.pop("parent") for rank in ranks] == [process.pid, process.pid], said
    same = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    assert ranks == [{"LOCAL_RANK": "0", **same}, {"LOCAL_RANK": "1", **same}]
    assert all(path.with_suffix(".stopped").exists() for path in ready)
    assert "shardmp launch: OMP_NUM_THREADS is not set: 1 thread per rank, as torchrun does" in said


# -- shardmp rendezvous


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_store_answers_until_a_signal_ends_it(number: signal.Signals) -> None:
    with subprocess.Popen([*SHARDMP, "rendezvous", "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert select.select([process.stdout], [], [], 60)[0], "the store said nothing"
            line = process.stdout.readline()
            found = re.search(
                r"listening on port (\d+) of every address; .*--separate-store --rdzv-endpoint \S+:\1 ", line
            )
            assert found, line
            wait = timedelta(seconds=20)
            for address in ("127.0.0.1", "localhost"):
                client = TCPStore(address, int(found[1]), None, False, wait, wait_for_workers=False)
                client.set(f"key of {address}", "value")
                assert client.get(f"key of {address}") == b"value"
                del client
            process.send_signal(number)
            rest, _ = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert rest == "shardmp rendezvous: ended\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], ["--port 70000", "0..65535"]),
        (["--host", "192.0.2.77", "--port", "0"], ["--host 192.0.2.77", "not an address of this host"]),
        (["--host", "no.such.name.invalid", "--port", "0"], ["--host no.such.name.invalid"]),
    ],
)
def test_a_place_where_the_store_cannot_listen_is_refused(options: list[str], words: list[str]) -> None:
    shown = CliRunner().invoke(cli.app, ["rendezvous", *options])
    assert shown.exit_code == 2
    assert all(word in shown.stderr for word in words), shown.stderr


@pytest.mark.parametrize("host", [[], ["--host", "127.0.0.1"]])
def test_a_port_in_use_is_named_with_the_cure(host: list[str], busy_port: int) -> None:
    """pytorch/pytorch#126510."""
    shown = CliRunner().invoke(cli.app, ["rendezvous", "--port", str(busy_port), *host])
    assert shown.exit_code == 2
    assert f"--port {busy_port}: in use on this host" in shown.stderr
    assert "choose another port here and in every node's --rdzv-endpoint" in shown.stderr


# -- the command itself


def test_version_names_the_library_and_torch() -> None:
    shown = CliRunner().invoke(cli.app, ["--version"])
    assert shown.exit_code == 0
    assert re.fullmatch(r"shardmp \d+\.\d+\.\d+\S*, torch 2\.\d+\.\d+\S*\n", shown.stdout)


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    assert {"launch", "rendezvous"} <= set(shown.stdout.split())
