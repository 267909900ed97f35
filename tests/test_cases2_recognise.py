"""Real cases D02 to D30 of what `shard()` takes over: recognised again afterwards, or refused by name on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.multiprocessing
from case_tools import STAGES, Weights, fp16, one_step, value
from helpers import equal, masters, same_on_all_ranks, sharded
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import shardmp

# --------------------------------------------------------------------------------------------------------------------
# D02: a gradient of another dtype than its bucket's


class Matrix(nn.Module):
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size, size, dtype=dtype))

    def forward(self, x: float) -> Tensor:
        return (self.w.float() * x).sum()


@STAGES
@pytest.mark.parametrize("size", [4, 1024])  # copied into the send buffer, and sent from where autograd left it
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_ranks(1, 2, 3)
def test_d02_a_gradient_of_another_dtype_is_converted_pytorch_172074(
    rank: int, world_size: int, stage: int, size: int, dtype: torch.dtype
) -> None:
    """pytorch/pytorch#172074: `grad_dtype` lets autograd leave an FP32 gradient on a 16-bit parameter."""
    model = Matrix(size, dtype)
    model.w.grad_dtype = torch.float32
    precision: Any = fp16(16.0) if dtype == torch.float16 else "bf16"
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=1.0), precision=precision, stage=stage)
    optimizer.backward(model(0.5 * (1 + rank)))
    assert not optimizer.step().skipped
    expected = 1 - 0.5 * sum(range(1, world_size + 1)) / world_size
    assert torch.equal(optimizer.master("w"), torch.full((size, size), expected))


@on_ranks(1, 2)
def test_d02_a_16_bit_gradient_of_an_fp32_parameter_is_converted(rank: int) -> None:
    model = Matrix(600, torch.float32)
    model.w.grad_dtype = torch.float16
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=1.0), precision="fp32")
    optimizer.backward((model.w.half() * 0.5).float().sum() if rank else model(0.5))
    optimizer.step()
    assert torch.equal(optimizer.master("w"), torch.full((600, 600), 0.5))


@on_ranks(1, 2)
def test_d02_an_fp32_gradient_that_fp16_cannot_hold_is_an_overflow_under_no_sync_too(rank: int) -> None:
    model = Matrix(4, torch.float16)
    model.w.grad_dtype = torch.float32
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=1.0), precision=fp16(16.0), stage=1)
    with model.no_sync():
        optimizer.backward(model(8192.0))
    optimizer.backward(model(0.0))
    report = optimizer.step()
    assert report.skipped
    assert report.overflow.parameters == ("w",)
    assert value(model) == [[1.0] * 4] * 4


# --------------------------------------------------------------------------------------------------------------------
# D03: gradients from before shard()


def with_stale_gradient(size: int) -> tuple[Matrix, SGD]:
    model = Matrix(size, torch.float32)
    model(1.0).backward()
    return model, SGD(model.parameters(), lr=2.0**-4)


ZEROS: dict[str, Callable[[Any, Any, Any], None]] = {
    "model": lambda model, optimizer, plain: model.zero_grad(),
    "optimizer": lambda model, optimizer, plain: optimizer.zero_grad(),
    "plain optimizer": lambda model, optimizer, plain: plain.zero_grad(),
}


@STAGES
@on_ranks(1, 2, 3)
def test_d03_zero_grad_drops_a_gradient_from_before_shard(stage: int) -> None:
    for drop in ZEROS.values():
        for size in (4, 600):
            model, plain = with_stale_gradient(size)
            model, optimizer = shardmp.shard(model, plain, precision=fp16(16.0), stage=stage)
            drop(model, optimizer, plain)
            optimizer.backward(model(1.0))
            assert not optimizer.step().skipped
            assert torch.equal(optimizer.master("w"), torch.full((size, size), 0.9375))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@on_ranks(1, 2, 3)
def test_d03_without_zero_grad_the_first_backward_names_the_parameter(precision: str) -> None:
    """And nothing is spoilt: after a `zero_grad` the same program goes on."""
    model, plain = with_stale_gradient(4)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(16.0) if precision == "fp16" else precision)
    with pytest.raises(RuntimeError, match=r"parameter w had a \.grad before shard\(\).*optimizer.zero_grad\(\)"):
        optimizer.backward(model(1.0)) if precision == "fp16" else model(1.0).backward()
    with pytest.raises(RuntimeError, match=r"parameter w had a \.grad before shard"):
        optimizer.backward(None)
    optimizer.zero_grad()
    one_step(model, optimizer, x=1.0)
    assert value(model) == [[0.9375] * 4] * 4


@pytest.mark.parametrize("when", ["before backward", "before step"])
@on_ranks(1, 2)
def test_d03_a_gradient_written_by_hand_is_refused_by_name(when: str) -> None:
    """Before a backward it would be counted with the loss scale, and before a step not at all."""
    model, optimizer = sharded(Matrix(4, torch.float32), lr=2.0**-4, precision=fp16(16.0))
    if when == "before step":
        optimizer.backward(model(1.0))
    model.w.grad = torch.ones_like(model.w)
    with pytest.raises(
        RuntimeError, match=r"parameter w has a \.grad that no backward of shardmp has left there.*zero_grad"
    ):
        optimizer.step() if when == "before step" else optimizer.backward(model(1.0))
    optimizer.zero_grad()
    one_step(model, optimizer, x=1.0)
    assert value(model) == [[0.9375] * 4] * 4


# --------------------------------------------------------------------------------------------------------------------
# D05, D06: modules and ties


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head, self.norm = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.LayerNorm(4)
        self.head.weight = self.emb.weight
        self.loss: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.head(self.norm(self.emb(x))).float()
        extra = self.extra(torch.ones(2)).sum() if hasattr(self, "extra") else 0.0
        return self.loss(out).square().mean() + extra


TOKENS = torch.arange(8)


def larger_embedding(model: Any) -> None:
    model.emb = nn.Embedding(16, 4)


def new_head(model: Any) -> None:
    model.head = nn.Linear(4, 8, bias=False)


def added(model: Any) -> None:
    model.extra = nn.Linear(2, 2)


def own_alias(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(8, 4))


def frozen_alias(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.ones(8, 4), requires_grad=False)


def alias_through_data(model: Any) -> None:
    model.head.weight.data = model.emb.weight.data.clone()


def added_parameter(model: Any) -> None:
    model.temperature = nn.Parameter(torch.ones(()))


def vector(model: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()).clone(), model.parameters())


def old_weight_norm(model: Any) -> None:
    nn.utils.parametrizations.weight_norm(model.norm)


CHANGES: dict[Callable[[Any], None], str] = {
    larger_embedding: r"parameter emb.weight of shape \(16, 4\) is not the one of shape \(8, 4\) that shard\(\) took over",
    new_head: r"parameter head.weight of shape \(8, 4\) is not the one",
    added: r"parameter extra.weight of shape \(2, 2\) was added after shard\(\).*freeze it",
    added_parameter: r"parameter temperature of shape \(\) was added after shard\(\)",
    own_alias: r"parameter head.weight was taken out of its bucket",
    frozen_alias: r"parameter head.weight was taken out of its bucket",
    alias_through_data: r"parameter emb.weight was taken out of its bucket",
    vector: r"parameter emb.weight was taken out of its bucket",
    old_weight_norm: r"parameter norm.weight was taken out of its bucket.*parametrised",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_ranks(1, 2, 3)
def test_d05_d06_a_changed_model_is_refused_by_name_before_anything_moves(change: Callable[[Any], None]) -> None:
    """huggingface/accelerate#2211, facebookresearch/lingua#75, NVIDIA-NeMo/RL#227: weights that never move, in silence."""
    for stage, through in ((1, "wrapper"), (2, "plain model")):
        plain = Tied()
        model, optimizer = sharded(plain, precision=fp16(16.0), stage=stage)
        optimizer.backward(model(TOKENS))
        optimizer.step()
        before = masters(optimizer)
        change(model if through == "wrapper" else plain)
        optimizer.backward(model(TOKENS))
        with pytest.raises(RuntimeError, match=CHANGES[change]):
            optimizer.step()
        assert equal(before, masters(optimizer))


def swapped(model: Any) -> None:
    model[0], model[1] = model[1], model[0]


@on_ranks(1, 2)
def test_d05_entries_of_a_sequential_that_change_places_are_refused_by_name() -> None:
    """The names in checkpoints would be those of before, and the model's of afterwards."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = sharded(plain, precision=fp16(16.0))
    swapped(plain)
    optimizer.backward(model(torch.ones(4)).sum())
    with pytest.raises(RuntimeError, match=r"parameter 0.weight .*is not the one .*that shard\(\) took over"):
        optimizer.step()


def other_loss(model: Any) -> None:
    model.loss = nn.Tanh()


def frozen_part(model: Any) -> None:
    model.extra = nn.Linear(2, 2).requires_grad_(False)


def no_norm(model: Any) -> None:
    model.norm = nn.Identity()


@pytest.mark.parametrize("change", [other_loss, frozen_part, no_norm])
@on_ranks(1, 2)
def test_d05_a_change_that_concerns_no_trainable_parameter_acts_as_in_torch(change: Callable[[Any], None]) -> None:
    torch.manual_seed(3)
    plain = Tied()
    model, optimizer = sharded(plain, lr=0.5, precision="fp32", momentum=0.5)
    torch.manual_seed(3)
    twin = Tied()
    steps = SGD(twin.parameters(), lr=0.5, momentum=0.5)
    for step in range(3):
        if step == 1:
            for either in (model, twin):
                torch.manual_seed(4)
                change(either)
        optimizer.backward(model(TOKENS))
        optimizer.step()
        steps.zero_grad()
        twin(TOKENS).backward()
        steps.step()
    assert torch.allclose(optimizer.master("emb.weight"), twin.emb.weight, rtol=1e-5, atol=1e-6)
    assert not torch.equal(optimizer.master("emb.weight"), Tied().emb.weight)


@on_ranks(1, 2, 3)
def test_d06_what_is_tied_through_data_before_shard_is_refused_by_both_names() -> None:
    """In plain torch both are one memory; in buckets they would part in the first step."""
    words = r"head.weight|emb.weight.* share memory and are two tensors.*one nn.Parameter"
    for tie in (lambda w: w.data, lambda w: w.data.t(), lambda w: w.data[:4]):
        model = nn.ModuleDict({"emb": nn.Embedding(8, 8), "head": nn.Linear(8, 8)})
        model["head"].weight.data = tie(model["emb"].weight)
        with pytest.raises(TypeError, match=words):
            sharded(model)
    model = nn.Linear(4, 4)
    model.register_buffer("seen", model.weight.detach()[0])
    with pytest.raises(TypeError, match="weight and seen share memory"):
        sharded(model)


@on_ranks(1, 2)
def test_d06_parameters_that_lie_in_one_storage_side_by_side_are_taken() -> None:
    flat = torch.ones(64)
    model = Weights(a=16, b=16)
    model.a.data, model.b.data = flat.view(32, 2)[:16, 0], flat.view(32, 2)[:16, 1]
    model, optimizer = sharded(model, precision=fp16(16.0), lr=0.5)
    one_step(model, optimizer, a=torch.ones(16), b=torch.ones(16))
    assert value(model, "a") == value(model, "b") == [0.5] * 16


# --------------------------------------------------------------------------------------------------------------------
# D07: buffers, and graphs that wait for their backward


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]))
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x)).float() * self.mask
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)  # as an average is kept out of place
        return (x * self.mean).square().mean()


def noise(step: int, number: int, rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank))


def two_forwards(model: Any, backward: Any, step: int, rank: int) -> None:
    losses = [model(noise(step, number, rank)) for number in range(2)]
    for loss in losses:
        backward(loss)


def two_backwards(model: Any, backward: Any, step: int, rank: int) -> None:
    loss = model(noise(step, 0, rank))
    backward(loss, retain_graph=True)
    backward(loss)


@STAGES
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("backwards", [two_forwards, two_backwards])
@on_ranks(1, 2, 3)
def test_d07_graphs_that_wait_keep_the_buffers_that_they_were_made_with(
    rank: int, world_size: int, stage: int, train: bool, backwards: Any
) -> None:
    """pytorch/pytorch#22095, #175024, #65907: and a buffer that differs on rank 1 changes no gradient of rank 1's."""
    model, optimizer = sharded(Critic().train(train), lr=0.125, precision="fp32", stage=stage)
    twins = [Critic().train(train) for _ in range(world_size)]
    for step in range(2):
        backwards(model, optimizer.backward, step, rank)
        optimizer.step()
        for number, twin in enumerate(twins):
            twin.zero_grad()
            backwards(twin, lambda loss, **options: loss.backward(**options), step, number)
        with torch.no_grad():
            for ps in zip(*(twin.parameters() for twin in twins), strict=True):
                mean = torch.stack([p.grad for p in ps]).mean(0)
                for p in ps:
                    p.sub_(0.125 * mean)
        for twin in twins[1:]:  # rank 0's buffers are everybody's
            for buffer, first in zip(twin.buffers(), twins[0].buffers(), strict=True):
                buffer.data = first.clone()
    for name, p in twins[0].named_parameters():
        assert torch.allclose(optimizer.master(name), p, rtol=1e-5, atol=1e-6), name
    assert same_on_all_ranks(dict(model.named_buffers()))
    for name, buffer in twins[0].named_buffers():
        assert torch.allclose(dict(model.named_buffers())[name].float(), buffer.float(), rtol=1e-5, atol=1e-6), name


@on_ranks(2, 3)
def test_d07_a_buffer_that_no_graph_keeps_is_written_where_it_lies(rank: int) -> None:
    """What else refers to it goes on seeing it: views that the model holds, and who asked for it before."""
    plain = nn.BatchNorm1d(4)
    plain.first = plain.running_mean[:2]
    model, optimizer = sharded(plain, precision="fp32")
    held = plain.running_mean
    for _ in range(2):
        optimizer.backward(model(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))).sum())
        optimizer.step()
        assert plain.running_mean is held
        assert torch.equal(plain.first, held[:2])
    assert same_on_all_ranks(held)


# --------------------------------------------------------------------------------------------------------------------
# D12: the plain optimizer afterwards, and its groups


@STAGES
@on_ranks(1, 2, 3)
def test_d12_the_plain_optimizers_other_methods_act_or_raise_by_name(stage: int) -> None:
    """EleutherAI/gpt-neox#1029: an empty state, a schedule cut off, nothing dropped, an error in mid-step."""
    model = Weights(w=4)
    plain = SGD(model.parameters(), lr=0.25)
    saved = plain.state_dict()
    model, optimizer = shardmp.shard(model, plain, precision=fp16(16.0), stage=stage)
    with pytest.raises(NotImplementedError, match=r"plain optimizer's state_dict\(\).*shardmp.save"):
        plain.state_dict()
    with pytest.raises(NotImplementedError, match=r"plain optimizer's load_state_dict\(\).*shardmp.load"):
        plain.load_state_dict(saved)
    with pytest.raises(NotImplementedError, match=r"plain optimizer's add_param_group\(\) after shard\(\)"):
        plain.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(RuntimeError, match="step the ShardedOptimizer"):
        plain.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with pytest.raises(RuntimeError, match="step the ShardedOptimizer"):
        scaler.step(plain)
    optimizer.backward(model(w=torch.full((4,), 0.5)))
    plain.zero_grad()
    optimizer.backward(model(w=torch.ones(4)))
    optimizer.step()
    assert value(model) == [0.75] * 4


@on_ranks(1, 2)
def test_d12_a_schedule_on_the_plain_optimizer_still_acts() -> None:
    model = Weights(w=4)
    plain = SGD(model.parameters(), lr=0.5)
    schedule = LambdaLR(plain, lambda step: 2.0**-step)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(16.0))
    for _ in range(2):
        one_step(model, optimizer, w=torch.ones(4))
        schedule.step()
    assert value(model) == [0.25] * 4


def append(groups: list[dict[str, Any]]) -> None:
    groups.append({**groups[0], "params": [nn.Parameter(torch.ones(2))]})


def remove(groups: list[dict[str, Any]]) -> None:
    del groups[1]


def empty(groups: list[dict[str, Any]]) -> None:
    groups[1]["params"] = []


def move(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].append(groups[1]["params"].pop())


def put(groups: list[dict[str, Any]]) -> None:
    groups[0]["params"].append(nn.Parameter(torch.ones(2)))


EDITS: dict[Callable[[list[dict[str, Any]]], None], str] = {
    append: r"shard\(\) took over 2 groups, and now there are 3",
    remove: r"shard\(\) took over 2 groups, and now there are 1",
    empty: "parameter b was taken out of group 1",
    move: "parameter b was put into group 0",
    put: r"parameter of shape \(2,\) was put into group 0",
}


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@on_ranks(1, 2, 3)
def test_d12_edited_groups_are_refused_before_anything_moves(edit: Any) -> None:
    for stage, of in ((1, "sharded"), (2, "plain")):
        plain = Weights(a=4, b=4)
        inner = AdamW([{"params": [plain.a]}, {"params": [plain.b]}], lr=0.5)
        model, optimizer = shardmp.shard(plain, inner, precision=fp16(16.0), stage=stage)
        before = masters(optimizer)
        edit((optimizer if of == "sharded" else inner).param_groups)
        optimizer.backward(model(a=torch.ones(4), b=torch.ones(4)))
        with pytest.raises(RuntimeError, match=rf"optimizer.param_groups: {EDITS[edit]}.*before shard\(\)"):
            optimizer.step()
        assert equal(before, masters(optimizer))


@on_ranks(1, 2)
def test_d12_a_replaced_list_of_groups_is_refused() -> None:
    plain = Weights(a=4)
    inner = SGD(plain.parameters(), lr=0.5)
    model, optimizer = shardmp.shard(plain, inner, precision=fp16(16.0))
    with pytest.raises(RuntimeError, match="write options into them"):
        optimizer.param_groups = [{"params": []}]
    inner.param_groups = [dict(inner.param_groups[0])]
    optimizer.backward(model(a=torch.ones(4)))
    with pytest.raises(RuntimeError, match="the list was replaced"):
        optimizer.step()


@on_ranks(1, 2)
def test_a_group_dict_that_is_exchanged_for_its_copy_acts() -> None:
    model, optimizer = sharded(Weights(a=4), precision=fp16(16.0), lr=0.5)
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.25}
    one_step(model, optimizer, a=torch.ones(4))
    assert value(model, "a") == [0.75] * 4


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@on_ranks(1, 2)
def test_a_grad_scaler_that_unscales_hears_that_it_is_to_be_left_out(precision: str) -> None:
    """It finds no gradient and says nothing; the clipping after it then clips nothing."""
    model, optimizer = sharded(Weights(w=4), precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = scaler.scale(model(w=torch.ones(4)))
    optimizer.backward(loss)
    for act in (scaler.unscale_, scaler.step):
        with pytest.raises(RuntimeError, match="leave the GradScaler out"):
            act(optimizer)
    model, optimizer = sharded(Weights(w=4), precision="fp16")
    with pytest.raises(RuntimeError, match=r"no loss was scaled.*GradScaler"):
        scaler.scale(model(w=torch.ones(4))).backward()


# --------------------------------------------------------------------------------------------------------------------
# D19, D23: state dicts


@on_ranks(1, 2)
def test_d19_a_state_dict_through_a_queue_is_an_error_that_says_what_moved_it() -> None:
    model, optimizer = sharded(Weights(w=4), precision=fp16(16.0))
    one_step(model, optimizer, w=torch.ones(4))
    queue = torch.multiprocessing.SimpleQueue()
    queue.put(dict(model.state_dict()))
    optimizer.backward(model(w=torch.ones(4)))
    with pytest.raises(RuntimeError, match=r"parameter w was moved with its bucket.*queue.*p.clone\(\)"):
        optimizer.step()


@on_ranks(1, 2)
def test_d19_copies_go_through_a_queue_and_training_goes_on() -> None:
    model, optimizer = sharded(Weights(w=4), precision=fp16(16.0), lr=0.25)
    queue = torch.multiprocessing.SimpleQueue()
    for _ in range(2):
        one_step(model, optimizer, w=torch.ones(4))
        queue.put({name: p.clone() for name, p in model.state_dict().items()})
    assert value(model) == [0.5] * 4
    assert [queue.get()["w"].tolist() for _ in range(2)] == [[0.75] * 4, [0.5] * 4]


# --------------------------------------------------------------------------------------------------------------------
# D20: tensors that are not one dense piece of memory


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.register_buffer("ids", torch.arange(4).expand(2, -1))
        self.register_buffer("ones", torch.ones(1, 4).expand(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x * self.ones[0] + 0 * self.ids[0]).float().sum()


@STAGES
@on_ranks(1, 2, 3)
def test_d20_expanded_buffers_are_rank_0s_and_stay_expanded(rank: int, stage: int) -> None:
    """pytorch/pytorch#68407."""
    plain = Positions()
    plain.ids = (torch.arange(4) + 10 * rank).expand(2, -1)
    model, optimizer = sharded(plain, precision=fp16(16.0), stage=stage)
    assert model.ids.tolist() == [[0, 1, 2, 3]] * 2
    assert model.ids.stride() == (0, 1)
    held = plain.ones
    plain.ones[0, 0] = 1.0 + rank  # written through its one element in memory, in an update of the model's own
    one_step(model, optimizer, x=torch.ones(4))
    assert model.ones.tolist() == [[1.0] * 4] * 3
    assert model.ones.stride() == (0, 1)
    assert plain.ones is held


def dtensor(model: nn.Module) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh))


def fully_sharded(model: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)


def sparse_buffer(model: nn.Module) -> None:
    model.register_buffer("graph", torch.eye(3).to_sparse())


def meta_buffer(model: nn.Module) -> None:
    model.register_buffer("table", torch.ones(3, device="meta"))


def expanded_parameter(model: nn.Module) -> None:
    model.weight = nn.Parameter(torch.ones(1, 4).expand(4, 4))


STRANGE: dict[Callable[[nn.Module], None], str] = {
    dtensor: r"parameter weight is a DTensor.*plain model",
    fully_sharded: r"parameter weight is a DTensor.*fully_shard",
    sparse_buffer: r"buffer graph has layout torch.sparse_coo.*two buffers",
    meta_buffer: r"buffer table is on the meta device",
    expanded_parameter: r"parameter weight is expanded",
}


@pytest.mark.parametrize("strange", STRANGE, ids=lambda strange: strange.__name__)
@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "on one rank"])
@on_ranks(2, 3)
def test_d20_what_cannot_be_sharded_is_refused_by_name_on_every_rank(
    rank: int, world_size: int, strange: Callable[[nn.Module], None], everywhere: bool
) -> None:
    model = nn.Linear(4, 4)
    collective = strange in (dtensor, fully_sharded)
    if everywhere or collective:
        strange(model)
    if not everywhere and (rank != world_size - 1):
        model = nn.Linear(4, 4)
    elif not collective and not everywhere:
        strange(model)
    own = everywhere or rank == world_size - 1
    words = r"shard\(model\): " + STRANGE[strange]
    with pytest.raises(TypeError, match=f"^{words}" if own else f"^rank {world_size - 1}: {words}"):
        sharded(model)


@on_ranks(1, 2)
def test_d20_lazy_layers_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    with pytest.raises(TypeError, match=r"parameter 1.weight is lazy and has no shape yet: run one forward"):
        shardmp.shard(model, SGD(model[0].parameters(), lr=0.5))


class Untouchable(nn.Module):
    """Its parameters cannot even be listed."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4))
        self.broken = broken

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise KeyError("no such table")
        return super().named_parameters(*args, **kwargs)


@on_ranks(2, 3)
def test_d20_whatever_one_rank_raises_while_it_looks_the_others_hear_its_words(rank: int) -> None:
    """They heard that it was gone."""
    words = "no such table" if rank == 1 else r"rank 1: shard\(\) raised KeyError: 'no such table'"
    model = Untouchable(False)
    optimizer = SGD(model.parameters(), lr=0.5)
    model.broken = rank == 1
    with pytest.raises(KeyError if rank == 1 else RuntimeError, match=words):
        shardmp.shard(model, optimizer)


@on_ranks(2)
def test_d20_an_option_of_a_later_version_on_one_rank_is_heard_by_all(rank: int) -> None:
    with pytest.raises(ValueError, match=r"stage=..." if rank else r"rank 1: shard\(stage=...\)"):
        sharded(Weights(w=4), stage=3 if rank else 2)


# --------------------------------------------------------------------------------------------------------------------
# D28: a load that raised half-way


@STAGES
@on_ranks(1, 2, 3)
def test_d28_a_load_that_raised_goes_on_with_what_torch_has_loaded(stage: int) -> None:
    model, optimizer = sharded(Weights(a=4, b=4), precision=fp16(16.0), lr=0.5, stage=stage)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict({"a": torch.full((4,), 3.0)})
    with pytest.raises(RuntimeError, match="size mismatch for a"):
        model.load_state_dict({"a": torch.ones(5), "b": torch.full((4,), 2.0)})
    assert optimizer.master("a").tolist() == [3.0] * 4
    one_step(model, optimizer, a=torch.ones(4), b=torch.ones(4))
    assert (value(model, "a"), value(model, "b")) == ([2.5] * 4, [1.5] * 4)


# --------------------------------------------------------------------------------------------------------------------
# D30 and attributes of the wrapper


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.scale = nn.Linear(4, 4), 1.0
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.actor(x) * self.scale

    def act(self, x: Tensor) -> dict[str, Any]:
        logits = self.actor(x)
        self.seen.append(logits.dtype)
        return {"logits": logits, "pair": (logits.log_softmax(-1), logits.argmax(-1)), "weights": [self.actor.weight]}

    def stop(self) -> None:
        del self.extra


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@on_ranks(1, 2)
def test_d30_a_method_gives_fp32_as_forward_does(precision: str, dtype: torch.dtype) -> None:
    """vwxyzjn/cleanrl's PPO: FP16 log-probabilities, ratio and value, without a word."""
    x = torch.ones(2, 4)
    model, _ = sharded(Agent(), precision=precision)
    found = model.act(x)
    assert model.module.seen == [dtype]
    assert [found["logits"].dtype, found["pair"][0].dtype, found["pair"][1].dtype] == [torch.float32] * 2 + [
        torch.int64
    ]
    assert found["weights"][0] is model.module.actor.weight
    assert torch.equal(found["logits"], model(x))
    for options in ({"output": "param"}, {"autocast": False}):
        policy = shardmp.Precision(param=precision, **options)
        model, _ = sharded(Agent(), precision=policy)
        assert model.act(x)["logits"].dtype == model(x).dtype == (dtype if "output" in options else torch.float32)


@on_ranks(1, 2)
def test_attributes_set_on_the_wrapper_are_those_that_the_models_code_reads() -> None:
    model, optimizer = sharded(Agent(), precision="fp32")
    x = torch.ones(2, 4)
    one = model(x)
    model.scale = 2.0
    assert model.module.scale == 2.0
    assert torch.equal(model(x), 2 * one)
    model.extra = 3
    assert model.module.extra == 3
    model.stop()
    with pytest.raises(AttributeError):
        _ = model.extra
    model.extra = 4
    del model.extra
    assert not hasattr(model.module, "extra")
    model.eval()
    assert not model.module.actor.training
    model.training = True
    assert (model.module.training, model.training) == (True, True)
    model.register_buffer("table", torch.ones(2))
    model.add_module("dropout", nn.Dropout())
    assert "table" in model.state_dict()
    assert model.module.dropout.training
    with pytest.raises(RuntimeError, match="shard a new model"):
        model.module = Agent()
    model.register_state_dict_pre_hook(lambda module, prefix, keep: module.__dict__.update(saved=True))
    model.state_dict()
    assert model.module.saved
    model.requires_grad_(False)
    assert not model.module.actor.weight.requires_grad
    model.requires_grad_(True)
    optimizer.backward(model(x).sum())
    optimizer.step()
