"""D21, and what reports hide: the environment is read by one order, and shown by one rule."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from typer.testing import CliRunner

from shardmp import cli, hidden, host_facts
from shardmp.launcher import detect, local_rank_of

FLUX = {
    "FLUX_TASK_RANK": "2",
    "FLUX_JOB_SIZE": "4",
    "FLUX_TASK_LOCAL_ID": "2",
    "FLUX_JOB_ID": "f7Xq",
    "FLUX_JOB_NNODES": "1",
}
HOROVOD = {
    "HOROVOD_RANK": "1",
    "HOROVOD_SIZE": "2",
    "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
    "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711",
}
JSRUN = {
    "JSM_NAMESPACE_RANK": "1",
    "JSM_NAMESPACE_SIZE": "3",
    "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "3",
    "LSB_JOBID": "99",
}
PLAIN = {"Flux": FLUX, "Horovod": HOROVOD, "jsrun": JSRUN}
TWO_HOSTS = {
    "FLUX_JOB_NNODES": "2",
    "HOROVOD_LOCAL_SIZE": "1",
    "HOROVOD_LOCAL_RANK": "0",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}


def on_two_hosts(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: TWO_HOSTS.get(name, value) for name, value in environ.items()}


# -- D21: never N runs of one rank each


@pytest.mark.parametrize(
    ("launcher", "ranks"), [("Flux", (2, 4, 2, 4)), ("Horovod", (1, 2, 1, 2)), ("jsrun", (1, 3, 1, 3))]
)
def test_d21_a_launcher_without_mpi_gives_its_ranks(launcher: str, ranks: tuple[int, ...]) -> None:
    """ecmwf/anemoi-inference#407: under Flux each process trained alone."""
    found = detect(PLAIN[launcher])
    assert (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size) == (
        launcher,
        *ranks,
    )
    assert local_rank_of(PLAIN[launcher]) == ranks[2]


@pytest.mark.parametrize("launcher", PLAIN)
def test_d21_all_ranks_of_a_host_take_one_port_from_the_job(launcher: str) -> None:
    """And another job most probably another one: two jobs on a host do not meet."""
    environ = PLAIN[launcher]
    first = {name: "0" if name.endswith(("_RANK", "_LOCAL_ID")) else value for name, value in environ.items()}
    assert detect(environ).master == detect(first).master
    assert detect(environ).master[0] == "127.0.0.1"
    ports = {
        detect({**environ, **dict.fromkeys(ids, str(n))}).master[1] for n in range(9) for ids in [job_names(launcher)]
    }
    assert len(ports) > 7


def job_names(launcher: str) -> tuple[str, ...]:
    return {"Flux": ("FLUX_JOB_ID",), "Horovod": ("HOROVOD_GLOO_RENDEZVOUS_PORT",), "jsrun": ("LSB_JOBID",)}[launcher]


@pytest.mark.parametrize("launcher", PLAIN)
def test_d21_several_hosts_need_to_hear_where_rank_0_is(launcher: str) -> None:
    environ = on_two_hosts(PLAIN[launcher])
    with pytest.raises(
        ValueError, match=f"{launcher} started this process as rank .* set MASTER_ADDR to rank 0's host"
    ):
        detect(environ)
    found = detect({**environ, "MASTER_ADDR": "node0", "MASTER_PORT": "1234"})
    assert (found.launcher, found.master) == (launcher, ("node0", 1234))


@pytest.mark.parametrize("launcher", PLAIN)
def test_d21_a_script_may_take_the_numbers_and_stale_ones_are_refused(launcher: str) -> None:
    own = on_two_hosts(PLAIN[launcher])
    rank, size = next((own[a], own[b]) for a, b in RANK_AND_SIZE if a in own)
    master = {"MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    found = detect({**own, **master, "RANK": rank, "WORLD_SIZE": size})
    assert (found.launcher, str(found.rank), found.master) == ("environment", rank, ("node0", 1234))
    with pytest.raises(ValueError, match=f"{launcher} started this process as rank .*: unset RANK"):
        detect({**own, **master, "RANK": "0", "WORLD_SIZE": "1"})
    torchrun = {**master, "RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}
    assert detect({**own, **torchrun}).launcher == "torchrun"


RANK_AND_SIZE = (
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
)


@pytest.mark.parametrize("names", RANK_AND_SIZE)
@pytest.mark.parametrize("kept", [0, 1])
def test_d21_a_rank_without_its_size_is_named(names: tuple[str, str], kept: int) -> None:
    environ = next(environ for environ in PLAIN.values() if names[0] in environ)
    half = {name: value for name, value in environ.items() if name != names[1 - kept]}
    with pytest.raises(ValueError, match=f"sets {names[kept]} but not {names[1 - kept]}: start with"):
        detect(half)


@pytest.mark.parametrize("name", ["PMIX_RANK", "PALS_RANKID", "ALPS_APP_PE"])
@pytest.mark.parametrize("rank", ["0", "3"])
def test_d21_a_rank_of_unknown_many_is_an_error(name: str, rank: str) -> None:
    """PMIx alone says a rank and never a size."""
    with pytest.raises(ValueError, match=f"{name}={rank}: .* no variable says of how many. Set RANK, WORLD_SIZE"):
        detect({name: rank})


def test_d21_pmix_beside_a_launcher_that_says_more_is_that_launcher() -> None:
    slurm = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[0-1]"}
    assert detect({**slurm, "PMIX_RANK": "1"}).launcher == "Slurm"
    assert detect({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "1"}).launcher == "Open MPI"


def test_d21_flux_offers_pmi_to_programs_that_do_not_know_mpi() -> None:
    """Where Flux does not say where rank 0 is, MPI carries its address, as under any other launcher with PMI."""
    pmi = {"PMI_RANK": "2", "PMI_SIZE": "4"}
    assert detect({**FLUX, **pmi}).launcher == "Flux"
    assert detect({**on_two_hosts(FLUX), **pmi}).launcher == "MPICH"
    assert detect({**on_two_hosts(FLUX), **pmi, "MASTER_ADDR": "node0", "MASTER_PORT": "1"}).launcher == "Flux"


def test_d21_flux_inside_a_slurm_step_is_flux() -> None:
    """`srun flux start`: its tasks may inherit the step's variables, in which each broker is a rank."""
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n0"}
    assert detect({**step, **FLUX}).world_size == 4


def test_d21_one_task_is_one_rank_alone() -> None:
    assert detect({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"}).master is None


# -- secrets

SECRET_NAMES = (
    *(
        "SLURM_JWT",
        "PYTHON_API_KEY",
        "SLURM_MYKEY_KEY",
        "TORCH_PAT",
        "PET_PW",
        "CUDA_TOKEN",
        "NCCL_SECRET",
        "MPI_PASSWORD",
    ),
    *("SHARDMP_DB_PASSWD", "KMP_CREDENTIALS", "OMP_Credential_File", "SLURM_AUTH_HEADER", "PYTHONPASS", "SLURM_COOKIE"),
    *("TORCH_HF_TOKENS", "FLUX_PRIVATE_DATA", "PET_apiKey", "SLURM_PASSPHRASE"),
)
PLAIN_NAMES = (
    *("PYTHONPATH", "NCCL_IB_PKEY", "SLURM_JOB_ID", "SLURM_JOB_PARTITION", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
    *(
        "MASTER_ADDR",
        "KMP_AFFINITY",
        "MALLOC_ARENA_MAX",
        "NCCL_SOCKET_IFNAME",
        "TORCHELASTIC_RUN_ID",
        "GLOO_SOCKET_IFNAME",
    ),
)
# A text, and what of it must not be shown.
SECRET_VALUES = (
    ("https://user:hunter2@host/simple", "hunter2"),
    ("https://user:p@ss/hunter2@host/simple", "hunter2"),
    ("https://hunter2@github.com/x.git", "hunter2"),
    ("user:hunter2@host:8080", "hunter2"),
    ("https://host/path?token=hunter2&x=1", "hunter2"),
    ("https://host/path?x=1&X-Amz-Signature=hunter2", "hunter2"),
    ("tcp://10.0.0.1:5;password=hunter2", "hunter2"),
    ("--password=hunter2 --steps 3", "hunter2"),
    ("--api-key hunter2 --steps 3", "hunter2"),
    ("Authorization: Bearer hunter2", "hunter2"),
    ("a Bearer hunter2", "hunter2"),
    ('{"secret": "my hunter2", "n": 1}', "hunter2"),
    ("http.extraHeader=Authorization: Basic aHVudGVyMg==", "aHVudGVyMg"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln", "c2ln"),
    ("git clone x ghp_0123456789abcdefABCDEF0123456789", "0123456789abcdef"),
    ("hf_0123456789abcdefABCDEF", "0123456789abcdef"),
)
PLAIN_VALUES = (
    *(
        "/usr/lib:/opt/lib",
        "eth0,eth1",
        "10.0.0.1",
        "http://10.0.0.1:80/x?page=2",
        "granularity=fine,compact,1,0",
        "^docker,lo",
    ),
    *(
        "max_split_size_mb:128",
        "the token of 3",
        "n[01-03],m7",
        "2(x3),1",
        "expandable_segments:True,garbage:0.6",
        "[::1]:29500",
    ),
)


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_what_is_called_like_a_secret_is_hidden(name: str) -> None:
    assert host_facts.environment({name: "hunter2"}) == {name: hidden.HIDDEN}


@pytest.mark.parametrize("name", PLAIN_NAMES)
def test_what_an_issue_needs_is_shown(name: str) -> None:
    assert host_facts.environment({name: "eth0"}) == {name: "eth0"}


@pytest.mark.parametrize(("value", "secret"), SECRET_VALUES)
def test_a_secret_inside_a_value_is_hidden(value: str, secret: str) -> None:
    (shown,) = host_facts.environment({"PYTHON_INDEX": value}).values()
    assert secret not in shown
    assert hidden.HIDDEN in shown
    assert hidden.without_secrets(shown) == shown


@pytest.mark.parametrize("value", PLAIN_VALUES)
def test_a_plain_value_is_shown_whole(value: str) -> None:
    assert hidden.without_secrets(value) == value


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_env_shows_no_secret_in_any_form(options: list[str]) -> None:
    environ = {
        **dict.fromkeys(SECRET_NAMES, "hunter2"),
        "PYTHON_INDEX": "https://u:hunter2@host",
        "RANK": "x:hunter2@h",
    }
    shown = CliRunner().invoke(cli.app, ["env", *options], env=environ)
    assert shown.exit_code == 0, shown.output
    assert "hunter2" not in shown.output
    if options:
        assert json.loads(shown.stdout)["environment"]["SLURM_JWT"] == hidden.HIDDEN
