"""`shardmp env`: what an issue should say about the machine.

Owns:      the order and the wording of the report.
Takes:     `host_facts`; whose 16-bit products this CPU would train with.
Gives:     one dictionary, and the same as lines of text.
Invariant: works without ranks, without a GPU and with variables that contradict each other; shows no secret.
"""

from __future__ import annotations

import platform
import shutil
import sys
from typing import Any

from rich.filesize import decimal

from . import host_facts, products

_COMMANDS = ("torchrun", "mpirun", "srun", "kubectl", "docker")


def report() -> dict[str, Any]:
    """The facts of this host, and of how this process was started."""
    return {
        **host_facts.facts(),
        "products": _products(),
        "system": f"{_distribution()}, {platform.machine()}",
        "interpreter": sys.executable,
        "launcher": host_facts.launcher(),
        "commands": {name: path for name in _COMMANDS if (path := shutil.which(name))},
    }


def _products() -> dict[str, str]:
    """By dtype, whose products this host would train with alone, in words; a variable that makes no sense says so."""
    try:
        return {name: products.words(products.chosen_here(dtype)) for dtype, name in products.NAMES.items()}
    except ValueError as mistake:
        return dict.fromkeys(products.NAMES.values(), f"none: {mistake}")


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.platform()


def lines(found: dict[str, Any]) -> list[str]:
    """The report for people and for issues: one fact a line."""
    said = [f"{name}: {value}" for name, value in found["versions"].items()]
    for name in ("interpreter", "system", "launcher"):
        said.append(f"{name}: {found[name]}")
    said.append(f"commands: {', '.join(found['commands']) or 'none of ' + ', '.join(_COMMANDS)}")
    said += _hardware(found)
    said.append("limits: " + ", ".join(f"{name} {limit(name, value)}" for name, value in found["limits"].items()))
    said += [f"interface {interface(card)}" for card in found["interfaces"]]
    if found["ports"]:
        said.append(f"ports: {found['ports'][0]} to {found['ports'][1]}")
    said += [f"{name}={value}" for name, value in found["environment"].items()]
    return said


def _hardware(found: dict[str, Any]) -> list[str]:
    cpu, memory, shared = found["cpu"], found["memory"], found["shared_memory"]
    usable = "" if cpu["usable"] == cpu["cores"] else f", {cpu['usable']} of them for this process"
    ceiling = "" if memory["limit"] is None else f", this process may use {decimal(memory['limit'])}"
    said = [
        f"cpu: {cpu['model']}, {cpu['cores']} cores{usable}, {cpu['threads']} threads",
        f"cpu features: {' '.join(cpu['features']) or 'none that matter here'}",
        *(f"{name} products on the cpu: {whose}" for name, whose in found["products"].items()),
        f"memory: {decimal(memory['size'])}{ceiling}",
    ]
    if shared is None:
        said.append("/dev/shm: not there")
    else:
        said.append(f"/dev/shm: {decimal(shared['size'])}, {decimal(shared['free'])} free")
    for number, gpu in enumerate(found["gpus"]):
        said.append(f"gpu {number}: {gpu['name']}, {decimal(gpu['memory'])}, capability {gpu['capability']}")
    if not found["gpus"]:
        said.append("gpu: none")
    said.append(f"infiniband: {', '.join(found['infiniband']) or 'none'}")
    return said


def limit(name: str, value: int | None) -> str:
    """A limit of `host_facts.limits` in words."""
    if value is None:
        return "unlimited"
    return decimal(value) if name == "locked memory" else str(value)


def interface(card: dict[str, Any]) -> str:
    """An interface in words."""
    mtu = f", MTU {card['mtu']}" if card["mtu"] else ""
    speed = f", {card['speed']} Mbit/s" if card["speed"] else ""
    return f"{card['name']}: {', '.join(card['addresses']) or 'no address'}{mtu}{speed}"
