"""What this process knows of its host and of itself, as plain data.

Owns:      which facts matter to a training: versions, processor, GPU, limits, interfaces, variables.
Takes:     nothing but /proc, /sys, the environment, and what torch says of itself.
Gives:     dictionaries of JSON's types, for `shardmp doctor` and `shardmp env`.
Invariant: no process is started, no network is touched, and a file that a system lacks is a fact that is left out.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import resource
import socket
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from . import hidden, network
from .launcher import detect

# Of the processor's flags, those that decide how fast 16-bit products are, or whether torch's kernels run at all.
CPU_FEATURES = (
    *("avx2", "f16c", "fma", "avx512f", "avx512_fp16", "avx512_bf16", "avx_ne_convert", "amx_bf16", "amx_fp16"),
    *("fphp", "asimdhp", "bf16", "sve"),
)
# Variables that a report shows: launchers', and those that change what torch, NCCL and gloo do.
_SHOWN = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCH|PYTORCH_|PET_|OMPI_COMM_|OMPI_MCA_|PRTE_|PMIX?_|MPI_|MV2_|SLURM_|FLUX_|HOROVOD_|JSM_|PALS_|ALPS_|"
    r"KUBERNETES_SERVICE_|NCCL_|GLOO_|TP_|UCX_|FI_|CUDA_|CUBLAS_|CUDNN_|NVIDIA_|HIP_|ROCR_|OMP_|MKL_|OPENBLAS_|KMP_|"
    r"GOMP_|MALLOC_|GLIBC_|LD_PRELOAD|LD_LIBRARY_PATH|PYTHON|VIRTUAL_ENV|CONDA_PREFIX|SHARDMP_).*"
)
# Of these, the ones that should be the same on all ranks: another value changes results, speed or the protocol.
_ALIKE = re.compile(
    r"(NCCL_|TORCH_NCCL_|TORCH_DISTRIBUTED_|GLOO_|UCX_|FI_|CUBLAS_|CUDNN_|NVIDIA_TF32|PYTORCH_|OMP_|MKL_|OPENBLAS_|KMP_|"
    r"GOMP_|CUDA_LAUNCH_|CUDA_DEVICE_MAX_|MALLOC_|LD_PRELOAD|PYTHONHASHSEED|PYTHONOPTIMIZE).*"
)


def facts() -> dict[str, Any]:
    """Everything below: bytes for sizes, None for a limit that is not set."""
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "cpu": cpu(),
        "gpus": gpus(),
        "memory": memory(),
        "limits": limits(),
        "shared_memory": shared_memory(),
        "infiniband": infiniband(),
        "interfaces": [interface(name) for name in network.interfaces()],
        "ports": ports(),
        "environment": environment(os.environ),
    }


# -- software


def versions() -> dict[str, str]:
    """By name; "shardmp source" is a checksum of the package's own files, which an edited copy changes."""
    found = {
        "shardmp": version("shardmp"),
        "shardmp source": source_checksum(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    for name in ("numpy", "mpi4py"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    libc = " ".join(platform.libc_ver()).strip()
    if libc:
        found["libc"] = libc
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    driver = re.search(r"\b\d{3,}\.\d+(?:\.\d+)*", _read("/proc/driver/nvidia/version"))
    if driver:
        found["driver"] = driver[0]
    return found


@cache
def source_checksum() -> str:
    """The first digits of a hash of the package's Python files."""
    total = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        total.update(path.name.encode() + path.read_bytes())
    return total.hexdigest()[:12]


def launcher() -> str:
    """Who started this process, in words; what is wrong with its variables, where they contradict each other."""
    try:
        found = detect(os.environ)
    except ValueError as mistake:
        return f"none that makes sense: {hidden.without_secrets(str(mistake))}"
    if found.launcher == "alone":
        return "none: one rank alone"
    return f"{found.launcher}, rank {found.rank} of {found.world_size}"


# -- hardware


def cpu() -> dict[str, Any]:
    """Model, features, cores of the host, those that this process may use, and torch's threads."""
    text = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "model": model[1] if model else platform.processor() or platform.machine(),
        "features": [name for name in CPU_FEATURES if name in has],
        "cores": os.cpu_count(),
        "usable": usable,
        "threads": torch.get_num_threads(),
    }


def gpus() -> list[dict[str, Any]]:
    """Those that this process sees, in torch's order."""
    if not torch.cuda.is_available():
        return []
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        {"name": gpu.name, "memory": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}", "uuid": str(gpu.uuid)}
        for gpu in found
    ]


def memory() -> dict[str, int | None]:
    """The host's memory, and the control group's limit on this process."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read("/sys/fs/cgroup/memory.max") or _read("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    known = int(limit) if limit.strip().isdigit() else None
    return {"size": total, "limit": known if known is not None and known < total else None}


def limits() -> dict[str, int | None]:
    """What this process may have of each; None where that is not limited. "locked memory" is in bytes."""
    names = {"open files": "RLIMIT_NOFILE", "processes": "RLIMIT_NPROC", "locked memory": "RLIMIT_MEMLOCK"}
    found: dict[str, int | None] = {}
    for name, constant in names.items():
        soft, _ = resource.getrlimit(getattr(resource, constant))
        found[name] = None if soft == resource.RLIM_INFINITY else soft
    return found


def shared_memory(path: str = "/dev/shm") -> dict[str, int] | None:
    """Size of and free bytes in the file system of shared memory; None where there is none."""
    try:
        state = os.statvfs(path)
    except OSError:
        return None
    return {"size": state.f_frsize * state.f_blocks, "free": state.f_frsize * state.f_bavail}


def infiniband() -> list[str]:
    """The host's RDMA devices, where this process can open them."""
    if not Path("/dev/infiniband").is_dir():
        return []
    return sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))


# -- network


def interface(name: str) -> dict[str, Any]:
    """An interface: its addresses, MTU in bytes, and speed in Mbit/s where its driver tells."""
    mtu, speed = (_read(f"/sys/class/net/{name}/{key}").strip() for key in ("mtu", "speed"))
    return {
        "name": name,
        "addresses": network.interfaces().get(name, []),
        "mtu": int(mtu) if mtu.isdigit() else None,
        "speed": int(speed) if speed.isdigit() else None,
    }


def ports() -> list[int] | None:
    """The first and the last port that the kernel gives to who asks for any: gloo's and NCCL's are of these."""
    found = _read("/proc/sys/net/ipv4/ip_local_port_range").split()
    return [int(found[0]), int(found[1])] if len(found) == 2 else None


# -- variables


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that matter, without what looks like a secret."""
    return {name: hidden.shown(name, value) for name, value in sorted(environ.items()) if _SHOWN.fullmatch(name)}


def alike(environment: Mapping[str, str]) -> dict[str, str]:
    """Of `environment`'s result, the variables that should be the same on every rank.

    The interface's name is none of them: hosts with other cards call theirs otherwise.
    """
    return {
        name: value
        for name, value in environment.items()
        if _ALIKE.fullmatch(name) and not name.endswith("_SOCKET_IFNAME")
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
