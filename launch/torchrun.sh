#!/usr/bin/env bash
# Starts a training script on every rank of this node, through `shardmp launch` and torchrun.
# The same command runs on every node; what stands behind it goes to the script.
#
#   launch/torchrun.sh --steps 100                                              one machine, one rank per GPU (or two)
#   NNODES=2 RDZV_ENDPOINT=node0:29500 launch/torchrun.sh --steps 100           on both machines
#   NNODES=1:4 RDZV_ENDPOINT=store:29500 SEPARATE_STORE=1 launch/torchrun.sh    elastic; `shardmp rendezvous` runs on store
#
# Variables, all optional:
#   SCRIPT            the training script                              examples/train_gpt.py
#   NPROC_PER_NODE    ranks on this node: a number, gpu, cpu, auto     gpu where nvidia-smi is found, else 2
#   NNODES            nodes: N, or MIN:MAX for elastic                 1
#   RDZV_ENDPOINT     HOST:PORT of one node; needed from 2 nodes on
#   RDZV_ID           the job's name: another for each job             shardmp
#   NODE_RANK         fixes the order of nodes (0 is RDZV_ENDPOINT's)
#   MAX_RESTARTS      restarts after a failure                         0; elastic: 3
#   SEPARATE_STORE    1: RDZV_ENDPOINT is a running `shardmp rendezvous`
#   LOG_DIR           a folder for one log per rank
#   SHUTDOWN_TIMEOUT  seconds from SIGTERM to SIGKILL (torch 2.13+)
#   DRY_RUN           1: print torchrun's command and start nothing
#   PYTHON            the interpreter that has shardmp                 .venv/bin/python of this folder, else python3
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-$root/.venv/bin/python}"
if [[ -z "${PYTHON:-}" && ! -x "$python" ]]; then
    python=python3
fi
default_ranks=2
if command -v nvidia-smi >/dev/null 2>&1; then
    default_ranks=gpu
fi

options=(--nnodes "${NNODES:-1}" --nproc-per-node "${NPROC_PER_NODE:-$default_ranks}")
add() { # OPTION VALUE: adds both where there is a value
    if [[ -n "$2" ]]; then
        options+=("$1" "$2")
    fi
}
add --rdzv-endpoint "${RDZV_ENDPOINT:-}"
add --rdzv-id "${RDZV_ID:-}"
add --node-rank "${NODE_RANK:-}"
add --max-restarts "${MAX_RESTARTS:-}"
add --log-dir "${LOG_DIR:-}"
add --shutdown-timeout "${SHUTDOWN_TIMEOUT:-}"
if [[ "${SEPARATE_STORE:-0}" == 1 ]]; then
    options+=(--separate-store)
fi
if [[ "${DRY_RUN:-0}" == 1 ]]; then
    options+=(--dry-run)
fi

# exec: a signal to this process (docker stop, scancel, kubectl delete) reaches torchrun, which passes it to the ranks.
exec "$python" -m shardmp.cli launch "${options[@]}" "${SCRIPT:-$root/examples/train_gpt.py}" "$@"
