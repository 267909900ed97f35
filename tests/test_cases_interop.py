"""Real cases of memory, of torch's own machinery around the library, and of gloo: each with its source.

Every test asserts on every rank: many of these show on one rank only. Numbers are powers of two or small fractions, so
`==` is meant unless a tolerance is written.
"""

import contextlib
import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_tools import STAGES, Weights, fp16, one_step, value
from ranks import on_ranks
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import shardmp
from shardmp.exchange import TILE

# --------------------------------------------------------------------------------------------------------------------
# Memory


def live_bytes() -> int:
    """Bytes of all storages that a tensor in this process refers to."""
    gc.collect()
    found = {}
    for item in gc.get_objects():
        if issubclass(type(item), Tensor) and item.layout == torch.strided:
            with contextlib.suppress(RuntimeError):  # fake tensors, which other tests have left, have no bytes
                found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
    return sum(found.values())


@STAGES
@on_ranks(2)
def test_c44_gradients_and_buffers_are_released_deepspeed_3306(stage: int) -> None:
    """deepspeedai/DeepSpeed#3306, hpcaitech/ColossalAI#1955, EleutherAI/DeeperSpeed#66: they lived on, or grew."""
    before = live_bytes()
    model = Weights(large=1_000_000, **{f"small{i}": 1000 for i in range(10)})
    model, optimizer = shardmp.shard(model, AdamW(model.parameters(), lr=2.0**-10), precision=fp16(16.0), stage=stage)
    storages = []
    for p in model.parameters():
        p.register_hook(lambda gradient: storages.append(StorageWeakRef(gradient.untyped_storage())))

    def step(backwards: int, x: float) -> None:
        inputs = {name: x for name, _ in model.named_parameters()}
        for _ in range(backwards):
            optimizer.backward(model(**inputs))
        assert optimizer.step().skipped is math.isinf(x)
        optimizer.synchronize()

    kinds = [(1, 0.25)] * 5 + [(1, math.inf)] + [(4, 0.25)] + [(1, 0.25)] * 2
    held = []
    for backwards, x in kinds:
        step(backwards, x)
        assert all(p.grad is None for p in model.parameters())
        assert storages
        assert all(storage.expired() for storage in storages)
        storages.clear()
        held.append(live_bytes() - before)
    assert max(held[1:]) - min(held[1:]) <= 64 * 1024, held
    # What is held is what the library says, and three tiles: two of FP32 in which sums are formed, one of FP16 into which
    # neighbours' rows are read.
    assert held[-1] <= sum(optimizer.memory().values()) + (4 + 4 + 2) * TILE + 64 * 1024


@STAGES
@on_ranks(2)
def test_c44_a_discarded_model_is_released_colossalai_1955(stage: int) -> None:
    """hpcaitech/ColossalAI#1955: hooks kept what they belong to alive, so a second training had half the memory."""
    before = live_bytes()
    model = Weights(w=1_000_000)
    model, optimizer = shardmp.shard(model, AdamW(model.parameters(), lr=2.0**-10), precision=fp16(16.0), stage=stage)
    one_step(model, optimizer, w=0.25)
    optimizer.synchronize()
    assert live_bytes() - before > 1_000_000
    del model, optimizer
    assert live_bytes() - before <= 64 * 1024


# --------------------------------------------------------------------------------------------------------------------
# Interoperation


@STAGES
@on_ranks(2)
def test_c45_is_a_torch_optimizer_deepspeed_122(stage: int) -> None:
    """deepspeedai/DeepSpeed#122, deepspeedai/DeepSpeed#160, Lightning-AI/pytorch-lightning#17584."""
    model = Weights(w=4)
    sgd = SGD(model.parameters(), lr=0.5)
    groups = sgd.param_groups
    model, optimizer = shardmp.shard(model, sgd, precision=fp16(1024.0), stage=stage)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.param_groups[0] is groups[0]
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]

    optimizer.param_groups[0]["lr"] = 0.25
    one_step(model, optimizer, w=1.0)
    assert value(model) == [0.75] * 4

    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for metric in (1.0, 1.0):
        plateau.step(metric)
    one_step(model, optimizer, w=1.0)
    assert value(model) == [0.625] * 4

    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["initial_lr"] = 0.5
    schedule = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    one_step(model, optimizer, w=0.25)
    schedule.step()
    one_step(model, optimizer, w=0.5)
    assert value(model) == [0.375] * 4


@STAGES
@on_ranks(2)
def test_c45_closure_is_called_once_deepspeed_1084(stage: int) -> None:
    """deepspeedai/DeepSpeed#1084: closures were ignored, or failed."""
    model = Weights(w=1)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.5), precision=fp16(1024.0), stage=stage)
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = model(w=2.0)
        optimizer.backward(loss)
        return loss

    loss = optimizer.step(closure)
    assert calls == [True]
    assert loss.item() == 2.0
    assert value(model) == [0.0]
    assert optimizer.report.loss == 2.0


def small_net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


@STAGES
@pytest.mark.parametrize("order", ["compile then shard", "compile in place then shard", "shard then compile"])
@on_ranks(2)
def test_c46_compiled_model_trains_as_the_eager_one_pytorch_141646(stage: int, order: str) -> None:
    """pytorch/pytorch#141646, deepspeedai/DeepSpeed#4677, pytorch/pytorch#115484: hooks did not fire, graphs broke."""

    def train(compiled: bool) -> tuple[list[Tensor], list[int]]:
        plain: Any = small_net()
        inner = list(plain.parameters())
        if compiled and order == "compile then shard":
            plain = torch.compile(plain, backend="aot_eager")
        if compiled and order == "compile in place then shard":
            plain.compile(backend="aot_eager")
        model, optimizer = shardmp.shard(plain, SGD(plain.parameters(), lr=0.125), precision=fp16(1024.0), stage=stage)
        fired = [0] * len(inner)
        for index, p in enumerate(inner):

            def count(_: Tensor, index: int = index) -> None:
                fired[index] += 1

            p.register_post_accumulate_grad_hook(count)
        names = [name for name, _ in model.named_parameters()]
        called = torch.compile(model, backend="aot_eager") if compiled and order == "shard then compile" else model
        x = torch.tensor([[1.0, 2.0], [-1.0, 0.5]]) * (dist.get_rank() + 1)
        for _ in range(2):
            optimizer.backward(called(x).square().mean())
            assert not optimizer.step().skipped
        return [optimizer.master(name) for name in names], fired

    right, fired = train(compiled=False)
    found, compiled_fired = train(compiled=True)
    assert fired == compiled_fired == [2] * 4
    for one, other in zip(right, found, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
    assert not torch.equal(right[0], small_net()[0].weight)


@STAGES
@on_ranks(2)
def test_c48_average_of_the_masters_moves_openrlhf_1357(stage: int) -> None:
    """OpenRLHF/OpenRLHF#1357, deepspeedai/DeepSpeed#2056, huggingface/diffusers#813: an FP16 average never moves."""
    model = Weights(w=2)
    nn.init.constant_(model.w, 1 + 2.0**-10)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.0), precision=fp16(1.0), stage=stage)
    average = torch.ones(2)
    half = torch.ones(2, dtype=torch.float16)
    for update in range(1000):
        if update % 100 == 0:  # a step publishes the parameters anew
            one_step(model, optimizer, w=1.0)
            assert value(model) == [1 + 2.0**-10] * 2
        master = optimizer.master("w")
        average.lerp_(master, 0.001)
        half.lerp_(master.half(), 0.001)
    assert average.tolist() == pytest.approx([1 + 2.0**-10 * (1 - 0.999**1000)] * 2, abs=1e-5)
    assert half.tolist() == [1.0] * 2  # what an average of the FP16 parameters would be


# --------------------------------------------------------------------------------------------------------------------
# gloo


OPTIONS = [(8, True, "ranks"), (8, False, "micro_batches"), (1e-6, True, "micro_batches"), (1e-6, False, "ranks")]


@STAGES
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("reduce", ["fp32", "native"])
@on_ranks(2, 3)
def test_c55_mean_and_not_sum_pytorch_162338(
    rank: int, world_size: int, stage: int, precision: str, reduce: str
) -> None:
    """pytorch/pytorch#162338, deepspeedai/DeepSpeed#8382, pytorch/pytorch#111131, pytorch/pytorch#170073."""
    gradients, right = {2: ([1.0, 3.0], 0.75), 3: ([1.0, 2.0, 6.0], 0.625)}[world_size]
    for size in (1, 3, 5):
        for bucket_mb, overlap, average in OPTIONS:
            model = Weights(w=size, v=size)
            model, optimizer = shardmp.shard(
                model,
                SGD(model.parameters(), lr=0.125),
                precision=fp16(1024.0) if precision == "fp16" else precision,
                stage=stage,
                reduce=reduce,
                average=average,
                bucket_mb=bucket_mb,
                overlap=overlap,
            )
            report = one_step(model, optimizer, w=gradients[rank], v=gradients[rank])
            assert not report.skipped
            assert value(model, "w") == value(model, "v") == [right] * size


@STAGES
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@on_ranks(2)
def test_c55_needs_no_16_bit_sum_of_the_backend_pytorch_111131(rank: int, stage: int, precision: str) -> None:
    """pytorch/pytorch#111131: MPI sums no 16-bit numbers. Ours are moved as they are and summed here, in FP32."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"):
            if hasattr(dist, name):
                patch.setattr(dist, name, _refusing_16_bits(getattr(dist, name)))
        with pytest.raises(TypeError, match="16 bits"):
            dist.all_reduce(torch.ones(1, dtype=torch.float16))
        model = Weights(w=5)
        policy = fp16(1024.0) if precision == "fp16" else precision
        model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.125), precision=policy, stage=stage)
        one_step(model, optimizer, w=3.0 if rank else 1.0)
        assert value(model) == [0.75] * 5


def _refusing_16_bits(collective: Any) -> Any:
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype in (torch.float16, torch.bfloat16):
            raise TypeError("this backend does not sum 16 bits")
        return collective(tensor, *args, **kwargs)

    return call
