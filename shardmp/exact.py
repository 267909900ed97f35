"""Sums of FP16 gradients that no order can change: `reduce="exact"`.

Owns:      the FP64 gradient shard, and the grid on which every gradient lies.
Takes:     rows of FP16 gradients, and FP32 ones of parameters kept in FP32, put on the same grid.
Gives:     the exact sum of all rows of a step, rounded once to FP32.
Invariant: an FP16 number is k / 2^24 with |k| < 2^40, so FP64 adds up to 8192 of them without rounding, in any order.

[Note: one storage] A shard has 8 bytes per element: FP64 sums, or the sum's rounding to FP32 in the lower half, which the
update reads, and in the upper one what a second backward needs to widen it to FP64 without loss: of up to two rows in FP16
the rows themselves, else what the rounding left over, which has at most 24 bits for up to 256 rows. So a step of one
backward never reads FP64 from memory, and on two ranks computes nothing in it: FP32 rounds a sum of two numbers once.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from .exchange import TILE

MAX_PAIRED = 256  # rows whose sum two FP32 numbers hold: 40 + 8 bits
MAX_TERMS = 8192  # 2^13: 40 bits of an FP16 number and 13 of the count are the 53 of FP64
FP16_MAX = 65504.0
_GRID = 1.5 * 2.0**28  # FP64 numbers near it are multiples of 2^-24

# Modules whose result for a micro-batch is not a matter of the micro-batch alone, and what follows from that.
_RANDOM = "draws random numbers, which depend on the rank and on how micro-batches are dealt"
_STATISTICS = (
    "keeps running statistics of rank 0's micro-batches: its buffers depend on the number of ranks, weights don't"
)


def on_grid(gradient: Tensor) -> Tensor:
    """An FP32 gradient as FP16's grid has it: a multiple of 2^-24, inf beyond 65504."""
    wide = gradient.double().add_(_GRID).sub_(_GRID)
    return wide.masked_fill_(gradient > FP16_MAX, torch.inf).masked_fill_(gradient < -FP16_MAX, -torch.inf).float()


class ExactShard:
    """The gradient shard of one bucket; see [Note: one storage]."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self.wide = torch.zeros(numel, dtype=torch.float64, device=device)
        self.narrow, self.rest, self._rows = _halves(self.wide)
        self._is_wide = False
        self._num_kept = 0

    def receive(self, num_rows: int | None, *, wide: bool) -> tuple[Tensor, dict[str, Tensor]]:
        """Where the sum goes, and what else is to be kept of it, as `Summation` calls it.

        Args:
            num_rows: how many rows of FP16 are about to be summed; None where rows are wider.
            wide: keep the sum in FP64.
        """
        self._is_wide, self._num_kept = wide, 0
        if wide:
            return self.wide, {}
        if num_rows is None or num_rows > len(self._rows):
            return self.narrow, {"rest": self.rest}
        self._num_kept = num_rows
        return self.narrow, {"kept": self._rows[:num_rows]}

    def widen(self) -> None:
        """Another backward will be added: from here on the sum is FP64."""
        if self._is_wide:
            return
        halves = self.wide.clone()  # `wide` lies over them
        narrow, rest, rows = _halves(halves)
        for start in range(0, self.wide.numel(), TILE):
            part = slice(start, start + TILE)
            if self._num_kept:
                self.wide[part] = rows[: self._num_kept, part].double().sum(0)
            else:
                # What the rounding of an inf left over is not a number.
                self.wide[part] = narrow[part].double() + rest[part].masked_fill_(~narrow[part].isfinite(), 0.0)
        self._is_wide = True

    def round(self) -> None:
        """Put the rounding of the sums into `narrow`."""
        if not self._is_wide:
            return
        for start in range(0, self.wide.numel(), TILE):
            # In ascending order and through a copy: `narrow` lies over the sums that were read before.
            rounded = self.wide[start : start + TILE].float()
            self.narrow[start : start + TILE] = rounded
        self._is_wide = False

    @property
    def sums(self) -> Tensor:
        """The sums, FP64, or their FP32 rounding where that is what there is."""
        return self.wide if self._is_wide else self.narrow

    def values(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), rounded to FP32."""
        return self.sums[start:stop].float()


def _halves(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lower half as FP32, the upper one as FP32 and as two rows of FP16."""
    narrow, rest = wide.view(torch.float32).view(2, -1)
    return narrow, rest, rest.view(torch.float16).view(2, -1)


def check_model(model: nn.Module, device: torch.device) -> None:
    """Say where the promise of equal bits does not hold, and refuse where it would be false.

    Raises:
        ValueError: a layer that mixes the ranks' statistics, or CUDA kernels that may add in any order.

    Warns:
        UserWarning: modules that draw random numbers, or keep running statistics, by name.
    """
    found = []
    for name, module in model.named_modules():
        where = f"{name} ({type(module).__name__})" if name else type(module).__name__
        if isinstance(module, nn.SyncBatchNorm):
            raise ValueError(
                f"shard(reduce='exact'): {where} computes with the statistics of all ranks' micro-batches, so the weights "
                "would depend on the number of ranks: use a norm without batch statistics, or reduce='fp32'"
            )
        if _draws(module):
            found.append(f"{where} {_RANDOM}")
        elif isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            found.append(f"{where} {_STATISTICS}")
    if device.type == "cuda" and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "shard(reduce='exact') on CUDA: call torch.use_deterministic_algorithms(True) first (and set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8): kernels that add in any order give other bits on each run"
        )
    if found:
        warnings.warn(
            "reduce='exact' promises the same masters for any number of ranks, with the exception of: "
            + "; ".join(found),
            stacklevel=2,
        )


def _draws(module: nn.Module) -> bool:
    if isinstance(module, (nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)):
        return True
    if isinstance(module, (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)):
        return float(getattr(module, "p", getattr(module, "dropout", 0.0))) > 0
    return False
