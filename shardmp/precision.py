"""The precision policy of a run.

Owns:      `Precision`, a frozen record of dtypes, loss-scale settings and of what stays FP32.
Takes:     the user's words ("fp16", "bf16", "fp32", or the fields).
Gives:     torch dtypes and validated numbers to every other module.
Invariant: a `Precision` that exists is consistent; only FP16 has a loss scale that moves.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass, fields

import torch
from torch import nn

# What normalises by a statistic of its input: sums of squares of FP16 numbers overflow at 256, and
# differences of nearly equal ones vanish ("Mixed Precision Training", arXiv 1710.03740, section 3.3).
NORM_LAYERS: tuple[type[nn.Module], ...] = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.LocalResponseNorm,
    nn.modules.batchnorm._NormBase,  # BatchNorm, InstanceNorm and SyncBatchNorm of every dimension
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

# The loss scale is an FP32 number, and so is its reciprocal.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, 2.0**127

_SCALE_OPTIONS = (
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
    "min_scale",
    "max_scale",
    "static_scale",
)

Keep = type[nn.Module] | str


@dataclass(frozen=True)
class Precision:
    """How numbers are held while a model trains.

    Args:
        param: "fp16", "bf16" or "fp32": the dtype of trainable parameters, of their gradients and of both on the wire.
            Masters, moments and gradient sums are FP32 whatever is chosen.
        init_scale: the loss scale of the first step (a power of two keeps scaling exact).
        growth_factor: the scale is multiplied by it after `growth_interval` steps without overflow.
        backoff_factor: the scale is multiplied by it when the hysteresis is used up.
        growth_interval: steps without overflow, in a row, before the scale grows.
        hysteresis: skipped steps that are borne before the scale backs off; refilled when the scale grows.
        min_scale, max_scale: bounds of the scale. All scales lie from 2^-126 to 2^127.
        max_skips: an error is raised after so many skipped steps in a row at the minimum, under a static scale, or with
            losses that were themselves not finite.
        static_scale: a scale that never moves, in place of the dynamic one.
        keep_fp32: module classes, and patterns (as in a shell) of module or parameter names, that stay FP32: their
            trainable parameters keep FP32, and such modules compute in FP32 with autocast off. The norm layers by
            default. Inputs are cast to FP32, but for batch and instance norm, whose kernels take 16 bits.
        autocast: run the forward under `torch.autocast` in `param`'s dtype. Without it floating inputs are cast to it.
        output: "fp32" returns the wrapped model's floating outputs in FP32, so that a loss computed outside is FP32;
            "param" leaves them as they are.

    Names and defaults are those of `torch.amp.GradScaler` where it has them.

    Raises:
        ValueError: a value out of its range, or a loss-scale option with BF16 or FP32, whose scale is 1.
        TypeError: a value of another type.
    """

    param: str = "fp16"
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 1.0
    max_scale: float = 2.0**32
    max_skips: int = 50
    static_scale: float | None = None
    keep_fp32: tuple[Keep, ...] = NORM_LAYERS
    autocast: bool = True
    output: str = "fp32"

    def __post_init__(self) -> None:
        if self.param not in DTYPES:
            raise ValueError(f"Precision(param=...): expected one of {', '.join(DTYPES)}, got {self.param!r}")
        if self.output not in ("fp32", "param"):
            raise ValueError(f"Precision(output=...): expected 'fp32' or 'param', got {self.output!r}")
        if not isinstance(self.autocast, bool):
            raise TypeError(f"Precision(autocast=...): expected True or False, got {self.autocast!r}")
        self._check_keep_fp32()
        self._check_counts()
        if self.has_loss_scale:
            self._check_scale()
        else:
            self._refuse_scale_options()

    def _check_keep_fp32(self) -> None:
        if not isinstance(self.keep_fp32, tuple):
            raise TypeError(
                f"Precision(keep_fp32=...): expected a tuple of module classes and names, got {self.keep_fp32!r}"
            )
        for item in self.keep_fp32:
            if not (isinstance(item, str) or (isinstance(item, type) and issubclass(item, nn.Module))):
                raise TypeError(
                    f"Precision(keep_fp32=...): expected nn.Module classes and patterns of names, got {item!r}"
                )

    def _check_counts(self) -> None:
        for name in ("growth_interval", "hysteresis", "max_skips"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"Precision({name}=...): expected an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"Precision({name}=...): expected at least 1, got {value}")

    def _check_scale(self) -> None:
        def positive(name: str, value: object) -> float:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"Precision({name}=...): expected a number, got {value!r}")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Precision({name}=...): expected a finite number above 0, got {value}")
            return float(value)

        def scale(name: str, value: object) -> float:
            if not SMALLEST_SCALE <= (found := positive(name, value)) <= LARGEST_SCALE:
                raise ValueError(
                    f"Precision({name}=...): expected from 2^-126 to 2^127, where FP32 holds the scale and its reciprocal, "
                    f"got {value}"
                )
            return found

        low, high = scale("min_scale", self.min_scale), scale("max_scale", self.max_scale)
        if low > high:
            raise ValueError(f"Precision: min_scale {low} is above max_scale {high}")
        if self.static_scale is not None:
            scale("static_scale", self.static_scale)
        elif not low <= scale("init_scale", self.init_scale) <= high:
            raise ValueError(
                f"Precision(init_scale=...): expected between min_scale {low} and max_scale {high}, got {self.init_scale}"
            )
        if positive("growth_factor", self.growth_factor) <= 1.0:
            raise ValueError(f"Precision(growth_factor=...): expected above 1, got {self.growth_factor}")
        if positive("backoff_factor", self.backoff_factor) >= 1.0:
            raise ValueError(f"Precision(backoff_factor=...): expected below 1, got {self.backoff_factor}")

    def _refuse_scale_options(self) -> None:
        for field in fields(self):
            if field.name in _SCALE_OPTIONS and getattr(self, field.name) != field.default:
                raise ValueError(
                    f"Precision({field.name}=...): {self.param} has no loss scale (its range is FP32's); "
                    f"leave {field.name} out or use param='fp16'"
                )

    def other_scale_options(self, other: Precision) -> list[str]:
        """Names of the loss scale's options that differ from those of `other`."""
        return [name for name in _SCALE_OPTIONS if getattr(self, name) != getattr(other, name)]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of trainable parameters that are not kept in FP32."""
        return DTYPES[self.param]

    @property
    def has_loss_scale(self) -> bool:
        """Whether losses are scaled: FP16 alone, whose smallest number is 2^-24."""
        return self.param == "fp16"

    @property
    def first_scale(self) -> float:
        """The loss scale of the first step."""
        if not self.has_loss_scale:
            return 1.0
        return float(self.init_scale if self.static_scale is None else self.static_scale)

    def fp32_modules(self, model: nn.Module) -> dict[str, nn.Module]:
        """The outermost modules of `model` that compute in FP32, by name.

        Raises:
            ValueError: a pattern of `keep_fp32` matches no module and no parameter: a slip that would train in 16 bits.
        """
        if self.dtype == torch.float32:
            return {}
        modules = dict(model.named_modules())
        patterns = [item for item in self.keep_fp32 if isinstance(item, str)]
        names = [*modules, *(name for name, _ in model.named_parameters(remove_duplicate=False))]
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"Precision(keep_fp32=...): {pattern!r} matches no module and no parameter")
        classes = tuple(item for item in self.keep_fp32 if isinstance(item, type))
        kept: dict[str, nn.Module] = {}
        for name, module in modules.items():  # parents come before their children
            inside = any(name == outer or name.startswith(f"{outer}.") or outer == "" for outer in kept)
            named = any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
            if not inside and (isinstance(module, classes) or named):
                kept[name] = module
        return kept

    def fp32_parameters(self, model: nn.Module) -> set[str]:
        """Names (all of them, for tied parameters too) of the parameters of `model` that stay FP32."""
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if self.dtype == torch.float32:
            return set(parameters)
        kept = {
            f"{name}.{inner}" if name else inner
            for name, module in self.fp32_modules(model).items()
            for inner, _ in module.named_parameters(remove_duplicate=False)
        }
        patterns = [item for item in self.keep_fp32 if isinstance(item, str)]
        kept |= {name for name in parameters if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}
        return kept


def as_precision(value: str | Precision) -> Precision:
    """`value` as a `Precision`; a string is its `param`."""
    if isinstance(value, Precision):
        return value
    if isinstance(value, str):
        if value not in DTYPES:
            raise ValueError(f"precision: expected one of {', '.join(DTYPES)} or a Precision, got {value!r}")
        return Precision(param=value)
    raise TypeError(f"precision: expected a string or a Precision, got {value!r}")
