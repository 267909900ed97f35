"""16-bit products on the CPU: the FP32 product of the 16-bit inputs, rounded once, wherever torch calls the operator."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import products_apart
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardmp import products, tensorcore
from shardmp.products import KINDS, MATRIX, OWN, TORCH

FP16, BF16 = torch.float16, torch.bfloat16
both = pytest.mark.parametrize("dtype", [FP16, BF16], ids=["fp16", "bf16"])


@pytest.fixture(autouse=True)
def emulation() -> Iterator[None]:
    """All products ours in both dtypes, also on a CPU that has 16-bit units, on one thread; then as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with products_apart():
        assert all(tensorcore.enable(dtype, dict.fromkeys(KINDS, OWN)) for dtype in (FP16, BF16))
        yield
    torch.set_num_threads(threads)


def matrix(rows: int, columns: int, dtype: torch.dtype, layout: str = "rows") -> Tensor:
    """Random, as a row-major matrix, a transposed view, or a strided part of either."""
    if layout == "rows":
        return torch.randn(rows, columns).to(dtype)
    if layout == "columns":
        return matrix(columns, rows, dtype).t()
    if layout == "part":
        return matrix(rows, columns + 5, dtype)[:, 2 : 2 + columns]
    assert layout == "columns part"
    return matrix(columns, rows, dtype, "part").t()


LAYOUTS = ["rows", "columns", "part", "columns part"]


def fp32(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The definition: the stock FP32 kernel on the upcast inputs, each result rounded to the inputs' dtype."""
    dtype = next(x.dtype for x in args if isinstance(x, Tensor))
    upcast = [x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
    results = operator(*upcast, **kwargs)
    return results.to(dtype) if isinstance(results, Tensor) else [r if r is None else r.to(dtype) for r in results]


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert torch.equal(actual, expected), f"{(actual != expected).sum()} of {actual.numel()} elements differ"


# -- matrix products


@both
@pytest.mark.parametrize("left", LAYOUTS)
@pytest.mark.parametrize("right", LAYOUTS)
def test_products_are_the_fp32_product_rounded_once(dtype: torch.dtype, left: str, right: str) -> None:
    for m, k, n in [(5, 7, 3), (1, 33, 17), (16, 1, 9), (64, 100, 1), (3, 0, 4), (0, 5, 4), (4, 5, 0), (130, 257, 96)]:
        a, b = matrix(m, k, dtype, left), matrix(k, n, dtype, right)
        assert_same(a @ b, fp32(torch.mm, a, b))
        assert_same(torch.mv(a, b[:, 0]) if n else a[:, 0], fp32(torch.mv, a, b[:, 0]) if n else a[:, 0])
        for alpha, beta in [(1, 1), (0.5, 1), (2, 0.25), (1, 0), (0, 1)]:
            for c in (torch.randn(n).to(dtype), matrix(m, n, dtype, left), matrix(m, 1, dtype)):
                assert_same(
                    torch.addmm(c, a, b, alpha=alpha, beta=beta), fp32(torch.addmm, c, a, b, alpha=alpha, beta=beta)
                )
            v = torch.randn(m).to(dtype)
            if n:
                actual = torch.addmv(v, a, b[:, 0], alpha=alpha, beta=beta)
                assert_same(actual, fp32(torch.addmv, v, a, b[:, 0], alpha=alpha, beta=beta))


TILED = [
    # m, k, n, left, right: what is cut
    (1, 1024, 2056, "rows", "columns"),  # columns of the output, a weight row by row
    (7, 1024, 2056, "rows", "columns"),
    (64, 777, 1000, "part", "columns part"),
    (1, 2056, 1024, "rows", "rows"),  # along the sum
    (1, 1031, 777, "part", "part"),
    (2056, 1, 1024, "columns", "rows"),  # an outer product
    (2056, 5, 1024, "columns", "rows"),  # rows of the output
    (2056, 1024, 3, "rows", "rows"),
    (3, 2056, 2064, "rows", "rows"),  # above 16 MB
    (2064, 2056, 2, "columns", "columns"),
    (2056, 65, 2064, "rows", "columns"),
    (1, 2100, 777, "rows", "columns"),  # not a multiple of 8: whole
    (1, 2**20, 0, "rows", "rows"),
]


@both
@pytest.mark.parametrize(("m", "k", "n", "left", "right"), TILED)
def test_tiles_do_not_change_a_bit(dtype: torch.dtype, m: int, k: int, n: int, left: str, right: str) -> None:
    a, b = matrix(m, k, dtype, left), matrix(k, n, dtype, right)
    assert_same(a @ b, fp32(torch.mm, a, b))
    for c in (torch.randn(n).to(dtype), matrix(m, n, dtype)):
        assert_same(torch.addmm(c, a, b), fp32(torch.addmm, c, a, b))
    actual = torch.addmm(c, a, b, alpha=0.5, beta=2)
    assert_same(actual, fp32(torch.addmm, c, a, b, alpha=0.5, beta=2))
    if n:
        v = torch.randn(m).to(dtype)
        assert_same(torch.addmv(v, a, b[:, 0], beta=0.5), fp32(torch.addmv, v, a, b[:, 0], beta=0.5))


def test_a_large_weight_is_never_upcast_whole() -> None:
    x, weight, grad = matrix(1, 2048, FP16), matrix(4096, 2048, FP16), matrix(1, 4096, FP16)
    with torch.profiler.profile(profile_memory=True) as profile:
        x @ weight.t(), grad @ weight, grad.t() @ x
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest == 2 * weight.numel()  # the 16-bit weight gradient; the FP32 weight would be twice that


@both
def test_batches_of_products_are_the_fp32_products_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in (tensorcore._LIMIT, 3000):  # whole, and in chunks of the batch
        monkeypatch.setattr(tensorcore, "_LIMIT", limit)
        for batch, m, k, n in [(3, 5, 7, 4), (0, 5, 7, 4), (4, 5, 0, 3), (5, 33, 40, 24), (7, 64, 3, 65)]:
            a, b = torch.randn(batch, m, k).to(dtype), torch.randn(batch, n, k).to(dtype).transpose(1, 2)
            assert_same(torch.bmm(a, b), fp32(torch.bmm, a, b))
            assert_same(torch.bmm(a[:1].expand(batch, m, k), b), fp32(torch.bmm, a[:1].expand(batch, m, k), b))
            for c in (torch.randn(batch, m, n), torch.randn(n), torch.randn(batch, 1, n)):
                args = (c.to(dtype), a, b)
                assert_same(torch.baddbmm(*args, alpha=2, beta=0.5), fp32(torch.baddbmm, *args, alpha=2, beta=0.5))
            if batch:
                args = (torch.randn(m, n).to(dtype), a, b)
                assert_same(torch.addbmm(*args, alpha=2, beta=0.5), fp32(torch.addbmm, *args, alpha=2, beta=0.5))


@both
def test_out_and_in_place_variants_give_the_same_bits(dtype: torch.dtype) -> None:
    a, b, c = matrix(6, 8, dtype), matrix(8, 4, dtype), matrix(6, 4, dtype)
    v, x = torch.randn(6).to(dtype), torch.randn(8).to(dtype)
    three = [t.expand(3, *t.shape).clone() for t in (c, a, b)]
    calls: list[tuple[Any, str, tuple[Tensor, ...]]] = [
        (torch.mm, "", (a, b)),
        (torch.bmm, "", (three[1], three[2])),
        (torch.addmm, "addmm_", (c, a, b)),
        (torch.baddbmm, "baddbmm_", tuple(three)),
        (torch.addbmm, "addbmm_", (c, three[1], three[2])),
        (torch.addmv, "addmv_", (v, a, x)),
        (torch.mv, "", (a, x)),
        (torch.ops.aten._addmm_activation, "", (c, a, b)),
    ]
    for operator, in_place, args in calls:
        expected = fp32(operator, *args)
        out = torch.full(expected.shape, torch.nan, dtype=dtype)
        variant = operator.out if operator is torch.ops.aten._addmm_activation else operator
        assert variant(*args, out=out) is out
        assert_same(out, expected)
        assert_same(variant(*args, out=torch.empty(0, dtype=dtype)), expected)
        if in_place:
            target = args[0].clone()
            assert getattr(target, in_place)(*args[1:]) is target
            assert_same(target, expected)
    columns = torch.zeros(4, 6, dtype=dtype)
    torch.mm(a, b, out=columns.t())
    assert_same(columns.t(), fp32(torch.mm, a, b))


def test_what_beta_zero_ignores_may_be_nan() -> None:
    nan = torch.full((4,), torch.nan, dtype=FP16)
    a, b = matrix(3, 5, FP16), matrix(5, 4, FP16)
    assert_same(torch.addmm(nan, a, b, beta=0), fp32(torch.mm, a, b))


def test_sums_are_made_in_fp32_and_overflow_only_when_rounded() -> None:
    ones = torch.ones(1, 4097, dtype=FP16)
    assert (ones @ ones.t()).item() == 4096  # 4097 rounded; summed in FP16 it would stop at 2048
    large = torch.full((1, 4), 40000.0, dtype=FP16)
    signs = torch.tensor([[1.0], [1.0], [-1.0], [-0.5]], dtype=FP16)
    assert (large @ signs).item() == 20000  # 80000 on the way
    assert (large @ signs.abs()).item() == torch.inf


def test_errors_are_torchs_own() -> None:
    a, b = matrix(3, 5, FP16), matrix(5, 4, FP16)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.mm(a, a)
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.mm(a, b.float())
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.addmm(torch.zeros(4), a, b)
    with pytest.raises(RuntimeError, match="Expected out tensor to have dtype"):
        torch.mm(a, b, out=torch.empty(3, 4))
    with pytest.raises(RuntimeError, match="batch"):
        torch.bmm(a[None], b[None].expand(2, 5, 4))
    with pytest.raises(RuntimeError, match="shape"):
        torch.zeros(1, 4, dtype=FP16).addmm_(a, b)


# -- other dtypes, other devices, on and off


def samples(dtype: torch.dtype) -> list[Tensor]:
    """Results of every operator that is emulated, on the same numbers."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=generator).to(dtype)

    a, b, c = draw(9, 40), draw(40, 12), draw(12)
    results = [a @ b, torch.addmm(c, a, b), torch.bmm(a[None], b[None]), torch.baddbmm(c, a[None], b[None])]
    results += [a @ b[:, 0], torch.addmv(a[:, 0], a, b[:, 0]), torch.addbmm(c, a[None], b[None])]
    results += [torch.mm(a, b, out=torch.empty(9, 12, dtype=dtype)), c.expand(9, 12).clone().addmm_(a, b)]
    if dtype.is_floating_point:
        x, w = draw(2, 3, 9, 9).requires_grad_(), draw(4, 3, 3, 3).requires_grad_()
        y = F.conv2d(x, w)
        results += [y, *torch.autograd.grad(y.square().sum(), (x, w))]
        q = (draw(2, 2, 9, 8) / 8).requires_grad_()
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        results += [y, *torch.autograd.grad(y.square().sum(), q)]
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_other_dtypes_take_the_stock_kernels_with_the_same_bits(dtype: torch.dtype) -> None:
    emulated = samples(dtype)
    tensorcore.disable()
    for actual, expected in zip(emulated, samples(dtype), strict=True):
        assert_same(actual, expected)


def registered() -> bool:
    names = [name for emulations in tensorcore._EMULATIONS.values() for name in emulations]
    return any("tensorcore" in torch._C._dispatch_dump(f"aten::{name}") for name in names)


def test_disable_restores_torchs_kernels_and_enable_can_be_repeated() -> None:
    assert registered()
    assert tensorcore.enable(FP16, dict.fromkeys(KINDS, OWN))
    tensorcore.disable()
    assert not registered()
    assert not tensorcore.is_enabled(FP16)
    samples(FP16)
    assert tensorcore.enable(FP16, dict.fromkeys(KINDS, OWN))
    assert tensorcore.is_enabled(FP16)
    assert not tensorcore.is_enabled(BF16)
    a, b = matrix(30, 50, FP16), matrix(50, 20, FP16)
    assert_same(a @ b, fp32(torch.mm, a, b))


def test_what_is_chosen_from_torch_keeps_its_kernels() -> None:
    tensorcore.disable()
    assert tensorcore.enable(BF16, dict.fromkeys(KINDS, TORCH)) is False
    assert not registered()
    assert tensorcore.enable(torch.float32, dict.fromkeys(KINDS, OWN)) is False
    assert tensorcore.enable(FP16, {**dict.fromkeys(KINDS, TORCH), MATRIX: OWN}) is True
    assert (tensorcore.is_enabled(FP16), tensorcore.is_enabled(BF16)) == (True, False)
    assert tensorcore.in_use(FP16) == {**dict.fromkeys(KINDS, TORCH), MATRIX: OWN}
    assert tensorcore.in_use(BF16) == dict.fromkeys(KINDS, TORCH)


def test_a_torch_without_get_kernel_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorcore.disable()
    with monkeypatch.context() as context:
        context.delattr(torch.library, "get_kernel")
        with pytest.raises(RuntimeError, match=r"torch\.library\.get_kernel"):
            tensorcore.enable(FP16, dict.fromkeys(KINDS, OWN))
    assert not tensorcore.is_enabled(FP16)


def test_other_devices_never_reach_the_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorcore, "_stock", {})  # any emulated call would fail
    a, b = torch.empty(3, 5, dtype=FP16, device="meta"), torch.empty(5, 4, dtype=FP16, device="meta")
    assert torch.mm(a, b).device.type == "meta"
    assert F.conv1d(a[None], torch.empty(2, 3, 2, dtype=FP16, device="meta")).shape == (1, 2, 4)


# -- callers above and below Python


@both
def test_gradients_are_products_rounded_once(dtype: torch.dtype) -> None:
    x = matrix(12, 40, dtype).view(3, 4, 40).requires_grad_()
    linear = nn.Linear(40, 24).to(dtype)
    grad = matrix(12, 24, dtype)
    linear(x).backward(grad.view(3, 4, 24))
    flat = x.detach().view(12, 40)
    assert x.grad is not None
    assert_same(linear(x), fp32(torch.addmm, linear.bias, flat, linear.weight.t()).view(3, 4, 24))
    assert_same(x.grad.view(12, 40), fp32(torch.mm, grad, linear.weight))
    assert_same(linear.weight.grad, fp32(torch.mm, grad.t(), flat))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_same_bits_under_autocast(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).half()
    x = torch.randn(5, 32, requires_grad=True)

    def run(recompute: bool) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", FP16):
            y = checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x)
        y.float().square().sum().backward()
        return [y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain, again = run(False), run(True)
    assert len(plain) == len(again) == 5
    for actual, expected in zip(again, plain, strict=True):
        assert_same(actual, expected)


@both
def test_attention_is_the_fp32_kernel_rounded_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = (torch.randn(3, 2, 21, 16).to(dtype) for _ in range(4))
    keep = torch.rand(21, 21) > 0.3
    keep[:, 0] = True
    floats = torch.randn(3, 1, 21, 21)
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    masks = [None, keep, floats.to(dtype), floats[:1].to(dtype)]
    for limit in (tensorcore._LIMIT, 1500):  # whole, and in chunks of the batch
        monkeypatch.setattr(tensorcore, "_LIMIT", limit)
        for causal, mask in [(True, None), *((False, mask) for mask in masks)]:
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            y = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=causal, dropout_p=0.0)
            y.backward(grad)
            mask32 = mask
            if mask is not None:
                # A boolean mask becomes 0 and -inf above the kernel.
                mask32 = torch.zeros(21, 21).masked_fill(~mask, -torch.inf) if mask is keep else mask.float()
            wide = [x.float() for x in (q, k, v)]
            expected, logsumexp = forward(*wide, 0.0, causal, attn_mask=mask32)
            assert_same(y, expected.to(dtype))
            assert_same(forward(q, k, v, 0.0, causal, attn_mask=mask32)[1], logsumexp)  # which stays FP32
            args = (grad.float(), *wide, y.detach().float(), logsumexp, 0.0, causal)
            for leaf, expected in zip(leaves, backward(*args, attn_mask=mask32), strict=True):
                assert leaf.grad is not None
                assert_same(leaf.grad, expected.to(dtype))


CONVOLUTIONS: list[tuple[str, dict[str, Any]]] = [
    ("Conv", {}),
    ("Conv", {"stride": 2, "padding": 1, "bias": False}),
    ("Conv", {"groups": 4, "dilation": 2}),
    ("Conv", {"groups": 8, "padding": "same"}),
    ("ConvTranspose", {"stride": 2, "output_padding": 1}),
    ("ConvTranspose", {"groups": 4, "bias": False}),
]


@both
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_convolutions_are_the_fp32_kernels_rounded_once(dtype: torch.dtype, dimensions: int) -> None:
    x = torch.randn(2, 8, *[9, 8, 7][:dimensions]).to(dtype)
    for kind, options in CONVOLUTIONS:
        layer = getattr(nn, f"{kind}{dimensions}d")(8, 16, 3, **options).to(dtype)
        wide = copy.deepcopy(layer).float()
        leaf, wide_leaf = x.clone().requires_grad_(), x.float().requires_grad_()
        y, expected = layer(leaf), wide(wide_leaf)
        assert_same(y, expected.to(dtype))
        grad = torch.randn(y.shape).to(dtype)
        y.backward(grad)
        expected.backward(grad.float())
        for actual, reference in zip([leaf, *layer.parameters()], [wide_leaf, *wide.parameters()], strict=True):
            assert_same(actual.grad, reference.grad.to(dtype))
        before = layer.weight.grad.clone()
        layer.zero_grad()
        with torch.autocast("cpu", dtype):  # around the backward too, and for an input without a gradient
            layer(x).backward(grad)
        assert_same(layer.weight.grad, before)


class Call(nn.Module):
    """A function of its inputs and one parameter."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs, self.weight)


def layers() -> dict[str, tuple[nn.Module, tuple[Tensor, ...]]]:
    x = torch.randn(4, 10, 16)
    encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, activation="gelu")
    return {
        "LSTM": (nn.LSTM(16, 24, 2, bidirectional=True, batch_first=True), (x,)),
        "LSTM with projection": (nn.LSTM(16, 24, proj_size=8), (x,)),
        "GRU": (nn.GRU(16, 24), (x,)),
        "RNN": (nn.RNN(16, 24), (x,)),
        "LSTMCell": (nn.LSTMCell(16, 24), (x[0],)),
        "Bilinear": (nn.Bilinear(16, 16, 8), (x, x.flip(0))),
        "MultiheadAttention": (nn.MultiheadAttention(16, 4, batch_first=True), (x, x, x)),
        "TransformerEncoderLayer": (encoder, (x,)),
        "einsum": (Call(lambda a, w: torch.einsum("bij,jk->bik", a, w), 16, 8), (x,)),
        "broadcast matmul": (Call(torch.matmul, 5, 1, 16, 8), (x,)),
        "conv_tbc": (Call(lambda a, w: torch.conv_tbc(a, w, a.new_zeros(12)), 3, 16, 12), (x,)),
        "cdist": (Call(torch.cdist, 30, 16), (x.flatten(0, 1),)),
    }


@pytest.mark.parametrize("who", [OWN, TORCH])
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("name", layers())
def test_composite_layers_work_in_training_and_evaluation(name: str, autocast: bool, who: str) -> None:
    if who == TORCH:
        tensorcore.disable()
        tensorcore.enable(FP16, products.choose(FP16, products.flags(), torch.__version__, TORCH))
    layer, inputs = layers()[name]
    layer = layer.half()
    wide = copy.deepcopy(layer).float()
    if name == "LSTM" and autocast:  # FP32 inputs, which torch then hands to oneDNN in FP16
        pairs = [(x.half().float(), x.half().float()) for x in inputs]
    else:
        pairs = [(x.half(), x.half().float()) for x in inputs]

    def run(module: nn.Module, position: int, mixed: bool) -> Tensor:
        with torch.autocast("cpu", FP16, enabled=mixed):
            y = module(*(pair[position] for pair in pairs))
        while not isinstance(y, Tensor):
            y = y[0]
        return y

    y, expected = run(layer, 0, autocast), run(wide, 1, False)
    torch.testing.assert_close(y.float(), expected, atol=1e-2, rtol=1e-2)
    grad = torch.randn(y.shape)
    y.float().backward(grad)
    expected.backward(grad)
    for (parameter, p), q in zip(layer.named_parameters(), wide.parameters(), strict=True):
        assert p.grad is not None, parameter
        assert q.grad is not None
        error = (p.grad.float() - q.grad).abs().max() / (q.grad.abs().max() + 1e-6)
        assert error < 1e-2, (parameter, error)
    with torch.inference_mode():  # the fast paths, which are C++ throughout
        torch.testing.assert_close(run(layer.eval(), 0, autocast).float(), expected.detach(), atol=1e-2, rtol=1e-2)


def test_modes_transforms_and_threads_see_the_same_bits() -> None:
    a, b = matrix(5, 2048, FP16), matrix(1032, 2048, FP16).t()
    expected = fp32(torch.mm, a, b)
    with FlopCounterMode(display=False) as counter:
        assert_same(a @ b, expected)
    assert counter.get_total_flops() == 2 * 5 * 2048 * 1032
    with torch.inference_mode():
        assert_same(a @ b, expected)
    assert_same(torch.vmap(torch.mm, in_dims=(0, None))(a.expand(3, 5, 2048), b)[1], expected)
    assert_same(torch.func.jvp(lambda x: x @ b, (a,), (a,))[1], expected)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.extend(a @ b for _ in range(5))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 15
    for result in results:
        assert_same(result, expected)


# -- what cannot run in 16 bits


NEED_AUTOCAST: list[tuple[nn.Module, tuple[Tensor, ...]]] = [
    (nn.AvgPool3d(2), (torch.randn(1, 2, 4, 4, 4),)),
    (nn.LPPool3d(2, 2), (torch.randn(1, 2, 4, 4, 4),)),
    (nn.LocalResponseNorm(2), (torch.randn(1, 4, 4, 4),)),
    (nn.CTCLoss(), (torch.randn(9, 2, 5).log_softmax(-1), torch.ones(2, 3).long(), *torch.tensor([[9, 9], [3, 3]]))),
    (nn.MultiMarginLoss(), (torch.randn(4, 5), torch.tensor([0, 1, 2, 3]))),
    (nn.MultiLabelMarginLoss(), (torch.randn(2, 3), torch.tensor([[0, -1, 2], [1, 0, -1]]))),
]


@both
@pytest.mark.parametrize(("module", "args"), NEED_AUTOCAST, ids=lambda x: type(x).__name__)
def test_what_is_refused_without_autocast_fails_there_and_only_there(
    module: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    narrow = [x.to(dtype) if x.is_floating_point() else x for x in args]
    with pytest.raises(RuntimeError, match="not implemented for"):
        module(*narrow)
    with torch.autocast("cpu", dtype):
        assert module(*narrow).isfinite().all()
    assert module(*args).isfinite().all()  # which keep_fp32 makes of it
    model = nn.Sequential(nn.Linear(4, 4), module)
    (message,) = tensorcore.refusals(model, dtype=dtype, autocast=False)
    assert message.startswith(f"1 ({type(module).__name__}): torch has no {str(dtype)[6:]} kernel")
    assert message.endswith("keep_fp32=('1',)")
    assert tensorcore.refusals(model, dtype=dtype) == []


def test_rrelu_is_refused_by_name_in_fp16_and_works_in_bf16() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.RReLU()))
    for autocast in (False, True):
        with torch.autocast("cpu", FP16, enabled=autocast), pytest.raises(RuntimeError, match="not implemented for"):
            model.half()(torch.randn(2, 4).half())
    (message,) = tensorcore.refusals(model)
    assert message.startswith("1.0 (RReLU): torch has no float16 kernel")
    assert "keep_fp32=('1.0',)" in message
    assert tensorcore.refusals(model, ["1"]) == tensorcore.refusals(model, ["1.0"]) == []
    assert len(tensorcore.refusals(model, ["0", "1.00"])) == 1
    assert tensorcore.refusals(model, dtype=torch.float32, autocast=False) == []
    assert tensorcore.refusals(model, dtype=BF16) == []
    model.to(BF16)(torch.randn(2, 4, dtype=BF16)).sum().backward()
