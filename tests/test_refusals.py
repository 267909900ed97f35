"""Bad input: a clear error that names it, on every rank, before any tensor is sent."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch
from helpers import Weights, sharded
from ranks import on_ranks
from torch import Tensor, nn

import shardmp
from shardmp.collectives import Collectives


class Named(nn.Module):
    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, values in parameters.items():
            setattr(self, name, nn.Parameter(values, requires_grad=values.is_floating_point() or values.is_complex()))


def no_tensor_is_sent() -> Any:
    """Make every tensor collective fail, so that an error that comes late is another error."""
    patch = pytest.MonkeyPatch()
    for name in ("broadcast", "start_exchange", "start_gather", "all_reduce"):
        patch.setattr(Collectives, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    return patch


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"stage": 0}, ValueError, r"shard\(stage=...\): expected 1 or 2, got 0"),
    ({"stage": True}, ValueError, "stage"),
    ({"stage": 3}, ValueError, r"stage=...\): expected 1 or 2, got 3"),
    ({"reduce": "exact"}, ValueError, "average='micro_batches'"),
    ({"reduce": "mean"}, ValueError, "reduce.*'fp32' or 'exact' or 'native'.*mean"),
    ({"average": "sum"}, ValueError, "average.*'ranks' or 'micro_batches'"),
    ({"buffers": "none"}, ValueError, "buffers"),
    ({"bucket_mb": 0}, ValueError, "bucket_mb"),
    ({"bucket_mb": "8"}, ValueError, "bucket_mb"),
    ({"overlap": 1}, TypeError, "overlap"),
    ({"max_grad_norm": 0}, ValueError, "max_grad_norm"),
    ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm"),
    ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm"),
    ({"max_grad_norm": "1"}, TypeError, "max_grad_norm"),
    ({"precision": "half"}, ValueError, "precision.*half"),
    ({"precision": torch.float16}, TypeError, "precision"),
    ({"scaler": object()}, TypeError, "scaler.*expected a ShardedOptimizer"),
]


@pytest.mark.parametrize(("options", "error", "words"), BAD_OPTIONS)
def test_a_bad_option_is_named(options: dict[str, Any], error: type[Exception], words: str) -> None:
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(error, match=words):
        shardmp.shard(model, optimizer, **options)
    assert model.w.dtype == torch.float32  # nothing was taken over


@on_ranks(2)
def test_a_mistake_on_one_rank_raises_on_all_and_names_the_rank(rank: int) -> None:
    patch = no_tensor_is_sent()
    try:
        with pytest.raises(ValueError, match=r"bucket_mb.*-1" if rank else r"rank 1: shard\(bucket_mb"):
            sharded(Weights(), bucket_mb=-1 if rank else 8)
        model = Named(good=torch.ones(3), bad=torch.ones(3, dtype=torch.float64 if rank else torch.float32))
        with pytest.raises(TypeError, match=r"(rank 1: )?shard\(model\): parameter bad is torch.float64"):
            sharded(model)
    finally:
        patch.undo()


class Twins(nn.Module):
    """Two parameters of one shape, in an order of choice, and perhaps more."""

    def __init__(self, order: str, shape: int = 4, dtype: torch.dtype = torch.float32, frozen: str = "") -> None:
        super().__init__()
        for name in order:
            parameter = nn.Parameter(torch.ones(shape, dtype=dtype), requires_grad=name not in frozen)
            self.register_parameter(name, parameter)


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ({"order": "ba"}, "parameter a: .*, rank 1 has 'parameter b"),
        ({"order": "abc"}, "parameters: 2.*parameters: 3"),
        ({"order": "ab", "shape": 5}, r"parameter a: shape \(4,\).*shape \(5,\)"),
        ({"order": "ab", "dtype": torch.bfloat16}, "float32.*bfloat16"),
        ({"order": "ab", "frozen": "b"}, "parameter b.*requires_grad True.*requires_grad False"),
    ],
)
@on_ranks(2, 3)
def test_models_that_differ_raise_the_same_error_on_all_ranks_within_seconds(
    rank: int, there: dict[str, Any], words: str
) -> None:
    """deepspeedai/DeepSpeed#7525, pytorch/pytorch#73547: the same shapes in another order mix in silence."""
    started = time.monotonic()
    patch = no_tensor_is_sent()
    try:
        with pytest.raises(ValueError, match=words):
            sharded(Twins(**(there if rank == 1 else {"order": "ab"})))
    finally:
        patch.undo()
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("option", "values"),
    [("bucket_mb", (8, 4)), ("stage", (1, 2)), ("max_grad_norm", (1.0, None)), ("precision", ("fp16", "bf16"))],
)
@on_ranks(2)
def test_options_that_differ_raise_on_all_ranks(rank: int, option: str, values: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="ranks were given different things"):
        sharded(Weights(), **{option: values[rank]})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"good": torch.ones(3), "d": torch.ones(3, dtype=torch.float64)}, "parameter d is torch.float64"),
        ({"good": torch.ones(3), "c": torch.ones(3, dtype=torch.complex64)}, "parameter c is torch.complex64"),
        ({"good": torch.ones(3), "s": torch.eye(3).to_sparse()}, "parameter s has layout torch.sparse_coo"),
        ({"good": torch.ones(3), "m": torch.ones(3, device="meta")}, "parameter m is on the meta device"),
    ],
)
def test_parameters_that_cannot_train_are_type_errors_that_name_them(values: dict[str, Tensor], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        sharded(Named(**values))


def test_quantised_parameters_are_type_errors() -> None:
    model = Named(good=torch.ones(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated, and exist
        model.q = nn.Parameter(torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), requires_grad=False)
    with pytest.raises(TypeError, match="parameter q is quantised"):
        sharded(model)


def test_a_parameter_beyond_fp16_is_named() -> None:
    with pytest.raises(OverflowError, match=r"parameter big holds 70000.0.*keep it in FP32"):
        sharded(Named(small=torch.ones(3), big=torch.tensor([1.0, -70000.0])))
    model, _ = sharded(Named(small=torch.ones(3), big=torch.tensor([1.0, 65519.0])))
    assert model.big.tolist() == [1.0, 65504.0]
    sharded(Named(big=torch.tensor([1.0, 70000.0])), precision="bf16")


def test_sparse_gradients_are_refused_by_the_layers_name() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"0 \(Embedding\) makes sparse gradients"):
        sharded(model)


def test_what_the_optimizer_lists_must_be_the_models() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.raises(ValueError, match=r"parameter 1 of group 0, shape \(4,\), is not one of the model's"):
        shardmp.shard(model, torch.optim.SGD([model.weight, other.bias], lr=0.1))
    with pytest.raises(ValueError, match="bias require a gradient but are in no group"):
        shardmp.shard(model, torch.optim.SGD([model.weight], lr=0.1))
    with pytest.raises(TypeError, match="expected a torch.optim.Optimizer"):
        shardmp.shard(model, "adam")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected an nn.Module"):
        shardmp.shard(lambda x: x, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


@on_ranks(2)
def test_what_shards_already_is_refused() -> None:
    model, optimizer = sharded(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="sharded already|shards or replicates already"):
        shardmp.shard(model, optimizer)
    with pytest.raises(TypeError, match="was given to shard.. before"):
        sharded(model.module)
    replicated = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with pytest.raises(TypeError, match="DistributedDataParallel.*plain model"):
        sharded(replicated)


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        sharded(model)


# -- calls out of order


@on_ranks(1, 2)
def test_calls_out_of_order_say_what_to_do() -> None:
    model, optimizer = sharded(Weights())
    with pytest.raises(RuntimeError, match=r"step\(\) without a gradient.*call backward first"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"optimizer.backward\(loss\)"):
        model(torch.ones(4)).backward()
    assert optimizer.report is None


@on_ranks(1, 2)
def test_a_plain_backward_after_a_step_is_an_error_in_fp16_and_right_in_bf16() -> None:
    model, optimizer = sharded(Weights())
    optimizer.backward(model(torch.ones(4)))
    optimizer.step()
    with pytest.raises(RuntimeError, match="though no loss was scaled since the last step"):
        model(torch.ones(4)).backward()
    for precision in ("bf16", "fp32"):
        model, optimizer = sharded(Weights(), precision=precision)
        model(torch.ones(4)).backward()
        report = optimizer.step()
        assert optimizer.master("w").tolist() == [0.5] * 4
        assert report.loss is None


@pytest.mark.parametrize("stage", [1])
@on_ranks(1, 2)
def test_a_step_after_no_sync_alone_is_an_error(stage: int) -> None:
    model, optimizer = sharded(Weights(), stage=stage)
    with model.no_sync():
        optimizer.backward(model(torch.ones(4)))
    with pytest.raises(RuntimeError, match=r"every backward since was under no_sync\(\)"):
        optimizer.step()


@pytest.mark.parametrize(
    ("loss", "error", "words"),
    [
        (3.0, TypeError, "expected a tensor, got float"),
        (torch.ones(2, requires_grad=True), ValueError, r"shape \(2,\).*reduce it"),
        (torch.tensor(1), ValueError, "torch.int64"),
        (torch.tensor(1.0), ValueError, r"depends on no parameter.*backward\(None\)"),
    ],
)
def test_a_bad_loss_is_an_error(loss: Any, error: type[Exception], words: str) -> None:
    _, optimizer = sharded(Weights())
    with pytest.raises(error, match=words):
        optimizer.backward(loss)


@pytest.mark.parametrize(
    ("value", "error"), [("2", TypeError), (0, ValueError), (float("inf"), ValueError), (True, TypeError)]
)
def test_a_bad_divisor_is_an_error(value: Any, error: type[Exception]) -> None:
    model, optimizer = sharded(Weights())
    optimizer.backward(model(torch.ones(4)))
    with pytest.raises(error, match="divide_by"):
        optimizer.step(divide_by=value)


@on_ranks(2)
def test_divisors_that_differ_never_part_the_ranks_and_raise_at_the_next_step(rank: int) -> None:
    model, optimizer = sharded(Weights(), precision=shardmp.Precision(init_scale=4.0))
    optimizer.backward(model(torch.ones(4)))
    optimizer.step(divide_by=4 if rank == 0 else 8)
    assert optimizer.master("w").tolist() == [1.0] * 4  # nobody's word counts
    optimizer.backward(model(torch.ones(4)))
    with pytest.raises(ValueError, match=r"step 1 .*divide_by.*4.0, 8.0"):
        optimizer.step()


def test_what_an_ordinary_optimizer_can_do_and_this_cannot_names_the_remedy() -> None:
    model = Weights()
    original = torch.optim.SGD(model.parameters(), lr=0.5)
    wrapped, optimizer = shardmp.shard(model, original)
    with pytest.raises(RuntimeError, match="step the ShardedOptimizer"):
        original.step()
    with pytest.raises(NotImplementedError, match="before shard"):
        optimizer.add_param_group({"params": []})
    with pytest.raises(NotImplementedError, match="shardmp.save"):
        optimizer.state_dict()
    with pytest.raises(NotImplementedError, match="shardmp.load"):
        optimizer.load_state_dict({})
    with pytest.raises(KeyError, match="no trainable parameter is called 'v'"):
        optimizer.master("v")
    with pytest.raises(RuntimeError, match="between backward and step"):
        optimizer.full_grad("w")


def test_what_would_break_the_flat_views_is_refused() -> None:
    import copy
    import pickle

    wrapped, _ = sharded(nn.Linear(4, 4))
    for act in (wrapped.float, wrapped.half, wrapped.cpu, lambda: wrapped.to(torch.float64)):
        with pytest.raises(RuntimeError, match="before"):
            act()
    with pytest.raises(RuntimeError, match="copy the plain model before"):
        copy.deepcopy(wrapped)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(wrapped)
    with pytest.raises(ValueError, match="assign=False"):
        wrapped.load_state_dict(wrapped.state_dict(), assign=True)


def test_max_skips_in_a_row_at_the_minimum_raise_and_say_which_it_was() -> None:
    """deepspeedai/DeepSpeed#697, #8415: endless skips look like a healthy run."""
    policy = shardmp.Precision(init_scale=4.0, max_skips=2)
    model, optimizer = sharded(Weights(), precision=policy)
    scales = []
    for _ in range(4):
        optimizer.backward(model(torch.full((4,), 60000.0)))
        optimizer.step()
        scales.append(optimizer.loss_scale)
    assert scales[:2] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("policy", "x", "words"),
    [
        (
            shardmp.Precision(init_scale=4.0, max_skips=2),
            torch.inf,
            "2 steps in a row.*loss that was itself not finite",
        ),
        (shardmp.Precision(static_scale=2.0**20, max_skips=2), 1.0, "2 steps in a row.*static loss scale 1048576.0"),
        (shardmp.Precision(param="bf16", max_skips=2), 2.0**100, "2 steps in a row.*bf16 has no loss scale"),
    ],
)
@on_ranks(1, 2)
def test_skips_that_no_smaller_scale_cures_raise_with_parameter_rank_and_step(
    world_size: int, rank: int, policy: shardmp.Precision, x: float, words: str
) -> None:
    wide = policy.param == "bf16"  # 2^-100 x 2^100 is finite, and 2^100 x 2^60 is not
    model, optimizer = sharded(Weights(torch.full((4,), 2.0**-100 if wide else 1.0)), precision=policy)
    inputs = torch.full((4,), x if rank == world_size - 1 else 2.0**-10)
    for _ in range(2):
        optimizer.backward(model(inputs) * (2.0**60 if wide else 1.0))
        assert optimizer.step().skipped
    optimizer.backward(model(inputs))
    with pytest.raises(RuntimeError, match=rf"{words}.*the last at step 2.*gradient of w on rank {world_size - 1}"):
        optimizer.step()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Parameter(torch.ones(3000)), nn.Parameter(torch.ones(3000))

    def forward(self) -> Tensor:
        return self.small.float().sum() - self.large[2500].float()


@on_ranks(1, 2, 3)
def test_a_master_that_grew_beyond_fp16_is_an_error_that_names_it() -> None:
    plain = Two()
    groups = [{"params": [plain.small], "lr": 0.5}, {"params": [plain.large], "lr": 70000.0}]
    policy = shardmp.Precision(init_scale=1.0)
    model, optimizer = shardmp.shard(plain, torch.optim.SGD(groups), precision=policy)

    def train() -> None:
        for _ in range(3):  # the verdict after the update carries it, and the host looks one step later
            optimizer.backward(model())
            optimizer.step()

    with pytest.raises(OverflowError, match=r"master weights of large \(owned by rank \d\) grew beyond 65504"):
        train()
    assert optimizer.master("large")[2500].item() >= 70001.0
