"""Real cases of sharding and of gradient accumulation: what users of such libraries ran into, each with its source.

Every test asserts on every rank: many of these show on one rank only. Numbers are powers of two or small fractions, so
`==` is meant unless a tolerance is written.
"""

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_tools import STAGES, Weights, fp16, one_step, states, value
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import shardmp


class Uneven(nn.Module):
    """Parameters whose sizes no world size divides; element i (counted from 1) of the first three gets c * i / 16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(5))
        self.second = nn.Parameter(torch.ones(2, 3))
        self.third = nn.Parameter(torch.ones(7))
        self.alone = nn.Parameter(torch.ones(1))

    def forward(self, c: float) -> Tensor:
        ones = torch.cat([self.first, self.second.view(-1), self.third]).float()
        return c * ((ones * torch.arange(1, 19) / 16).sum() + self.alone.float().sum())


@STAGES
@on_ranks(4)
def test_c18_sizes_not_divisible_by_the_world_deepspeed_1380(rank: int, stage: int) -> None:
    """deepspeedai/DeepSpeed#1380, deepspeedai/DeepSpeed#6974, deepspeedai/DeepSpeed#129: padding leaked into values."""
    model = Uneven()
    groups = [{"params": [model.first, model.second, model.third]}, {"params": [model.alone], "lr": 2.0**-4}]
    plain = SGD(groups, lr=2.0**-4, momentum=0.5)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(1024.0), stage=stage)
    norms = [one_step(model, optimizer, c=sign * (rank + 1.0)).grad_norm for sign in (1.0, 1.0, -1.0)]
    assert norms[0] == pytest.approx(math.sqrt(6.25 * 2109 / 256 + 6.25), rel=1e-6)  # 7.59864
    masters = {name: optimizer.master(name) for name in ("first", "second", "third", "alone")}
    assert [tuple(master.shape) for master in masters.values()] == [(5,), (2, 3), (7,), (1,)]
    values = torch.cat([masters[name].view(-1) for name in ("first", "second", "third")])
    assert values.tolist() == [1 - i * 45 / 2048 for i in range(1, 19)]
    assert masters["alone"].tolist() == [0.6484375]


@STAGES
@on_ranks(4)
def test_c18_ranks_that_hold_only_padding_deepspeed_6659(rank: int, stage: int) -> None:
    """deepspeedai/DeepSpeed#6659: five elements on four ranks; a rank with nothing but padding crashed."""
    model = Weights(w=5)
    plain = SGD(model.parameters(), lr=2.0**-4, momentum=0.5)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(1024.0), stage=stage, max_grad_norm=100.0)
    for sign in (1.0, 1.0, -1.0):
        report = one_step(model, optimizer, w=sign * (rank + 1.0))
        assert report.grad_norm == pytest.approx(2.5 * math.sqrt(5), rel=1e-6)
    assert optimizer.master("w").tolist() == [0.6484375] * 5
    assert len(states(optimizer)) == (1 if rank == 0 else 0)


class Adapted(nn.Module):
    """A frozen FP16 base with FP32 adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(0.5 * torch.eye(4, dtype=torch.float16), requires_grad=False)
        self.A = nn.Parameter(torch.ones(1, 4))
        self.B = nn.Parameter(torch.zeros(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.base @ x.half()).float() + self.B @ (self.A @ x)


@STAGES
@pytest.mark.parametrize("decay", [0.0, 0.1])
@on_ranks(2)
def test_c20_frozen_base_with_fp32_adapters_deepspeed_2615(stage: int, decay: float) -> None:
    """deepspeedai/DeepSpeed#2615, deepspeedai/DeepSpeed#8113, huggingface/peft#1249, deepspeedai/DeepSpeed#4055."""
    plain = Adapted()
    base = plain.base
    policy = fp16(1024.0, keep_fp32=("A", "B"))
    sgd = SGD(plain.parameters(), lr=0.125, weight_decay=decay)
    model, optimizer = shardmp.shard(plain, sgd, precision=policy, stage=stage)
    optimizer.backward(model(torch.ones(4)).sum())
    assert not optimizer.step().skipped
    found = dict(model.named_parameters())
    assert found["base"] is base
    assert base.grad is None
    assert torch.equal(base, 0.5 * torch.eye(4, dtype=torch.float16))
    assert [found[name].dtype for name in ("base", "A", "B")] == [torch.float16, torch.float32, torch.float32]
    assert found["B"].tolist() == [[-0.5]] * 4
    torch.testing.assert_close(found["A"].data, torch.full((1, 4), 1 - 0.125 * decay), rtol=0, atol=1e-7)
    with pytest.raises(KeyError, match="base"):  # eight elements have masters, sixteen have none
        optimizer.master("base")
    assert torch.equal(optimizer.master("A"), found["A"])
    assert torch.equal(optimizer.master("B"), found["B"])


@STAGES
@on_ranks(2)
def test_c21_unfreezing_later_is_refused_by_name_deepspeed_1767(stage: int) -> None:
    """deepspeedai/DeepSpeed#1767, deepspeedai/DeepSpeed#5341: a parameter unfrozen after wrapping never trained."""
    model = Weights(a=4, b=4)
    plain_b = model.b.requires_grad_(False)
    sgd = SGD(model.parameters(), lr=0.125)
    model, optimizer = shardmp.shard(model, sgd, precision=fp16(1024.0), stage=stage)
    one_step(model, optimizer, a=1.0, b=4.0)
    assert value(model, "a") == [0.875] * 4
    assert value(model, "b") == [1.0] * 4
    plain_b.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter b was frozen .* has been unfrozen"):
        one_step(model, optimizer, a=1.0, b=4.0)


@STAGES
@on_ranks(2)
def test_c21_add_param_group_is_refused_pytorch_46750(stage: int) -> None:
    """pytorch/pytorch#46750: a group that was added after sharding did not train."""
    model = Weights(a=4, b=4)
    plain_b = model.b.requires_grad_(False)
    model, optimizer = shardmp.shard(model, SGD([model.a], lr=0.125), precision=fp16(1024.0), stage=stage)
    one_step(model, optimizer, a=1.0)
    plain_b.requires_grad_(True)
    with pytest.raises(NotImplementedError, match="add_param_group"):
        optimizer.add_param_group({"params": [plain_b]})


class Tied(nn.Module):
    """An embedding whose weight is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        nn.init.ones_(self.emb.weight)
        self.head.weight = self.emb.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.emb(index)).float().sum()


@STAGES
@pytest.mark.parametrize("clip", [False, True])
@on_ranks(2)
def test_c22_tied_weights_count_once_megatron_7228(stage: int, clip: bool) -> None:
    """NVIDIA/Megatron-LM#7228, deepspeedai/DeepSpeed#8376, deepspeedai/DeepSpeed#684: norm too large by sqrt(2)."""
    plain = Tied()
    sgd = SGD(plain.parameters(), lr=1.0 if clip else 2.0**-4)
    limit = 1.0 if clip else None
    model, optimizer = shardmp.shard(plain, sgd, precision=fp16(1024.0), stage=stage, max_grad_norm=limit)
    report = one_step(model, optimizer, index=torch.tensor([0]))
    assert report.grad_norm == pytest.approx(math.sqrt(56), rel=1e-6)
    assert model.head.weight is model.emb.weight
    assert [name for name, _ in model.named_parameters()] == ["emb.weight"]
    with pytest.raises(KeyError, match=r"head\.weight"):  # one entry in the sharded state
        optimizer.master("head.weight")
    gradient = torch.tensor([[5.0] * 2] + [[1.0] * 2] * 3)
    if clip:
        right = 1 - gradient / math.sqrt(56)
        torch.testing.assert_close(optimizer.master("emb.weight"), right, rtol=0, atol=1e-6)
        assert torch.equal(model.emb.weight, optimizer.master("emb.weight").half())
    else:
        assert value(model, "emb.weight") == [[0.6875] * 2] + [[0.9375] * 2] * 3


@STAGES
@on_ranks(2)
def test_c24_each_rank_takes_another_branch_deepspeed_5070(rank: int, stage: int) -> None:
    """deepspeedai/DeepSpeed#5070, deepspeedai/DeepSpeed#5008, pytorch/pytorch#174862: hung, or mixed gradients up."""
    model = Weights(a=4, b=4)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.25), precision=fp16(1024.0), stage=stage)
    one_step(model, optimizer, **({"b": 4.0} if rank else {"a": 1.0}))
    assert value(model, "a") == [0.875] * 4
    assert value(model, "b") == [0.5] * 4


@STAGES
@pytest.mark.parametrize("foreach", [None, True])
@on_ranks(2)
def test_c26_unused_parameter_is_not_decayed_deepspeed_1355(stage: int, foreach: bool | None) -> None:
    """deepspeedai/DeepSpeed#1355: the flat buffer's zeros were taken for a gradient."""

    def adamw(model: nn.Module) -> AdamW:
        return AdamW(model.parameters(), lr=0.125, weight_decay=0.5, foreach=foreach)

    plain = Weights(a=4, b=4)
    reference = adamw(plain)
    model = Weights(a=4, b=4)
    model, optimizer = shardmp.shard(model, adamw(model), precision=fp16(1024.0), stage=stage)
    for step, name in enumerate(["a", "b", "a", "b", "a"]):
        one_step(model, optimizer, **{name: 1.0})
        plain(**{name: 1.0}).backward()
        reference.step()
        reference.zero_grad()
        if step == 0:
            assert value(model, "a") == [0.8125] * 4
            assert optimizer.master("b").tolist() == [1.0] * 4
            assert sum(int(state["step"]) for state in states(optimizer)) == (1 if dist.get_rank() == 0 else 0)
        for key, p in plain.named_parameters():
            torch.testing.assert_close(optimizer.master(key), p.data, rtol=0, atol=1e-6)


class Reordered(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        for number, name in enumerate(names):
            self.register_parameter(name, nn.Parameter(torch.full((4,), 1.0 + number)))


@STAGES
@pytest.mark.parametrize(
    ("on_rank_1", "said"),
    [(["b", "a"], r"parameter a.*parameter b"), (["a", "b", "c"], "parameters: 2.*parameters: 3")],
)
@on_ranks(2)
def test_c28_another_order_on_another_rank_deepspeed_7525(
    rank: int, stage: int, on_rank_1: list[str], said: str
) -> None:
    """deepspeedai/DeepSpeed#7525, pytorch/pytorch#73547: equal shapes in another order were mixed in silence."""
    model = Reordered(on_rank_1 if rank else ["a", "b"])
    start = time.monotonic()
    with pytest.raises(ValueError, match=said):
        shardmp.shard(model, SGD(model.parameters(), lr=0.1), stage=stage)
    assert time.monotonic() - start < 10


@STAGES
@on_ranks(2)
def test_c29_different_start_on_each_rank_torchtitan_166(rank: int, stage: int) -> None:
    """pytorch/torchtitan#166, pytorch/torchtitan#1777, deepspeedai/DeepSpeed#253, facebookresearch/detr#544."""
    model = Weights(w=4)
    nn.init.constant_(model.w, 1.0 + rank)
    model.register_buffer("b", torch.full((2,), 1.0 + rank))
    model.register_buffer("hidden", torch.full((2,), 1.0 + rank), persistent=False)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.1), stage=stage)
    assert value(model) == [1.0] * 4
    assert optimizer.master("w").tolist() == [1.0] * 4
    assert {name: buffer.tolist() for name, buffer in model.named_buffers()} == {"b": [1.0] * 2, "hidden": [1.0] * 2}


class Mixed(nn.Module):
    """Parameters of several dtypes; i is an integer one."""

    def __init__(self, **dtypes: torch.dtype) -> None:
        super().__init__()
        for name, dtype in dtypes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(3, dtype=dtype)))
        self.i = nn.Parameter(torch.tensor([40001]), requires_grad=False)

    def forward(self) -> Tensor:
        assert self.i.dtype == torch.int64
        return self.ln.float().sum() + 2 * self.l.float().sum()


@STAGES
@on_ranks(2)
def test_c31_integer_and_mixed_parameters_keep_their_dtype_deepspeed_183(stage: int) -> None:
    """deepspeedai/DeepSpeed#183: one flat buffer of one dtype."""
    model = Mixed(ln=torch.float32, l=torch.float16)
    policy = fp16(1024.0, keep_fp32=("ln",))
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.125), precision=policy, stage=stage)
    one_step(model, optimizer)
    assert value(model, "ln") == [0.875] * 3
    assert value(model, "l") == [0.75] * 3
    found = dict(model.named_parameters())
    assert [found[name].dtype for name in ("ln", "l", "i")] == [torch.float32, torch.float16, torch.int64]
    assert found["i"].tolist() == [40001]


@STAGES
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@on_ranks(2)
def test_c31_fp64_and_complex_are_refused_by_name_pytorch_59972(stage: int, dtype: torch.dtype) -> None:
    """deepspeedai/DeepSpeed#4689, pytorch/pytorch#59972: FP64 became FP16; complex failed deep inside step."""
    model = Mixed(ln=torch.float32, l=torch.float16, d=dtype)
    with pytest.raises(TypeError, match=f"parameter d is {dtype}"):
        shardmp.shard(model, SGD(model.parameters(), lr=0.125), stage=stage)
    assert model.d.dtype == dtype
    assert model.i.tolist() == [40001]


class LayerWise(Optimizer):
    """LAMB-like: p -= lr * g * |p| / |g|, with the norms of the whole parameter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad * p.norm() / p.grad.norm())


@STAGES
@on_ranks(2)
def test_c32_optimizers_of_whole_parameters_are_refused_muon_45(stage: int) -> None:
    """KellerJordan/Muon#45, pytorch/pytorch#109581, MoonshotAI/Moonlight#27: norms of arbitrary pieces, in silence."""
    model = Weights(a=2, b=6)
    with pytest.raises(TypeError, match=r"LayerWise .* needs whole parameters"):
        shardmp.shard(model, LayerWise(model.parameters(), lr=0.125), stage=stage)


# --------------------------------------------------------------------------------------------------------------------
# Gradient accumulation


@STAGES
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("torch_way", [False, True])
@on_ranks(2)
def test_c33_several_backwards_add_up_open_instruct_1498(stage: int, no_sync: bool, torch_way: bool) -> None:
    """allenai/open-instruct#1498, deepspeedai/DeepSpeed#6793, huggingface/accelerate#3481: the last one alone counted."""
    model = Weights(w=4)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.125), precision=fp16(1024.0), stage=stage)

    def backward(x: float) -> None:
        if torch_way:
            optimizer.scale(model(w=x)).backward()
        else:
            optimizer.backward(model(w=x))

    if no_sync:
        with model.no_sync():
            backward(1.0)
    else:
        backward(1.0)
    backward(2.0)
    assert optimizer.full_grad("w").tolist() == [3.0] * 4
    optimizer.step()
    assert value(model) == [0.625] * 4
