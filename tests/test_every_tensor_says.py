"""Every tensor says its dtype and its device: a user's default for either never reaches shardmp's own tensors."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from case_tools import Weights
from helpers import masters, sharded
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.utils._device import _device_constructors

import shardmp
from shardmp.layout import MIB

SOURCES = sorted((Path(__file__).resolve().parent.parent / "shardmp").rglob("*.py"))

# What makes a tensor out of nothing, by torch's own list; `frombuffer` has a dtype and no device.
MAKERS = {function.__name__.removeprefix("fft_"): {"dtype", "device"} for function in _device_constructors()} | {
    "normal": {"dtype", "device"},
    "frombuffer": {"dtype"},
}
NEVER = {
    "Tensor",
    "FloatTensor",
    "DoubleTensor",
    "HalfTensor",
    "BFloat16Tensor",
    "LongTensor",
    "IntTensor",
    "BoolTensor",
}


def unsaid(source: str) -> Iterator[str]:
    """Calls in `source` that leave a dtype or a device to torch's defaults, as `line: what is missing`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            for name in node.names:
                if name.name in MAKERS:
                    yield f"{node.lineno}: from torch import {name.name} (call it as torch.{name.name})"
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("torch."):
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        missing = MAKERS.get(name, set()) - {keyword.arg for keyword in node.keywords}
        if missing or name in NEVER:
            yield f"{node.lineno}: {ast.unparse(node)} without {' and '.join(sorted(missing)) or 'a maker that takes both'}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_every_call_that_makes_a_tensor_gives_dtype_and_device(path: Path) -> None:
    assert list(unsaid(path.read_text())) == []


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("torch.zeros(3)", "device and dtype"),
        ("torch.zeros(3, dtype=torch.float32)", "without device"),
        ("torch.zeros(3, device=device)", "without dtype"),
        ("torch.tensor([1.0], device='cpu')", "without dtype"),
        ("torch.arange(3, device='cpu')", "without dtype"),
        ("torch.fft.fftfreq(3, dtype=torch.float32)", "without device"),
        ("torch.frombuffer(data)", "without dtype"),
        ("torch.FloatTensor([1.0])", "takes both"),
        ("from torch import Tensor, zeros", "torch.zeros"),
    ],
)
def test_a_call_that_leaves_one_out_is_found(source: str, missing: str) -> None:
    assert [missing in found for found in unsaid(source)] == [True]


def test_calls_that_say_both_or_inherit_both_pass() -> None:
    assert list(unsaid("torch.ones(3, dtype=x, device=y); torch.zeros_like(x); x.new_zeros(3); torch.cat([x])")) == []


# -- trained, saved and loaded under other defaults


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    # On "meta" a tensor without a device has no values, and the first look at one is an error.
    "meta": lambda: default_device("meta"),
}


@pytest.mark.parametrize("stage", [1, 2])
@on_ranks(1, 2, 3)
def test_d14_a_default_of_bfloat16_on_before_shard_axolotl_3919(stage: int) -> None:
    """axolotl-ai-cloud/axolotl#3919. The first of 8 steps overflows at 2^16; AdamW without decay moves by its lr."""
    with default_dtype(torch.bfloat16):
        model = Weights(w=4)
        inner = AdamW(model.parameters(), lr=2.0**-12, weight_decay=0.0, eps=0.0)
        model, optimizer = shardmp.shard(model, inner, stage=stage)
        for _ in range(8):
            optimizer.backward(model(w=torch.ones(4, dtype=torch.float32)))
            optimizer.step()
        assert optimizer.skipped_steps == 1
        assert optimizer.master("w").tolist() == pytest.approx([1 - 7 * 2.0**-12] * 4, abs=2.0**-22)


class Net(nn.Module):
    """Sizes on both sides of 1024, a norm layer and a buffer; its values depend on no default."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator("cpu").manual_seed(7)
        for name, shape in (("first", (40, 40)), ("second", (40, 3)), ("third", (7,))):
            values = torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")
            setattr(self, name, nn.Parameter(values.mul_(0.1)))
        self.norm = nn.LayerNorm(40, dtype=torch.float32, device="cpu")
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64, device="cpu"))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return (self.norm(x @ self.first) @ self.second).float().pow(2).mean() + self.third.float().sum()


def trained(defaults: str, directory: str, rank: int, options: dict[str, Any]) -> dict[str, Tensor]:
    """Masters after three steps, a save, a load into another model, a looked-at gradient, and a fourth step."""
    options = {"precision": shardmp.Precision(init_scale=2.0**8), "bucket_mb": 4096 / MIB, **options}
    with DEFAULTS[defaults]():
        model, optimizer = sharded(Net(), lr=2.0**-6, **options)
        batches = torch.randn(
            4, 5, 40, generator=torch.Generator("cpu").manual_seed(rank), dtype=torch.float32, device="cpu"
        )
        for batch in batches[:3]:
            optimizer.backward(model(batch))
            optimizer.clip_grad_norm_(1.0)
            report = optimizer.step()
            assert not report.skipped
            assert report.grad_norm > 0
        shardmp.save(directory, model, optimizer)
        model, optimizer = sharded(Net(), lr=2.0**-6, **options)
        shardmp.load(directory, model, optimizer)
        optimizer.backward(model(batches[3]))
        assert optimizer.full_grad("first").abs().sum().item() > 0
        optimizer.step()
        return masters(optimizer)


OPTIONS: list[dict[str, Any]] = [
    {"optimizer": SGD, "momentum": 0.5},
    {"optimizer": AdamW, "fused": True, "stage": 1},
    {"optimizer": AdamW, "fused": True, "reduce": "exact", "average": "micro_batches"},
    {"optimizer": SGD, "reduce": "native", "precision": "bf16"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())).replace("<", ""))
@on_ranks(2)
def test_no_default_changes_a_bit_of_training_saving_and_loading(
    rank: int, tmp_path: Path, options: dict[str, Any]
) -> None:
    expected = trained("nothing", str(tmp_path / "nothing"), rank, options)
    for defaults in list(DEFAULTS)[1:]:
        found = trained(defaults, str(tmp_path / defaults), rank, options)
        assert all(torch.equal(found[name], expected[name]) for name in expected), defaults
        assert all(values.dtype == torch.float32 for values in found.values()), defaults


@pytest.mark.parametrize("optimizer", [Adam, RMSprop])
@on_ranks(2)
def test_no_default_dtype_changes_an_update_that_goes_tile_by_tile(optimizer: Any, rank: int, tmp_path: Path) -> None:
    """Torch's own step counts of these follow `set_default_device`, and so do not train on another device than it."""
    options = {"optimizer": optimizer, "foreach": False}
    expected = trained("nothing", str(tmp_path / "nothing"), rank, options)
    for defaults in ("bfloat16", "float64"):
        found = trained(defaults, str(tmp_path / defaults), rank, options)
        assert all(torch.equal(found[name], expected[name]) for name in expected), defaults
