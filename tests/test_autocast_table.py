"""docs/precision.md's table of what autocast keeps in FP32, held against torch's dispatcher on both devices."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import products_apart
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardmp import tensorcore

PAGE = Path(__file__).resolve().parent.parent / "docs" / "precision.md"

# Of a 16-bit (4, 8), which is what a product under autocast gives, and an FP32 (4, 8), which is what a weight is.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": F.linear,
    "matmul": lambda h, x: h @ x.t(),
    "bmm": lambda h, x: torch.bmm(h.unsqueeze(0), x.t().unsqueeze(0)),
    "conv1d": lambda h, x: F.conv1d(h.unsqueeze(0), x.view(8, 4, 1)),
    "scaled_dot_product_attention": lambda h, x: F.scaled_dot_product_attention(*(h.view(1, 1, 4, 8),) * 3),
    "relu": lambda h, x: F.relu(h),
    "gelu": lambda h, x: F.gelu(h),
    "batch_norm": lambda h, x: F.batch_norm(h, None, None, training=True),
    "mean": lambda h, x: h.mean(),
    "interpolate": lambda h, x: F.interpolate(h.unsqueeze(0), size=4),
    "add": lambda h, x: h + x,
    "cat": lambda h, x: torch.cat([h, x]),
    "stack": lambda h, x: torch.stack([h, x]),
    "softmax": lambda h, x: F.softmax(h, -1),
    "log_softmax": lambda h, x: F.log_softmax(h, -1),
    "layer_norm": lambda h, x: F.layer_norm(h, (8,)),
    "group_norm": lambda h, x: F.group_norm(h.view(1, 8, 4), 2),
    "exp": lambda h, x: torch.exp(h),
    "log": lambda h, x: torch.log(h),
    "pow": lambda h, x: h**2,
    "rsqrt": lambda h, x: torch.rsqrt(h),
    "sum": lambda h, x: h.sum(),
    "cumsum": lambda h, x: h.cumsum(0),
    "norm": lambda h, x: h.norm(),
    "cosine_similarity": lambda h, x: F.cosine_similarity(h, h),
    "softplus": lambda h, x: F.softplus(h),
    "prod": lambda h, x: h.prod(),
    "cross_entropy": lambda h, x: F.cross_entropy(h, torch.zeros(4, dtype=torch.long, device=h.device)),
    "nll_loss": lambda h, x: F.nll_loss(h, torch.zeros(4, dtype=torch.long, device=h.device)),
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
}


def table() -> dict[str, tuple[str, str]]:
    """The page's word for each operator, on the CPU and on CUDA."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in ("16 bits", "FP32"):
            found.update(dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), (cells[1], cells[2])))
    return found


def word(dtype: torch.dtype) -> str:
    return "FP32" if dtype == torch.float32 else "16 bits"


@pytest.fixture
def cuda_autocast() -> Iterator[None]:
    """`torch.autocast("cuda")` turns itself off where there is no GPU; the dispatcher's switch does not."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


def test_the_table_has_every_operator_that_is_tried() -> None:
    assert sorted(table()) == sorted(OPERATORS)


@pytest.mark.parametrize("products", ["own", "torch"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_autocast_gives_on_the_cpu_is_what_the_table_says(dtype: torch.dtype, products: str) -> None:
    x = torch.rand(4, 8)
    with products_apart(products), torch.autocast("cpu", dtype=dtype):
        tensorcore.enable(dtype)
        found = {name: word(operator(x.to(dtype), x).dtype) for name, operator in OPERATORS.items()}
    assert found == {name: cpu for name, (cpu, _) in table().items()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_autocast_gives_on_cuda_is_what_the_table_says(dtype: torch.dtype, cuda_autocast: None) -> None:
    """On fake tensors: the dtype is decided before any kernel runs, so this needs no GPU."""
    torch.set_autocast_dtype("cuda", dtype)
    with FakeTensorMode():
        x = torch.empty(4, 8, device="cuda")
        found = {name: word(operator(x.to(dtype), x).dtype) for name, operator in OPERATORS.items()}
    assert found == {name: cuda for name, (_, cuda) in table().items()}
