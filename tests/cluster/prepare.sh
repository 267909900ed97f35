#!/usr/bin/env bash
# Installs the system packages that the cluster tests need, as far as this machine lets it, and prints the tiers that it
# can run, for SHARDMP_CLUSTER_REQUIRED. What has no tier here is skipped by the tests with the reason.
set -euo pipefail

missing=()
command -v ip >/dev/null || missing+=(iproute2)
command -v unshare >/dev/null || missing+=(util-linux)
command -v mpiexec.hydra >/dev/null || missing+=(mpich)
command -v iptables >/dev/null || missing+=(iptables)
PATH="$PATH:/usr/sbin" command -v slurmctld >/dev/null || missing+=(slurmctld slurmd slurm-client munge)
if ! docker info >/dev/null 2>&1; then # no engine runs: Debian's can run in a network of its own
    command -v dockerd >/dev/null || command -v podman >/dev/null || missing+=(docker.io)
    command -v mmdebstrap >/dev/null || missing+=(mmdebstrap) # makes the base image, which cannot be pulled there
fi
if ((${#missing[@]})) && [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install -y --no-install-recommends "${missing[@]}")
    { "${install[@]}" || { apt-get update && "${install[@]}"; }; } >&2
fi

tiers=()
probe="shardmplab-$$-can-run"
if command -v unshare >/dev/null && ip netns add "$probe" 2>/dev/null; then
    tiers=(namespaces openmpi)
    ip -n "$probe" link add probe type bridge 2>/dev/null || tiers=()
    if ((${#tiers[@]})) && ip netns exec "$probe" iptables -A INPUT -p tcp --dport 1 -j DROP 2>/dev/null; then
        tiers+=(firewall)
    fi
    ip netns del "$probe"
    if ((${#tiers[@]})) && command -v mpiexec.hydra >/dev/null; then
        tiers+=(mpich)
    fi
    if ((${#tiers[@]})) && PATH="$PATH:/usr/sbin" command -v slurmctld >/dev/null; then
        tiers+=(slurm)
    fi
fi
if .venv/bin/python docker/engine.py build/cluster/engine >&2 &&
    { docker info >/dev/null 2>&1 || command -v mmdebstrap >/dev/null; }; then
    tiers+=(containers)
fi
echo "${tiers[*]}"
