"""A rank dies, stops, is cut off, raises or stays away: every other rank says in time who it was, and refuses to go on."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable

import pytest
from netlab import Lab, Process, wait_for_all

pytestmark = pytest.mark.cluster

TIMEOUT = 4.0  # of the process group, seconds
MARGIN = 5.0
FAULT_STEP = 5
OPERATIONS = r"(reduce-scatter|all-gather|verdict|broadcast) failed: "


def blamed(message: str) -> set[tuple[int, str]]:
    """The ranks at fault and their hosts, which stand between the operation and the list of where everybody was."""
    cause = re.split(OPERATIONS, message, maxsplit=1)[-1].split("Where each rank")[0].split(" [")[0]
    named = {(int(rank), host) for rank, host in re.findall(r"rank (\d+) \(host ([\w-]+)", cause)}
    return named | {(int(rank), host) for host, rank in re.findall(r"host ([\w-]+) of rank (\d+)", cause)}


def inject(kind: str, lab: Lab, ranks: list[Process], culprit: int) -> float:
    """Let the fault happen; when it did, in seconds since the epoch."""
    process = ranks[culprit]
    if kind in ("raise", "absent"):  # of itself, at FAULT_STEP
        return float(process.wait_for("step", 60, step=FAULT_STEP - 1)["time"])
    wait_for_all(ranks, "step", 60, step=FAULT_STEP)
    if kind == "cut":
        process.host.cut()
    else:
        process.signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[kind])
    return time.time()


def assert_error_names(error: dict, culprit: int, lab: Lab, per_host: int) -> None:
    message = error["message"]
    assert error["type"] == "RuntimeError", message
    assert blamed(message) == {(culprit, lab.hosts[culprit // per_host].name)}, message
    assert re.search(OPERATIONS, message), message
    at_step = re.search(r"at step (\d+)", message)
    # A gather belongs to the step that started it, and may fail when the next one begins.
    assert at_step is not None, message
    assert error["step"] - 1 <= int(at_step[1]) <= error["step"], message


@pytest.mark.parametrize(
    ("kind", "num_hosts", "per_host", "culprit"),
    [
        ("kill", 2, 1, 1),
        ("kill", 2, 1, 0),  # with the store in it
        ("kill", 3, 1, 2),
        ("kill", 2, 3, 4),  # in the midst of two hops
        ("stop", 2, 1, 1),
        ("stop", 3, 1, 0),
        ("stop", 3, 1, 2),
        ("cut", 2, 1, 1),
        ("cut", 3, 1, 2),
        ("raise", 2, 1, 1),
        ("raise", 3, 1, 0),
        ("absent", 3, 1, 1),
    ],
)
def test_every_other_rank_names_the_culprit_in_time(
    kind: str,
    num_hosts: int,
    per_host: int,
    culprit: int,
    make_lab: Callable[..., Lab],
    start_ranks: Callable[..., list[Process]],
) -> None:
    """NVIDIA/nccl#395, NVIDIA/nccl#1260, NVIDIA/nccl#1324, hpcaitech/ColossalAI#5003, deepspeedai/DeepSpeed#7991,
    deepspeedai/DeepSpeed#801, deepspeedai/DeepSpeed#2993: the others waited without end, and nothing said for whom."""
    lab = make_lab(num_hosts)
    fault = ("--fault", f"{kind}:{culprit}:{FAULT_STEP}") if kind in ("raise", "absent") else ()
    ranks = start_ranks(
        lab.hosts, *("--steps", "1000000", "--timeout", str(TIMEOUT), "--limit", "60"), *fault, per_host=per_host
    )
    when = inject(kind, lab, ranks, culprit)
    others = [rank for number, rank in enumerate(ranks) if number != culprit]
    errors = wait_for_all(others, "error", TIMEOUT + MARGIN + 5)
    late = {error["rank"]: round(error["time"] - when, 1) for error in errors}
    assert max(late.values()) <= TIMEOUT + MARGIN, f"seconds after the fault, by rank: {late}"
    for error in errors:
        assert_error_names(error, culprit, lab, per_host)
        if kind == "raise" and culprit != 0:  # rank 0 takes the store, in which it said so, along
            assert "raised ArithmeticError: this rank was told to fail" in error["message"]
    refusals = [event["message"] for event in wait_for_all(others, "refused", 5)]
    assert all("failed" in refusal for refusal in refusals), refusals
    assert [rank.wait(10) for rank in others] == [1] * len(others)
    if kind == "cut":  # the one behind the cut raises in time too; to it, the others are gone
        error = ranks[culprit].wait_for("error", 5)
        assert error["time"] - when <= TIMEOUT + MARGIN
        assert blamed(error["message"]), error["message"]


def test_a_short_cut_is_no_fault(make_lab: Callable[..., Lab], start_ranks: Callable[..., list[Process]]) -> None:
    """A cable that is back before the time-out costs time alone: TCP sends again, and both end with the same masters."""
    lab = make_lab(2)
    stop = lab.directory / "stop"
    ranks = start_ranks(lab.hosts, *("--steps", "1000000", "--timeout", "20", "--until", str(stop)))
    wait_for_all(ranks, "step", 60, step=FAULT_STEP)
    lab.hosts[1].cut()
    lab.stands_still(ranks, 1.0)
    lab.hosts[1].mend()
    seen = [len(rank.all("step")) for rank in ranks]
    for rank, count in zip(ranks, seen, strict=True):
        rank.wait_for("step", 15, count=count + 2)
    stop.touch()
    assert len({event["masters"] for event in wait_for_all(ranks, "masters", 15)}) == 1
    assert [rank.wait(10) for rank in ranks] == [0, 0]
