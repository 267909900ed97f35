"""`shardmp budget --batch`: what is traced on fake tensors is what real runs hold."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import sharded
from ranks import on_ranks
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from traced_models import MODELS, Language, bytes_besides, next_token, saved_storages, tensors

from shardmp.activations import Activations, Batch, Trace, largest, own_loss, parse_batch
from shardmp.storages import ACTIVATIONS, COPIES, Storages

CPU = torch.device("cpu")


@functools.cache
def traced(name: str, way: str) -> Activations:
    make, batch, loss = MODELS[name]
    return Trace(make, way, "fp16", loss, CPU)(parse_batch(batch))


def allocator_peak(step: Callable[[], None]) -> int:
    """The most that torch's CPU allocator handed out beyond what it had at the start, by torch's own profiler."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    held = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


# -- against real runs


@pytest.mark.parametrize("way", ["FP32", "autocast"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "recomputed"])
def test_what_is_kept_for_backward_is_what_autograds_own_hooks_see_in_a_real_run(name: str, way: str) -> None:
    """Unique storages, parameters and buffers apart; the loss itself is alive as well."""
    make, batch, loss = MODELS[name]
    model, (args, kwargs) = make(), tensors(parse_batch(batch))
    with saved_storages() as saved, torch.autocast("cpu", torch.float16, enabled=way == "autocast"):
        value = loss(model, *args, **kwargs)
    found = traced(name, way)
    assert found.kept + found.copies == pytest.approx(bytes_besides(saved, model, args), rel=0.02)
    assert value.requires_grad
    assert found.batch == sum(t.numel() * t.element_size() for t in args)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("convolution", "recurrent")])
def test_the_peak_is_what_torchs_allocator_hands_out_in_fp32(name: str) -> None:
    """Kernels of convolution and recurrence have buffers of their own on the CPU, which no trace sees."""
    make, batch, loss = MODELS[name]
    model, (args, kwargs) = make(), tensors(parse_batch(batch))
    peak = allocator_peak(lambda: loss(model, *args, **kwargs).backward())
    assert traced(name, "FP32").most == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("name", list(MODELS))
@on_ranks(1)
def test_what_shardmp_keeps_and_its_peak_are_those_of_a_real_step_of_it(name: str) -> None:
    """The trace runs the wrapper on parts that do nothing; here all parts are real.

    What is kept is seen by autograd's own hooks (which do not see what a recomputed block keeps), the peak is counted on
    real storages. Buffers of gradients exist since the first step, and are the budget's.
    """
    make, batch, loss = MODELS[name]
    model, optimizer = sharded(make(), precision="fp16")
    args, kwargs = tensors(parse_batch(batch))
    with saved_storages() as saved:
        value = loss(model, *args, **kwargs)
    found, seen = traced(name, "shardmp"), bytes_besides(saved, model, args)
    saved.clear()
    assert found.kept == pytest.approx(seen, rel=0.02) or name == "recomputed"
    optimizer.backward(value)
    optimizer.step()
    del value
    with Storages([], [value for value in gc.get_objects() if issubclass(type(value), Tensor)]) as storages:
        optimizer.backward(loss(model, *args, **kwargs))
    assert storages.peak[ACTIVATIONS] == pytest.approx(found.peak, rel=0.02)


def test_half_as_many_bytes_are_kept_in_16_bits() -> None:
    """The saving of mixed precision that the table of static memory does not show."""
    whole, half = traced("attention", "FP32"), traced("attention", "shardmp")
    assert 0.5 < half.kept / whole.kept < 0.66  # norms, the residual stream and the loss stay in FP32
    assert half.copies == 0


def test_autocast_keeps_a_16_bit_copy_of_each_weight_that_is_multiplied() -> None:
    """Copies of biases, which no gradient needs, are gone by the time backward begins."""
    make, _, _ = MODELS["attention"]
    multiplied = sum(p.numel() for p in make().parameters() if p.dim() == 2)
    assert traced("attention", "autocast").copies == 2 * multiplied


def test_recomputed_blocks_keep_their_inputs_alone() -> None:
    """Activation checkpointing: 2 blocks of 4 x 64 tokens of width 64 in FP32, beside the head and the loss."""
    usual, less = traced("attention", "FP32"), traced("recomputed", "FP32")
    head = 4 * 64 * 512 * 4  # log-softmax of the logits
    inputs = 3 * 4 * 64 * 64 * 4
    assert less.kept == pytest.approx(head + inputs + 4 * 65 * 8, rel=0.05)
    assert less.peak < 0.6 * usual.peak


# -- what is counted, and how


def test_views_and_writes_in_place_add_nothing_and_what_dies_is_taken_off() -> None:
    x = torch.zeros(1000)
    with Storages([], [x]) as storages:
        view = x.view(10, 100)
        y = view + 1
        y.mul_(2).t()
        assert storages.bytes[ACTIVATIONS] == 4000
        z = y.double()
        assert storages.bytes[ACTIVATIONS] == 12000
        del y, z
        assert storages.bytes[ACTIVATIONS] == 0
    assert storages.peak[ACTIVATIONS] == storages.most == 12000


def test_a_copy_of_a_weight_in_another_dtype_is_told_from_activations() -> None:
    weight = nn.Parameter(torch.zeros(100))
    with Storages([weight]) as storages:
        copy, activation = weight.half(), (weight * 2).half()
        assert (storages.bytes[COPIES], storages.bytes[ACTIVATIONS]) == (200, 200)
        assert copy.dtype == activation.dtype


def test_a_gradient_that_stays_is_no_activation() -> None:
    weight = nn.Parameter(torch.zeros(100))
    with Storages([weight]) as storages:
        (weight * 3).sum().backward()
        assert weight.grad is not None
        assert storages.bytes[ACTIVATIONS] == 400
        storages.is_gradient(weight.grad)
        assert storages.bytes[ACTIVATIONS] == 0


def test_a_model_of_terabytes_is_traced_without_its_weights() -> None:
    found = Trace(lambda: nn.Linear(10**6, 10**6), "shardmp", "bf16", own_loss, CPU)(parse_batch("8x1000000"))
    # The input in BF16 for the weight's gradient; and no more than a few bytes beside it.
    assert found.kept == pytest.approx(2 * 8 * 10**6, rel=0.01)


def test_frozen_parameters_and_buffers_are_no_activations() -> None:
    make, batch, loss = MODELS["adapters"]
    found = traced("adapters", "FP32")
    whole = Trace(lambda: make().requires_grad_(True), "FP32", "fp16", loss, CPU)
    assert found.kept < whole(parse_batch(batch)).kept


def test_two_traces_of_one_model_say_the_same_and_a_larger_batch_takes_more() -> None:
    trace = Trace(Language, "shardmp", "fp16", next_token, CPU)
    batch = parse_batch("4x65:int64")
    first, second, double = trace(batch), trace(batch), trace(batch.resized(8))
    assert first == second
    assert 1.9 < double.kept / first.kept <= 2.0


# -- the batch


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4x128:int64", [(None, (4, 128), torch.int64)]),
        ("4x3x8x8", [(None, (4, 3, 8, 8), torch.float32)]),
        ("2x4, 2:bool", [(None, (2, 4), torch.float32), (None, (2,), torch.bool)]),
        ("2x4,labels=2:int64", [(None, (2, 4), torch.float32), ("labels", (2,), torch.int64)]),
    ],
)
def test_a_batch_is_written_as_shapes(text: str, expected: Any) -> None:
    assert [(one.name, one.shape, one.dtype) for one in parse_batch(text).inputs] == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected shapes such as 4x128:int64"),
        ("4x", "expected shapes"),
        ("4x128:int63", "expected a dtype among float16"),
        ("0x128", "expected sizes from 1 on"),
        ("10000000x10000000", "1e+12 elements at most"),
        ("a=4,4", "without a name follows"),
        ("a=4,a=4", "a is there twice"),
    ],
)
def test_a_batch_that_is_none_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_batch(text)
    assert message in str(caught.value)


def test_a_batch_is_resized_where_its_tensors_have_the_batchs_size() -> None:
    assert (
        str(parse_batch("4x9:int64,mask=4x1:bool,table=7x2").resized(6)) == "6x9:int64,mask=6x1:bool,table=7x2:float32"
    )
    assert isinstance(parse_batch("4"), Batch)


class Told(nn.Module):
    """Gives its loss as models of transformers do, or an output without one."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.output = nn.Linear(4, 4), output

    def forward(self, x: Tensor) -> Any:
        return self.output(self.linear(x))


def test_the_models_own_loss_is_taken_where_it_gives_one() -> None:
    x = torch.ones(2, 4)
    model = Told(lambda y: {"loss": y.sum(), "logits": y})
    assert torch.equal(own_loss(model, x), model.linear(x).sum())
    model = Told(lambda y: (y, [y * 3]))
    assert torch.allclose(own_loss(model, x), 4 * model.linear(x).mean())
    with pytest.raises(ValueError, match="name a --loss"):
        own_loss(Told(lambda y: y.detach()), x)


@pytest.mark.parametrize(
    ("output", "batch", "message"),
    [
        (lambda y: y, "2x5", "RuntimeError"),
        (lambda y: y * y.sum().item(), "2x4", "DataDependentOutputException"),
        (lambda y: y.detach(), "2x4", "name a --loss"),
        (lambda y: y, "2x4,2x4", "TypeError"),
    ],
    ids=["wrong shape", "reads values", "no graph", "too many"],
)
def test_a_model_that_does_not_run_on_the_batch_is_one_error_that_says_why(
    output: Any, batch: str, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Trace(lambda: Told(output), "FP32", "fp16", own_loss, CPU)(parse_batch(batch))
    assert f"--batch {parse_batch(batch)}: FP32: " in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# -- the largest batch


@pytest.mark.parametrize("limit", [0, 999, 1000, 1001, 10**6, 123_456_789])
@pytest.mark.parametrize(
    "bytes_of",
    [
        lambda size: 500 + 7 * size,
        lambda size: max(9 * size, 4 * size + 3000),
        lambda size: 512 * -(-size // 64),
        lambda size: size * size,
    ],
    ids=["affine", "convex", "in steps", "square"],
)
def test_the_largest_batch_fits_and_the_next_one_does_not(bytes_of: Callable[[int], int], limit: int) -> None:
    tried = []

    def counted(size: int) -> int:
        tried.append(size)
        return bytes_of(size)

    found = largest(counted, 4, limit, most=10**8)
    assert found == 0 or bytes_of(found) <= limit
    assert bytes_of(found + 1) > limit
    assert found + 1 in tried
    assert len(tried) <= 40


def test_few_traces_find_the_largest_batch_of_a_real_model() -> None:
    make, shapes, loss = MODELS["dropout"]
    trace = Trace(make, "shardmp", "fp16", loss, CPU)
    batch, tried = parse_batch(shapes), []

    def bytes_of(size: int) -> int:
        tried.append(size)
        return trace(batch.resized(size)).dynamic

    limit = 64 * 2**20
    found = largest(bytes_of, 4, limit)
    assert bytes_of(found) <= limit < bytes_of(found + 1)
    assert len(tried) <= 8


def test_no_batch_size_beyond_the_bound_is_tried() -> None:
    assert largest(lambda size: 1, 4, 10, most=1000) == 1000
