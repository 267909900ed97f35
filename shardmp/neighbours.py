"""Rows read straight from the memory of another rank on the same host, in place of sockets.

Owns:      the system call, the permission for it, and the trial that shows whether it works here.
Takes:     which ranks run on this host, and addresses that they tell.
Gives:     `Neighbours`, the ranks whose memory this process reads while they read its own; `Remote`, elements that lie there.
Invariant: what is read is what its owner wrote before it told the address; it writes there again only when the reader
           has said that it is done. Bits do not depend on which way they came.

[Note: why not shared memory] A socket copies every byte twice and counts it through two protocol stacks;
process_vm_readv copies it once, from where autograd or the update left it, tile by tile into the cache where it is
summed. Shared memory would need a copy to get there, counts in the resident memory of everybody who maps it, and in a
container is 64 MB. MPI libraries do the same (Open MPI: CMA). It needs Linux, one process namespace, and the right to
trace; where the trial read fails, rows go through sockets. `SHARDMP_READ_NEIGHBOURS=0` forbids it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .faults import Member

SWITCH = "SHARDMP_READ_NEIGHBOURS"
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h


class _Span(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


@dataclass(frozen=True)
class Probe:
    """What a rank tells the others so that they can try to read it: a random number, and where it lies."""

    address: int
    value: int


class Neighbours:
    """The ranks of this host that can read each other's memory, without this one; empty before `try_reading`."""

    def __init__(self) -> None:
        # Alive as long as this object: peers read it.
        self._value = torch.tensor([secrets.randbits(62)], dtype=torch.int64, device="cpu")
        self._pids: dict[int, int] = {}
        self.is_allowed = sys.platform == "linux" and os.environ.get(SWITCH, "1") != "0"
        if self.is_allowed:
            _allow_siblings()

    @property
    def probe(self) -> Probe | None:
        """What the others need for their trial; None where this rank must not be read."""
        return Probe(self._value.data_ptr(), int(self._value)) if self.is_allowed else None

    def try_reading(self, rank: int, members: Sequence[Member], probes: Sequence[Probe | None]) -> list[int]:
        """The ranks that this one can read."""
        own, found = members[rank], []
        for peer, (member, probe) in enumerate(zip(members, probes, strict=True)):
            near = member.host_id == own.host_id and own.pid_namespace and member.pid_namespace == own.pid_namespace
            # torch's fake process group repeats this very process.
            if near and member.pid != own.pid and probe is not None and self.is_allowed:
                value = torch.zeros_like(self._value)
                with contextlib.suppress(OSError, AttributeError):  # not allowed, or not in this C library
                    _read(member.pid, probe.address, value)
                    if int(value) == probe.value:
                        found.append(peer)
        return found

    def agree(self, rank: int, members: Sequence[Member], readable: Sequence[Sequence[int]]) -> None:
        """Keep the ranks with which reading works both ways; `readable` is what each rank can read."""
        self._pids = {peer: members[peer].pid for peer in readable[rank] if rank in readable[peer]}

    def __contains__(self, rank: int) -> bool:
        return rank in self._pids

    def __len__(self) -> int:
        return len(self._pids)

    @property
    def ranks(self) -> list[int]:
        """Their ranks, in order."""
        return sorted(self._pids)

    def read(self, rank: int, address: int, into: Tensor) -> None:
        """Fill `into` (contiguous, on the CPU) from an address of a neighbour.

        Raises:
            RuntimeError: the neighbour is gone.
        """
        try:
            _read(self._pids[rank], address, into)
        except OSError as error:
            raise RuntimeError(f"reading the memory of rank {rank} (pid {self._pids[rank]}): {error}") from error


@dataclass(frozen=True)
class Remote:
    """Elements of one dtype, contiguous in a neighbour's memory.

    Attributes:
        addresses: int64, as the neighbour's message brings them; `index` is the place of this one.
        start: elements after the address at which they begin.
    """

    neighbours: Neighbours
    rank: int
    addresses: npt.NDArray[np.int64]
    index: int
    size: int
    dtype: torch.dtype
    start: int = 0

    def numel(self) -> int:
        """How many elements."""
        return self.size

    def element_size(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    def __getitem__(self, part: slice) -> Remote:
        first, last, _ = part.indices(self.size)
        return replace(self, size=last - first, start=self.start + first)

    def read(self, into: Tensor | None = None) -> Tensor:
        """The elements, in `into` or in fresh memory."""
        into = torch.empty(self.size, dtype=self.dtype, device="cpu") if into is None else into
        address = int(self.addresses[self.index]) + self.start * self.element_size()
        self.neighbours.read(self.rank, address, into)
        return into


def _read(pid: int, address: int, into: Tensor) -> None:
    libc = _libc()
    place, left = into.data_ptr(), into.numel() * into.element_size()
    while left:
        here, there = _Span(place, left), _Span(address, left)
        count = libc.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if count <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        place, address, left = place + count, address + count, left - count


def _libc() -> ctypes.CDLL:
    """The C library; its calls release the GIL."""
    global _loaded
    if _loaded is None:
        _loaded = ctypes.CDLL(None, use_errno=True)
        with contextlib.suppress(AttributeError):  # not every C library has it: then the trial fails
            _loaded.process_vm_readv.restype = ctypes.c_ssize_t
            _loaded.process_vm_readv.argtypes = (
                ctypes.c_int,
                ctypes.POINTER(_Span),
                ctypes.c_ulong,
                ctypes.POINTER(_Span),
                ctypes.c_ulong,
                ctypes.c_ulong,
            )
    return _loaded


_loaded: ctypes.CDLL | None = None


def _allow_siblings() -> None:
    """Where Yama lets only parents trace (Ubuntu's default), let the descendants of this process's parent, its launcher."""
    with contextlib.suppress(OSError, ValueError):
        if int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text()) == 1 and os.getppid() > 1:
            _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)
