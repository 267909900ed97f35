"""Who started this process, and as which of how many: what the environment says.

Owns:      the reading of launchers' variables, their order, and what is wrong with them.
Takes:     a mapping of environment variables.
Gives:     a frozen `Launched`.
Invariant: pure: no network, no torch, no process; the same mapping gives the same answer.

[Note: the order] torchrun, then RANK and WORLD_SIZE set by hand or by Kubeflow's PyTorchJob, then Open MPI, MPICH (and
what descends from it), Flux, Horovod, jsrun, a Slurm step, Kubeflow's TrainJob, and one rank alone. torchrun comes first
because it is often itself started by mpirun or srun, whose variables then count nodes; Flux, Horovod and jsrun come before
Slurm because they may run inside a Slurm step and inherit its variables. A Slurm job is a launcher only inside a step: in
the batch script itself SLURM_PROCID is 0 and SLURM_NTASKS is N, and N is a wish. Launchers that say a rank but no size
(PMIx, PALS, ALPS) are an error where nobody else says more: each of their processes would train alone.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Name, then the variables for rank, size, local rank, local size.
_MPI = (
    ("Open MPI", *(f"OMPI_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
    ("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("MPICH", *(f"MV2_COMM_WORLD_{end}" for end in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))),
)


class _Plain(NamedTuple):
    """A launcher that starts ranks without MPI, and its variables; `job`: what tells this job from others, on each rank."""

    launcher: str
    command: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]

    @property
    def names(self) -> tuple[str, str, str, str]:
        return self.rank, self.size, self.local_rank, self.local_size


_PLAIN = (
    _Plain("Flux", "flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "", ("FLUX_JOB_ID",)),
    _Plain(
        "Horovod",
        "horovodrun",
        *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    ),
    _Plain(
        "jsrun",
        "jsrun",
        *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        ("LSB_JOBID", "JSM_NAMESPACE_ID"),
    ),
)
# Launchers whose variables say a rank, and never of how many.
_SIZELESS = (("PMIx", "PMIX_RANK"), ("PALS", "PALS_RANKID"), ("ALPS", "ALPS_APP_PE"))
_FIRST_SPECIAL_STEP = 4294967290  # Slurm's numbers for "interactive", "batch" and "extern": no step of srun's


@dataclass(frozen=True)
class Launched:
    """One process of a job. `master` is None where no variable says where rank 0 is, and for one rank alone."""

    launcher: (
        str  # "torchrun", "Open MPI", "MPICH", "Flux", "Horovod", "jsrun", "Slurm", "Kubeflow", "environment", "alone"
    )
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None  # None: not said
    master: tuple[str, int] | None
    job: str = ""  # tells this job from another one that uses the same port; empty: not said
    rank0_elsewhere: bool = False  # the variables prove that rank 0 is on another host
    hosts: tuple[str, ...] = ()  # by rank, where the launcher says; else empty

    def whereabouts(self, rank: int) -> str:
        """Where `rank` should be, as far as the launcher tells: " (node 1)", " (host gpu07)" or nothing."""
        if rank < len(self.hosts):
            return f" (host {self.hosts[rank]})"
        if self.launcher == "torchrun" and self.local_world_size:
            return f" (node {rank // self.local_world_size})"
        return ""


def detect(environ: Mapping[str, str]) -> Launched:
    """Read the environment in the order of [Note: the order].

    Raises:
        ValueError: variables that are set by halves, are not numbers, or contradict each other; a batch script that
            forgot srun; a launcher that says a rank and no size, or not where rank 0 is. The message names them and the
            cure.
    """
    found = {name for name in _TORCH if environ.get(name)}
    if found & {"RANK", "WORLD_SIZE"} and environ.get("TORCHELASTIC_RUN_ID"):
        return _explicit(environ, found)
    scheduled = _mpi(environ) or _plain(environ, lacks_master=len(found) < len(_TORCH)) or _slurm(environ)
    if found & {"RANK", "WORLD_SIZE"}:
        alone = scheduled is not None and scheduled.world_size == 1 and found >= {"RANK", "WORLD_SIZE"}
        if scheduled is None or alone:
            return _explicit(environ, found)
        _check_agreement(environ, scheduled, whole=len(found) == len(_TORCH))
        return _merged(_explicit(environ, found), scheduled) if len(found) == len(_TORCH) else scheduled
    if scheduled is not None:
        return scheduled
    pod = _kubeflow(environ)
    if pod is not None:
        return pod
    if _number(environ, "LOCAL_RANK", 0) > 0:
        raise ValueError(
            f"the environment sets LOCAL_RANK={environ['LOCAL_RANK']} but not RANK and WORLD_SIZE: start with torchrun, "
            "which sets all of them, or unset LOCAL_RANK to run on one rank"
        )
    _check_sizeless(environ)
    _check_batch_script(environ)
    return Launched("alone", 0, 1, 0, 1, None)


def local_rank_of(environ: Mapping[str, str]) -> int:
    """This process's number on its host, from whichever launcher says it; 0 where none does.

    Raises:
        ValueError: it is not a number.
    """
    names = ("LOCAL_RANK", *(names[3] for names in _MPI), *(said.local_rank for said in _PLAIN), "SLURM_LOCALID")
    return next((_number(environ, name) for name in names if environ.get(name)), 0)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ValueError(f"environment variable {name}: expected an integer, got {text!r}") from None
    if value < 0:
        raise ValueError(f"environment variable {name}: expected 0 or more, got {value}")
    return value


def _port(environ: Mapping[str, str], name: str) -> int:
    port = _number(environ, name)
    if not 0 < port < 2**16:
        raise ValueError(f"environment variable {name}: expected a port from 1 to 65535, got {port}")
    return port


def _ranks(environ: Mapping[str, str], *names: str) -> tuple[int, int, int, int | None]:
    """Rank, size, local rank and local size from the variables of these names; the local ones may be absent."""
    rank, size = _number(environ, names[0]), _number(environ, names[1])
    if not rank < size:
        raise ValueError(f"environment variables {names[0]}={rank} and {names[1]}={size}: a rank is below the size")
    local_rank = _number(environ, names[2], 0)
    local_size = _number(environ, names[3]) if environ.get(names[3]) else None
    if local_size is not None and not local_rank < local_size <= size:
        raise ValueError(
            f"environment variables {names[2]}={local_rank}, {names[3]}={local_size} and {names[1]}={size}: a local rank "
            "is below the local size, which is at most the whole size"
        )
    return rank, size, local_rank, local_size


def _explicit(environ: Mapping[str, str], found: set[str]) -> Launched:
    missing = [name for name in _TORCH if name not in found]
    if missing:
        given = [name for name in _TORCH if name in found]
        raise ValueError(
            f"the environment sets {', '.join(given)} but not {', '.join(missing)}: start with torchrun, which sets "
            "all of them, or unset them to run on one rank"
        )
    rank, size, local_rank, local_size = _ranks(environ, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    master = environ["MASTER_ADDR"].strip(), _port(environ, "MASTER_PORT")
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    # The lowest rank of a host has local rank 0, so one that says "local rank 0" and isn't rank 0 is on another host.
    elsewhere = rank > 0 and bool(environ.get("LOCAL_RANK")) and local_rank == 0
    if local_size is not None:
        elsewhere = elsewhere or rank - local_rank > 0
    return Launched("torchrun" if run else "environment", rank, size, local_rank, local_size, master, run, elsewhere)


def _merged(explicit: Launched, scheduled: Launched) -> Launched:
    """RANK and WORLD_SIZE from a script, the rest from the launcher that says more."""
    if explicit.local_world_size is not None or explicit.world_size != scheduled.world_size:
        return explicit
    return replace(scheduled, launcher="environment", master=explicit.master)


def _check_agreement(environ: Mapping[str, str], scheduled: Launched, whole: bool) -> None:
    """RANK and WORLD_SIZE beside a launcher's own: the same numbers, or those of processes that each task started.

    Args:
        whole: all of torch's variables are set, so that the task may have started several processes itself.
    """
    task, tasks = scheduled.rank, scheduled.world_size
    size = _number(environ, "WORLD_SIZE", tasks)
    per_task = size // tasks
    rank = _number(environ, "RANK", task * per_task)
    if size != per_task * tasks or (per_task > 1 and not whole) or rank // max(per_task, 1) != task:
        given = [f"{name}={environ[name]}" for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
        raise ValueError(
            f"the environment sets {' and '.join(given)}, but {scheduled.launcher} started this process as rank {task} of "
            f"{tasks}: unset RANK and WORLD_SIZE (left over from another run, or exported in a shell's start-up file?), or "
            "start with torchrun"
        )


def _mpi(environ: Mapping[str, str]) -> Launched | None:
    for launcher, *names in _MPI:
        given = [name for name in names[:2] if environ.get(name)]
        if not given:
            continue
        if names[0] == "PMI_RANK" and not environ.get(names[2]) and _offers_pmi(environ):
            continue
        _check_pair(given, names, "mpirun")
        rank, size, local_rank, local_size = _ranks(environ, *names)
        return Launched(launcher, rank, size, local_rank, local_size, _given_master(environ))
    return None


def _offers_pmi(environ: Mapping[str, str]) -> bool:
    """Whether the PMI is one that srun or Flux offers to all programs, also to those that do not know MPI.

    Under Flux it is left to MPI where Flux itself does not say where rank 0 is.
    """
    in_flux = environ.get("FLUX_TASK_RANK") and (environ.get("MASTER_ADDR") or environ.get("FLUX_JOB_NNODES") == "1")
    return bool(environ.get("SLURM_STEP_ID") or in_flux)


def _check_pair(given: Sequence[str], names: Sequence[str], command: str) -> None:
    """A rank without its size, or the other way round."""
    if len(given) == 1:
        missing = names[1 - names.index(given[0])]
        raise ValueError(
            f"the environment sets {given[0]} but not {missing}: start with {command}, or unset {given[0]}"
        )


def _plain(environ: Mapping[str, str], lacks_master: bool) -> Launched | None:
    """A launcher of `_PLAIN`.

    Args:
        lacks_master: no script has set all of torch's variables: where rank 0 is must be known here.
    """
    for said in _PLAIN:
        given = [name for name in said.names[:2] if environ.get(name)]
        if not given:
            continue
        _check_pair(given, said.names, said.command)
        rank, size, local_rank, local_size = _ranks(environ, *said.names)
        if size == 1:
            return Launched(said.launcher, 0, 1, local_rank, 1, None)
        if said.launcher == "Flux" and environ.get("FLUX_JOB_NNODES") == "1":
            local_size = size
        job = " ".join(environ[name] for name in said.job if environ.get(name))
        host, port = _given_master(environ) or ("127.0.0.1" if local_size == size else "", 0)
        if environ.get("MASTER_PORT"):
            port = _port(environ, "MASTER_PORT")
        elif job:
            port = 10000 + zlib.crc32(job.encode()) % 50000
        if lacks_master and not (host and port):
            hint = (
                " (in a batch script: export MASTER_ADDR=$(flux hostlist --nth=0))" if said.launcher == "Flux" else ""
            )
            raise ValueError(
                f"{said.launcher} started this process as rank {rank} of {size}, and the environment does not say where "
                "rank 0 is: set MASTER_ADDR to rank 0's host and MASTER_PORT to a port that is free there, the same for all "
                f"ranks{hint}"
            )
        elsewhere = rank > 0 and bool(environ.get(said.local_rank)) and local_rank == 0
        about = f"{said.launcher} job {job}" if job else ""
        return Launched(said.launcher, rank, size, local_rank, local_size, (host, port), about, elsewhere)
    return None


def _check_sizeless(environ: Mapping[str, str]) -> None:
    for launcher, name in _SIZELESS:
        if environ.get(name):
            raise ValueError(
                f"the environment sets {name}={environ[name]}: {launcher} started this process as one of several, and no "
                "variable says of how many. Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process, or start "
                f"with torchrun, mpirun or srun (unset {name} to run on one rank)"
            )


def _given_master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT if both are set; a port of 0 stands for "not said"."""
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"].strip(), _port(environ, "MASTER_PORT") if environ.get("MASTER_PORT") else 0
    return None


def _slurm(environ: Mapping[str, str]) -> Launched | None:
    if not environ.get("SLURM_STEP_ID") or _number(environ, "SLURM_STEP_ID") >= _FIRST_SPECIAL_STEP:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    missing = [name for name in ("SLURM_PROCID", tasks) if not environ.get(name)]
    if missing:
        raise ValueError(f"the environment sets SLURM_STEP_ID but not {', '.join(missing)}: start with srun")
    rank, size, local_rank, _ = _ranks(environ, "SLURM_PROCID", tasks, "SLURM_LOCALID", "")
    names = expand_hosts(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    if size == 1:
        return Launched("Slurm", 0, 1, local_rank, 1, None)
    if not names and not environ.get("MASTER_ADDR"):
        raise ValueError(
            "the environment sets neither SLURM_STEP_NODELIST nor MASTER_ADDR: set MASTER_ADDR to rank 0's host"
        )
    job, step = _number(environ, "SLURM_JOB_ID", 0), _number(environ, "SLURM_STEP_ID")
    host, port = _given_master(environ) or (names[0], 0)
    if environ.get("MASTER_PORT"):
        port = _port(environ, "MASTER_PORT")
    counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    node = _number(environ, "SLURM_NODEID", 0)
    fits = sum(counts) == size and len(counts) == len(names)
    return Launched(
        "Slurm",
        rank,
        size,
        local_rank,
        counts[node] if fits and node < len(counts) else None,
        (host, port or 10000 + (61 * job + step) % 50000),
        f"Slurm job {job} step {step}",
        rank > 0 and local_rank == 0,
        tuple(itertools.chain(*([name] * count for name, count in zip(names, counts, strict=True)))) if fits else (),
    )


def _check_batch_script(environ: Mapping[str, str]) -> None:
    tasks = _number(environ, "SLURM_NTASKS", 0)
    if environ.get("SLURM_NTASKS_PER_NODE", "").isdigit():
        tasks = max(tasks, int(environ["SLURM_NTASKS_PER_NODE"]) * _number(environ, "SLURM_JOB_NUM_NODES", 1))
    if environ.get("SLURM_JOB_ID") and tasks > 1:
        raise ValueError(
            f"Slurm job {environ['SLURM_JOB_ID']} has {tasks} tasks (SLURM_NTASKS), but this process is not in a step "
            "(no SLURM_STEP_ID): start with srun (`srun python train.py`), or with `srun --ntasks=1` for one rank alone"
        )


def _kubeflow(environ: Mapping[str, str]) -> Launched | None:
    if not environ.get("PET_NNODES"):
        return None
    per_node = environ.get("PET_NPROC_PER_NODE", "1")
    if not environ["PET_NNODES"].isdigit() or (per_node.isdigit() and int(per_node) > 1):
        raise ValueError(
            f"the environment sets PET_NNODES={environ['PET_NNODES']} and PET_NPROC_PER_NODE={per_node}: start with "
            "torchrun, which reads them; plain python is one process per node, of a fixed number of nodes"
        )
    if int(environ["PET_NNODES"]) == 1:
        return Launched("Kubeflow", 0, 1, 0, 1, None)
    missing = [name for name in ("PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ValueError(
            f"the environment sets PET_NNODES={environ['PET_NNODES']} but not {', '.join(missing)}: start with torchrun, "
            "or set them"
        )
    rank, size, *_ = _ranks(environ, "PET_NODE_RANK", "PET_NNODES", "", "")
    return Launched(
        "Kubeflow",
        rank,
        size,
        0,
        1,
        (environ["PET_MASTER_ADDR"].strip(), _port(environ, "PET_MASTER_PORT")),
        "",
        rank > 0,
    )


def expand_hosts(text: str) -> list[str]:
    """Slurm's list of hosts, "gpu[01-03,7],cpu1", as names."""
    names = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part)  # text and the inside of brackets in turn
        choices = [_expand_range(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
        names += ["".join(choice) for choice in itertools.product(*choices)]
    return names


def _expand_range(text: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


def expand_counts(text: str) -> list[int]:
    """Slurm's tasks per node, "2(x3),1", as one number per node."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
