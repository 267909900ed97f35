#!/usr/bin/env bash
# Starts a training script under mpirun of Open MPI or MPICH; `pip install 'shardmp[mpi]'` brings Open MPI and mpi4py.
# It runs once, on one host: mpirun starts all ranks. What stands behind it goes to the script.
#
#   NP=2 launch/mpirun.sh --steps 100                                one machine
#   NP=16 HOSTS=node0:8,node1:8 launch/mpirun.sh --steps 100         two machines; needs ssh or an agent (docs/launching.md)
#
# Variables, all optional:
#   SCRIPT             the training script                            examples/train_gpt.py
#   NP                 ranks in all                                   2
#   HOSTS              HOST:RANKS,HOST:RANKS,...                      this host
#   OVERSUBSCRIBE      1: more ranks than cores (Open MPI refuses otherwise: "not enough slots")
#   ALLOW_RUN_AS_ROOT  1: let root start it, as in a container (Open MPI refuses otherwise)
#   EXPORT             more variables for the ranks on other hosts, separated by spaces
#   MPIRUN             the command                                    mpirun beside PYTHON, else the one in PATH
#   PYTHON             the interpreter that has shardmp and mpi4py    .venv/bin/python of this folder, else python3
#
# The ranks find each other through mpi4py: no address, no port, no `python -m mpi4py`: after shardmp.init a rank that
# raises ends all of them. mpi4py and mpirun must be of one family; if they are not, init says so on every rank.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
if [[ -z "${PYTHON:-}" && ! -x "$python" ]]; then
    python=python3
fi
mpirun="${MPIRUN:-$(dirname "$(command -v "$python" || echo .)")/mpirun}"
if [[ -z "${MPIRUN:-}" && ! -x "$mpirun" ]]; then
    mpirun=mpirun
fi
if ! version="$("$mpirun" --version 2>&1)"; then
    echo "launch/mpirun.sh: error: '$mpirun --version' failed: install an MPI (pip install 'shardmp[mpi]') or set MPIRUN" >&2
    exit 2
fi

# Ranks share the cores: without a limit each would start a thread per core.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONUNBUFFERED=1

options=(-np "${NP:-2}")
case "$version" in
*"Open MPI"* | *OpenRTE* | *PRRTE*)
    # Open MPI binds each rank to one core by default, and with it the data loader and NCCL's threads.
    options+=(--bind-to none)
    # Ranks on other hosts get none of this shell's variables but those named here.
    for name in PATH LD_LIBRARY_PATH PYTHONPATH OMP_NUM_THREADS PYTHONUNBUFFERED CUDA_VISIBLE_DEVICES \
        GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_DEBUG NCCL_IB_HCA MASTER_ADDR MASTER_PORT ${EXPORT:-}; do
        if [[ -n "${!name:-}" ]]; then
            options+=(-x "$name")
        fi
    done
    if [[ -n "${HOSTS:-}" ]]; then
        options+=(--host "$HOSTS")
    fi
    if [[ "${OVERSUBSCRIBE:-0}" == 1 ]]; then
        options+=(--oversubscribe)
    fi
    if [[ "$(id -u)" == 0 && "${ALLOW_RUN_AS_ROOT:-0}" == 1 ]]; then
        options+=(--allow-run-as-root)
    fi
    ;;
*) # MPICH's Hydra: passes all variables on, binds nothing, lets root start it, and more ranks than cores.
    if [[ -n "${HOSTS:-}" ]]; then
        options+=(-hosts "$HOSTS")
    fi
    ;;
esac

exec "$mpirun" "${options[@]}" "$python" "${SCRIPT:-$root/examples/train_gpt.py}" "$@"
