"""Hazards of models: right, or refused by name; never a hang, and never another value."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import products_apart, same_on_all_ranks, sharded
from ranks import on_ranks
from test_step import assert_equal, expect, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardmp


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(20, 30, bias=False)
        self.other = nn.Linear(20, 30)
        self.other.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.embed(x), self.other.weight.t()) + self.other(x)[:, :20]


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.gelu(self.layer(x)))


class Checkpointed(nn.Module):
    """Non-reentrant activation checkpointing, of a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(20, 50), nn.GELU(), nn.LayerNorm(50), nn.Linear(50, 20))

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, x, use_reentrant=False)
        return x + checkpoint(self.block, x, use_reentrant=False)


class Odd(nn.Module):
    """Zero-size, 0-dim, frozen and unused parameters beside ordinary ones."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(0.75))
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2, 3))
        self.layer = nn.Linear(20, 20)
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.frozen(x)) * self.scalar + self.one + self.empty.sum()


class Convolves(nn.Module):
    """A convolution in channels_last, with BatchNorm's buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.out = nn.Conv2d(8, 4, 3, bias=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 4, 5).repeat(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.out(F.gelu(self.norm(self.conv(x)))).flatten(1)


class Detours(nn.Module):
    """Each rank takes another branch, and uses parts in another order (deepspeedai/DeepSpeed#2343, #7044)."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        way = int(x[0, 0].item())
        for index in [[0, 1, 2, 3], [3, 2, 1, 0], [2], [1, 3]][way % 4]:
            x = x + self.parts[index](x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "used twice": UsedTwice,
    "checkpointed": Checkpointed,
    "odd parameters": Odd,
    "channels_last": Convolves,
    "branches that differ between ranks": Detours,
}


def seeded(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(11)
        return MODELS[name]()

    return make


def losses(world_size: int, steps: int, backwards: int) -> list[Any]:
    def loss_for(step: int, backward: int, rank: int) -> Callable[[Any], Tensor]:
        x = torch.randn(4, 20, generator=torch.Generator().manual_seed(100 * step + 10 * backward + rank))
        x[0, 0] = float(rank + step)  # the way that Detours takes
        return lambda model: model(x).square().mean()

    return [[[loss_for(s, b, r) for r in range(world_size)] for b in range(backwards)] for s in range(steps)]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


@pytest.mark.parametrize(("stage", "products"), [(1, "own"), (2, "own"), (2, "torch")])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(1, 2, 3)
def test_models_equal_the_reference(world_size: int, name: str, stage: int, products: str) -> None:
    steps = losses(world_size, 3, 2)
    policy = shardmp.Precision(init_scale=256.0)
    import reference

    scale = reference.LossScale(init_scale=256.0)
    with products_apart(products):
        expected = expect(seeded(name), adam, steps, loss_scale=scale, max_grad_norm=1.0, fused=True)
        assert expected.skipped_steps == 0
        found = train(seeded(name), adam, steps, precision=policy, stage=stage, bucket_mb=0.001, max_grad_norm=1.0)
    assert_equal(found, expected)


@on_ranks(1, 2)
def test_odd_parameters_keep_shape_and_dtype() -> None:
    model, optimizer = sharded(seeded("odd parameters")())
    assert model.empty.shape == (0, 4)
    assert model.scalar.shape == ()
    assert model.scalar.dtype == torch.float16
    assert model.frozen.weight.dtype == torch.float32
    assert optimizer.master("empty").shape == (0, 4)
    assert optimizer.master("scalar").item() == 0.75


@on_ranks(2)
def test_tied_weights_stay_tied_and_are_counted_once() -> None:
    model, optimizer = sharded(seeded("tied")())
    assert model.other.weight is model.embed.weight
    assert optimizer._names == ["embed.weight", "other.bias"]


@on_ranks(1, 2)
def test_reentrant_checkpointing_with_reuse_is_refused_by_name() -> None:
    """pytorch/pytorch#81296: the hook comes twice, and what was reduced is not what was accumulated."""

    class Reentrant(Checkpointed):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.block, x.requires_grad_(), use_reentrant=True)
            return x + checkpoint(self.block, x, use_reentrant=True)

    model, optimizer = sharded(Reentrant())
    with pytest.raises(
        RuntimeError, match=r"block.\d.\w+ received a second gradient in one backward.*use_reentrant=False"
    ):
        optimizer.backward(model(torch.ones(2, 20)).mean())


@on_ranks(2)
def test_gradients_ready_in_another_order_give_the_same_bits(rank: int) -> None:
    finals = []
    for reverse in (False, True):
        torch.manual_seed(0)
        parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        model, optimizer = sharded(parts, torch.optim.AdamW, 0.01, bucket_mb=1e-4)
        order = list(range(4))
        if reverse and rank == 1:
            order.reverse()
        for _ in range(3):
            x = torch.ones(2, 16).half()
            heads = [parts[index](x).float().sum() for index in order]
            optimizer.backward(torch.stack(heads).sum() / 64)
            optimizer.step()
            optimizer.synchronize()
        finals.append([optimizer.master(name).clone() for name in optimizer._names])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


@on_ranks(1, 2)
def test_a_parameter_that_is_unfrozen_later_is_refused_and_one_frozen_later_is_left_alone() -> None:
    """deepspeedai/DeepSpeed#1767: it never trains, and nothing says so."""
    layers = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    layers["b"].requires_grad_(False)
    model, optimizer = sharded(layers)
    x = torch.ones(1, 4).half()
    optimizer.backward(layers["a"](x).float().mean())
    optimizer.step()
    layers["b"].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter b.weight was frozen when shard\(\) was called"):
        optimizer.backward(layers["a"](x).float().mean())
    layers["b"].requires_grad_(False)
    before = optimizer.master("a.bias").clone()
    layers["a"].bias.requires_grad_(False)
    optimizer.backward(layers["a"](x).float().mean())
    optimizer.step()
    assert torch.equal(optimizer.master("a.bias"), before)


@on_ranks(1, 2)
def test_buffers_keep_their_dtypes_and_follow_rank_0(rank: int) -> None:
    class Buffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("mean", torch.full((3,), float(rank)))
            self.register_buffer("ids", torch.tensor([2049 + rank]))
            self.register_buffer("mask", torch.tensor([rank == 0]))
            self.register_buffer("wide", torch.tensor(float(rank), dtype=torch.float64), persistent=False)
            self.register_buffer("empty", torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.mean += 1.0 + rank
            return self.layer(x) + self.mean.mean()

    for buffers in ("broadcast", "local"):
        model, optimizer = sharded(Buffers(), buffers=buffers)
        assert same_on_all_ranks(dict(model.named_buffers()))
        assert model.mean.tolist() == [0.0] * 3
        optimizer.backward(model(torch.ones(2, 4)).mean() if rank == 0 else None)
        expected = 1.0 if rank == 0 or buffers == "broadcast" else 0.0
        assert model.mean.tolist() == [expected] * 3
        assert (model.ids.dtype, model.mask.dtype, model.wide.dtype) == (torch.int64, torch.bool, torch.float64)
        assert model.ids.tolist() == [2049]


@on_ranks(2)
def test_ranks_that_start_from_different_weights_get_rank_0s_and_its_frozen_ones(rank: int) -> None:
    torch.manual_seed(rank)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False))
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = sharded(plain)
    assert torch.equal(optimizer.master("0.weight"), expected[0].weight)
    assert torch.equal(plain[1].weight, expected[1].weight)


@on_ranks(1, 2)
def test_masters_start_as_the_models_own_fp32_values_not_as_their_rounding() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(40, 40)
    weight = plain.weight.detach().clone()
    model, optimizer = sharded(plain)
    assert torch.equal(optimizer.master("weight"), weight)
    assert not torch.equal(weight, weight.half().float())
    assert torch.equal(model.weight, weight.half())


@on_ranks(1, 2)
def test_loading_weights_renews_the_masters_and_keeps_what_was_not_changed() -> None:
    """deepspeedai/DeepSpeed#762: the next step restores the old weights."""
    torch.manual_seed(0)
    model, optimizer = sharded(nn.Linear(4, 4), lr=0.0)
    before = optimizer.master("weight").clone()
    model.load_state_dict(model.state_dict())
    assert torch.equal(optimizer.master("weight"), before)  # its own rounding loses nothing
    model.load_state_dict({"weight": torch.full((4, 4), 0.3), "bias": torch.zeros(4)})
    optimizer.backward(model(torch.ones(1, 4)).mean())
    optimizer.step()
    assert torch.equal(optimizer.master("weight"), torch.full((4, 4), 0.3).half().float())
    assert torch.equal(model.weight, torch.full((4, 4), 0.3).half())


class Outputs(nn.Module):
    """Returns what models return."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, ids: Tensor, *, flag: bool = True) -> Any:
        self.seen = [x.dtype, ids.dtype]
        y = self.layer(x)
        return {"logits": y, "ids": ids, "more": [y, (y, None)], "flag": flag}


@on_ranks(1)
def test_floating_outputs_come_back_in_fp32_and_integers_are_never_cast() -> None:
    model, _ = sharded(Outputs())
    out = model(torch.ones(2, 4), torch.tensor([40001]), flag=False)
    assert out["logits"].dtype == torch.float32
    assert out["more"][1][0].dtype == torch.float32
    assert out["more"][1][1] is None
    assert out["ids"].item() == 40001
    assert out["flag"] is False
    assert model.module.seen == [torch.float32, torch.int64]
    model, _ = sharded(Outputs(), precision=shardmp.Precision(output="param", autocast=False))
    assert model(torch.ones(2, 4), torch.tensor([40001]))["logits"].dtype == torch.float16
    assert model.module.seen == [torch.float16, torch.int64]


@dataclasses.dataclass(frozen=True)
class Output:
    logits: Tensor
    ids: Tensor
    name: str


@on_ranks(1)
def test_an_output_that_is_a_frozen_dataclass_keeps_its_type() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Output:
            return Output(self.layer(x), torch.tensor([40001]), "out")

    model, _ = sharded(Model())
    out = model(torch.ones(2, 4))
    assert type(out) is Output
    assert (out.logits.dtype, out.ids.dtype, out.name) == (torch.float32, torch.int64, "out")


@on_ranks(1)
def test_norm_layers_compute_in_fp32_even_when_the_forward_raises() -> None:
    class Raises(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.layer = nn.Linear(4, 4)
            self.dtypes: list[torch.dtype] = []

        def forward(self, x: Tensor, fail: bool = False) -> Tensor:
            y = self.norm(self.layer(x))
            self.dtypes.append(y.dtype)
            if fail:
                self.norm(torch.ones(3))
            return self.layer(y)

    model, optimizer = sharded(Raises())
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 4), fail=True)
    assert not torch.is_autocast_enabled("cpu")
    model(torch.ones(2, 4))
    assert model.module.dtypes == [torch.float32, torch.float32]
    assert model.norm.weight.dtype == torch.float32
    # FP16's largest square is 255.9^2: in 16 bits this variance would be inf.
    big = model.module.norm(torch.tensor([[-30000.0, 30000.0, -30000.0, 30000.0]]).half())
    assert big.abs().allclose(torch.ones(4))


@on_ranks(1, 2)
def test_an_autocast_region_around_the_loop_never_keeps_old_weights() -> None:
    results = []
    for outer in (False, True):
        torch.manual_seed(0)
        policy = shardmp.Precision(keep_fp32=("weight",), init_scale=256.0)
        model, optimizer = sharded(nn.Linear(4, 4), lr=0.5, precision=policy)
        with torch.autocast(torch.empty(0).device.type, torch.float16, enabled=outer):
            for _ in range(3):
                optimizer.backward(model(torch.ones(2, 4)).square().mean())
                optimizer.step()
        results.append(optimizer.master("weight").clone())
    assert torch.equal(*results)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(20, 12, num_layers=2, batch_first=True)
        self.bilinear = nn.Bilinear(12, 12, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lstm(x.unsqueeze(0))[0].squeeze(0).float()
        return self.bilinear(y, y)


@pytest.mark.parametrize("products", ["own", "torch"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@on_ranks(1, 2)
def test_lstm_and_bilinear_train_as_they_do_in_fp32(precision: str, products: str) -> None:
    """With torch's products, too: what oneDNN lacks of an LSTM is ours."""
    finals = {}
    for used in ("fp32", precision):
        torch.manual_seed(0)
        with products_apart(products):
            model, optimizer = sharded(Recurrent(), torch.optim.SGD, 0.5, precision=used, bucket_mb=0.001)
            for step in range(4):
                x = torch.randn(5, 20, generator=torch.Generator().manual_seed(step))
                optimizer.backward((model(x) - 1).square().mean())
                assert not optimizer.step().skipped
            finals[used] = {name: optimizer.master(name).clone() for name in optimizer._names}
    for name, expected in finals["fp32"].items():
        assert torch.allclose(finals[precision][name], expected, atol=0.03), name
        assert not torch.equal(finals[precision][name], expected)


def test_modules_without_a_16_bit_kernel_are_refused_by_name_and_can_stay_fp32() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.RReLU())
    with pytest.raises(ValueError, match=r"1 \(RReLU\).*keep_fp32=\('1',\)"):
        sharded(model)
    model, optimizer = sharded(model, precision=shardmp.Precision(keep_fp32=("1",)))
    optimizer.backward(model(torch.ones(2, 4)).mean())
    assert not optimizer.step().skipped


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@on_ranks(1, 2)
def test_adaptive_softmax_takes_fp32_inputs_under_autocast(precision: str) -> None:
    class Softmax(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [4])

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.softmax(x, target).loss

    losses = {}
    for used in ("fp32", precision):
        torch.manual_seed(0)
        # Its loss is computed in 16 bits, so the default scale, beyond 65504, is inf from the first gradient on.
        policy = shardmp.Precision(init_scale=256.0) if used == "fp16" else used
        model, optimizer = sharded(Softmax(), torch.optim.SGD, 0.5, precision=policy)
        for _ in range(3):
            loss = model(torch.ones(6, 8), torch.arange(6) * 2)
            optimizer.backward(loss)
            assert not optimizer.step().skipped
        losses[used] = loss.item()
    assert losses[precision] == pytest.approx(losses["fp32"], rel=0.02)


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (5, 6)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(6), (5, 6, 4, 4)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(6), (5, 6, 2, 3, 2)),
    "without parameters": (lambda: nn.BatchNorm2d(6, affine=False), (5, 6, 4, 4)),
    "without statistics": (lambda: nn.BatchNorm2d(6, track_running_stats=False), (5, 6, 4, 4)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(6, affine=True), (5, 6, 4, 4)),
}


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_computes_in_fp32_from_and_to_16_bits(name: str, precision: str) -> None:
    """As under torch's autocast: a cast input would be kept for backward in 4 bytes an element, for the same numbers."""
    make, shape = NORMS[name]
    torch.manual_seed(5)
    norm = nn.Sequential(nn.Identity(), make())
    extra = nn.Linear(2, 2)  # something that trains
    plain = copy.deepcopy(norm[1])
    model, _ = sharded(nn.ModuleDict({"norm": norm, "extra": extra}), precision=precision)
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    eps = torch.finfo(dtype).eps
    x = (3.0 * torch.randn(shape) + 200.0).to(dtype)  # squares beyond FP16
    for training in (True, False):
        ours, wide = x.clone().requires_grad_(), x.float().requires_grad_()
        kept = model.module["norm"][1].train(training)
        got, expected = kept(ours), plain.train(training)(wide)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=eps, atol=1e-4)
        weight = torch.randn(shape).to(dtype)
        (gradient,) = torch.autograd.grad(got, ours, weight)
        (wide_gradient,) = torch.autograd.grad(expected, wide, weight.float())
        torch.testing.assert_close(gradient.float(), wide_gradient, rtol=eps, atol=1e-4)
    for ours, theirs in zip(kept.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0.0)
