#!/usr/bin/env bash
# Installs the system packages that the cluster tests need, as far as this machine lets it, and prints the tiers that it
# can run, for SHARDMP_CLUSTER_REQUIRED. What has no tier here is skipped by the tests with the reason.
set -euo pipefail

missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v unshare >/dev/null || missing+=(util-linux)
command -v mpiexec.hydra >/dev/null || missing+=(mpich)
if ((${#missing[@]})) && [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install -y --no-install-recommends "${missing[@]}")
    { "${install[@]}" || { apt-get update && "${install[@]}"; }; } >&2
fi

probe="shardmplab-$$-can-run"
if command -v unshare >/dev/null && ip netns add "$probe" 2>/dev/null; then
    tiers=(namespaces openmpi)
    ip -n "$probe" link add probe type bridge 2>/dev/null || tiers=()
    ip netns del "$probe"
    if ((${#tiers[@]})) && command -v mpiexec.hydra >/dev/null; then
        tiers+=(mpich)
    fi
    echo "${tiers[*]}"
fi
