"""Who started this process: each launcher's variables, their order, and what is wrong with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmp.launcher import detect, expand_counts, expand_hosts, local_rank_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "j1",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
EXPLICIT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "1",
}
SLURM = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}
PODS = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launcher", "ranks", "master"),
    [
        (TORCHRUN, "torchrun", (5, 8, 1, 4), ("node0", 29500)),
        (EXPLICIT, "environment", (1, 2, 0, None), ("10.0.0.1", 29500)),
        (OPEN_MPI, "Open MPI", (3, 4, 1, 2), None),
        (HYDRA, "MPICH", (1, 2, 1, 2), None),
        (MVAPICH, "MPICH", (1, 2, 0, 1), None),
        (SLURM, "Slurm", (2, 3, 0, 1), ("gpu08", 10000 + 61 * 42)),
        (PODS, "Kubeflow", (1, 2, 0, 1), ("job-node-0-0.job", 29400)),
        ({}, "alone", (0, 1, 0, 1), None),
    ],
)
def test_each_launchers_variables_say_rank_size_and_where_rank_0_is(environ, launcher, ranks, master):
    found = detect(environ)
    assert found.launcher == launcher
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == ranks
    assert found.master == master


def test_torchrun_goes_before_the_launcher_that_started_it():
    """`mpirun torchrun` and `srun torchrun`: the launcher's ranks number nodes there."""
    for outer in (OPEN_MPI, HYDRA, MVAPICH, SLURM, PODS):
        assert detect({**outer, **TORCHRUN}).launcher == "torchrun"


def test_the_order_of_launchers():
    """mpirun inside a Slurm step of its daemons is MPI; a pod's variables come last."""
    assert detect({**OPEN_MPI, **SLURM, **PODS}).launcher == "Open MPI"
    assert detect({**HYDRA, **SLURM}).launcher == "MPICH"
    assert detect({**SLURM, **PODS}).launcher == "Slurm"
    assert detect({**EXPLICIT, **PODS}).launcher == "environment"


def test_sruns_own_pmi_is_a_slurm_step():
    """`srun --mpi=pmi2` sets PMI_RANK for programs that know nothing of MPI, and then mpi4py is not needed."""
    assert detect({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "3"}).launcher == "Slurm"


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_variables_set_by_halves_are_named(missing):
    with pytest.raises(ValueError, match=f"but not {missing}: start with torchrun"):
        detect(without(EXPLICIT, missing))


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**EXPLICIT, "RANK": "x"}, "RANK: expected an integer, got 'x'"),
        ({**EXPLICIT, "RANK": "-1"}, "RANK: expected 0 or more, got -1"),
        ({**EXPLICIT, "RANK": "2"}, "RANK=2 and WORLD_SIZE=2: a rank is below the size"),
        ({**EXPLICIT, "MASTER_PORT": "0"}, "MASTER_PORT: expected a port from 1 to 65535, got 0"),
        ({**EXPLICIT, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
        ({**EXPLICIT, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "at most the whole size"),
        ({"LOCAL_RANK": "1"}, "sets LOCAL_RANK=1 but not RANK and WORLD_SIZE"),
        (
            without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_RANK but not OMPI_COMM_WORLD_SIZE: start with mpirun",
        ),
        (without(HYDRA, "PMI_RANK"), "PMI_SIZE but not PMI_RANK"),
        (without(SLURM, "SLURM_PROCID"), "SLURM_STEP_ID but not SLURM_PROCID: start with srun"),
        (without(SLURM, "SLURM_STEP_NODELIST"), "neither SLURM_STEP_NODELIST nor MASTER_ADDR"),
        (without(PODS, "PET_MASTER_ADDR"), "PET_NNODES=2 but not PET_MASTER_ADDR"),
        ({**PODS, "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8: start with torchrun"),
        ({**PODS, "PET_NNODES": "1:2"}, "PET_NNODES=1:2 .* start with torchrun"),
    ],
)
def test_bad_variables_are_named_with_the_cure(environ, says):
    with pytest.raises(ValueError, match=says):
        detect(environ)


@pytest.mark.parametrize("scheduled", [OPEN_MPI, HYDRA, SLURM])
def test_a_stale_rank_beside_a_launchers_own_is_refused(scheduled):
    """RANK=0 left in a shell's start-up file would make N worlds of one rank (open-mpi/ompi#11861)."""
    stale = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    with pytest.raises(
        ValueError, match=r"RANK=0 and WORLD_SIZE=1, but .* started this process as rank .*: unset RANK"
    ):
        detect({**scheduled, **stale})


def test_ranks_that_a_script_takes_from_the_launcher_are_accepted():
    """`export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR=...`: the launcher still knows the local rank."""
    same = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1234"}
    found = detect({**OPEN_MPI, **same})
    assert (found.launcher, found.rank, found.local_rank, found.master) == ("environment", 3, 1, ("a", 1234))
    assert detect({**SLURM, "WORLD_SIZE": "3", "MASTER_PORT": "1234"}).master == ("gpu08", 1234)


def test_processes_that_a_task_starts_itself_are_accepted():
    """One task per node, which spawns two ranks with RANK = 2 * node + local."""
    nested = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "gpu08", "MASTER_PORT": "1234", "LOCAL_RANK": "1"}
    assert detect({**SLURM, **nested}).rank == 5
    single = {**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}
    assert detect({**single, **nested}).rank == 5


def test_a_batch_script_that_forgot_srun_is_told_so():
    """SLURM_PROCID is 0 and SLURM_NTASKS is N in the batch script itself (huggingface/accelerate#2816)."""
    batch = {"SLURM_JOB_ID": "42", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    with pytest.raises(ValueError, match=r"Slurm job 42 has 2 tasks .* start with srun"):
        detect(batch)
    with pytest.raises(ValueError, match="start with srun"):
        detect({**without(batch, "SLURM_NTASKS"), "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NUM_NODES": "2"})
    assert detect({**batch, "SLURM_NTASKS": "1"}).launcher == "alone"
    with pytest.raises(ValueError, match="start with srun"):  # the interactive step of salloc is no step of srun's
        detect({**batch, "SLURM_STEP_ID": "4294967290"})


def test_a_step_of_one_task_is_one_rank_alone():
    """`srun --pty bash`, then python: one rank, which needs no address."""
    found = detect({**without(SLURM, "SLURM_STEP_NODELIST"), "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})
    assert (found.world_size, found.master) == (1, None)


@pytest.mark.parametrize(
    ("environ", "elsewhere"),
    [
        (TORCHRUN, True),
        ({**TORCHRUN, "RANK": "1"}, False),
        (EXPLICIT, False),  # may be on rank 0's host
        ({**EXPLICIT, "LOCAL_RANK": "0"}, True),
        (SLURM, True),
        (PODS, True),
        ({**PODS, "PET_NODE_RANK": "0"}, False),
    ],
)
def test_whether_rank_0_is_known_to_be_on_another_host(environ, elsewhere):
    assert detect(environ).rank0_elsewhere is elsewhere


def test_a_missing_rank_is_placed_as_far_as_the_launcher_tells():
    assert detect(TORCHRUN).whereabouts(6) == " (node 1)"
    assert [detect(SLURM).whereabouts(rank) for rank in range(3)] == [" (host gpu08)", " (host gpu08)", " (host gpu09)"]
    assert detect(EXPLICIT).whereabouts(0) == ""


def test_local_ranks_are_found_beside_a_process_group_of_the_users():
    assert [local_rank_of(environ) for environ in (TORCHRUN, OPEN_MPI, HYDRA, SLURM, {})] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("gpu[08-10,12],cpu1", ["gpu08", "gpu09", "gpu10", "gpu12", "cpu1"]),
        ("r[1-2]n[1,3]x", ["r1n1x", "r1n3x", "r2n1x", "r2n3x"]),
        ("a-b[099-101]", ["a-b099", "a-b100", "a-b101"]),
        ("", []),
    ],
)
def test_slurms_list_of_hosts_is_expanded(text, names):
    assert expand_hosts(text) == names


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=5))
def test_slurms_tasks_per_node_are_expanded(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert expand_counts(text) == [count for count, times in runs for _ in range(times)]
