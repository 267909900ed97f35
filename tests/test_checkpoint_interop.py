"""Files go both ways between shardmp and plain torch: one logical tensor for each parameter, under torch's names."""

from __future__ import annotations

import io
import itertools
import time
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from test_checkpoint import build, moments, train
from test_step import Net, loss_for
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import shardmp
from shardmp.checksum import crc32
from shardmp.container import STORAGES, wrap
from shardmp.layout import Entry, boxes, plan
from shardmp.planning import ShortPlanner

pytestmark = pytest.mark.filterwarnings("ignore:.*(random|torch.distributed is|_get_pg_default|FSDP|Please use)")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


# -- the boxes


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=5))
    size = torch.Size(shape).numel()
    inner = draw(st.lists(st.integers(0, size), max_size=6))
    return shape, sorted({0, size, *inner})


@settings(max_examples=300, deadline=None)
@given(cuts())
def test_boxes_of_all_cuts_are_the_tensor_once_and_few(drawn: tuple[list[int], list[int]]) -> None:
    shape, borders = drawn
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    found = torch.full_like(whole, -1)
    for lo, hi in itertools.pairwise(borders):
        made = boxes(lo, hi, shape)
        assert len(made) <= max(1, 2 * len(shape) - 1)
        for start, offsets, sizes in made:
            part = found
            for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dim, offset, size)
            assert (part == -1).all()  # nobody wrote it before
            part.copy_(torch.arange(lo + start, lo + start + part.numel()).view(sizes))
    assert torch.equal(found, whole)


def test_an_empty_interval_has_no_box() -> None:
    assert boxes(3, 3, (4, 5)) == []


# -- plain torch reads ours


def save_some(root: Path) -> Any:
    model, optimizer = build(adamw, bucket_mb=0.01)
    train(model, optimizer, range(3))
    shardmp.save(root, model, optimizer, extra={"note": "interop", "ema": torch.arange(5.0)})
    return {name: optimizer.master(name).clone() for name in optimizer._names}, moments(optimizer)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("ours")
    weights, state = run_ranks(save_some, 3, root)[0]
    return root / "step-000000003.1", weights, state


def test_plain_dcp_loads_our_masters_into_a_plain_model(ours: Any) -> None:
    """Also tied names, both of which the plain model's state dict has."""
    path, weights, _ = ours
    model = Net()
    state = {"model": {key: torch.full_like(value, torch.nan) for key, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["model"].pop("head.weight"), weights["embed.weight"])
    assert state["model"].keys() == weights.keys()
    assert all(torch.equal(state["model"][name], value) for name, value in weights.items())


def test_dcp_to_torch_save_makes_a_file_that_torch_load_reads_safely(ours: Any, tmp_path: Path) -> None:
    path, weights, state = ours
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert all(torch.equal(found["model"][name], value) for name, value in weights.items())
    for key, value in state.items():
        name, _, kind = key.rpartition(".")
        assert torch.equal(found["optim"]["state"][name][kind].view(-1), value.view(-1))
    assert found["optim"]["param_groups"][0]["lr"] == 0.01
    assert found["optim"]["param_groups"][0]["params"] == list(weights)


def test_a_plain_optimizer_goes_on_from_our_checkpoint(ours: Any) -> None:
    path, weights, state = ours
    model = Net()
    optimizer = adamw(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    flat = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(flat, checkpoint_id=path, no_dist=True)
    set_optimizer_state_dict(model, optimizer, flat["optim"])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        for kind in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][kind].view(-1), state[f"{name}.{kind}"])
        assert optimizer.state[parameter]["step"].item() == state[f"{name}.step"].item()


class Untied(nn.Module):
    """FSDP2 wants parameters of at least one dimension, each of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(11, 40)
        self.first = nn.Linear(40, 72)
        self.norm = nn.LayerNorm(72)
        self.second = nn.Linear(72, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.norm(self.first(self.embed(tokens))))


def ours_untied(root: Path, load: bool) -> Any:
    plain = Untied()
    model, optimizer = shardmp.shard(plain, adamw(plain), bucket_mb=0.004)
    if load:
        loaded = shardmp.load(root, model, optimizer)
        assert loaded.step is None
    else:
        for step in range(3):
            optimizer.backward(loss_for(step, 0, dist.get_rank())(model))
            optimizer.step()
        shardmp.save(root, model, optimizer)
    return {name: optimizer.master(name).clone() for name in optimizer._names}, moments(optimizer)


def fsdp(root: Path, load: bool) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Untied()
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    for step in range(3):
        loss_for(step, 0, dist.get_rank())(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, optimizer)}
    if load:
        dcp.load(state, checkpoint_id=root)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optim"], options=StateDictOptions(strict=True))
    else:
        dcp.save(state, checkpoint_id=root)
    weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
    named = dict(model.named_parameters())
    found = {}
    for name, parameter in named.items():
        for kind, value in optimizer.state[parameter].items():
            found[f"{name}.{kind}"] = (
                (value.full_tensor() if hasattr(value, "full_tensor") else value).view(-1).detach()
            )
    return weights, found


def check_equal(first: Any, second: Any) -> None:
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key].view(-1), other[key].view(-1)) for key in one)


def test_our_checkpoint_loads_into_fsdp2_with_adamw(tmp_path: Path) -> None:
    ours = run_ranks(ours_untied, 3, tmp_path, False)[0]
    theirs = run_ranks(fsdp, 2, tmp_path / "step-000000003.1", True)[0]
    check_equal(ours, theirs)


def test_an_fsdp2_checkpoint_loads_here(tmp_path: Path) -> None:
    theirs = run_ranks(fsdp, 2, tmp_path, False)[0]
    ours = run_ranks(ours_untied, 3, tmp_path, True)[0]
    check_equal(theirs, ours)


def load_foreign(path: Path, expected: dict[str, Tensor], cast: bool) -> str:
    model, optimizer = build(adamw)
    before = {name: optimizer.master(name).clone() for name in optimizer._names}
    if not cast:
        with pytest.raises(TypeError) as caught:
            shardmp.load(path, model)
        assert all(torch.equal(optimizer.master(name), value) for name, value in before.items())
        return str(caught.value)
    shardmp.load(path, model, cast=True)
    assert all(torch.equal(optimizer.master(name), expected[name].float()) for name in before)
    train(model, optimizer, range(1))
    return ""


def test_half_precision_weights_load_by_wish_alone(tmp_path: Path) -> None:
    """DCP itself would cast in silence."""
    state = {key: value.half() for key, value in Net().state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    for error in run_ranks(load_foreign, 2, tmp_path, state, False):
        assert "expected torch.float32, the checkpoint has torch.float16" in error
    run_ranks(load_foreign, 2, tmp_path, state, True)


# -- the archive


@pytest.mark.parametrize("dtype", STORAGES, ids=str)
@pytest.mark.parametrize("limit", [2**32 - 1, 10], ids=["zip", "zip64"])
def test_head_elements_and_tail_are_what_torch_load_reads(dtype: torch.dtype, limit: int) -> None:
    tensor = (torch.randn(3, 7, 5) * 50).to(dtype)
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    head, tail = wrap(dtype, tensor.shape, zlib.crc32(data), limit)
    stream = io.BytesIO(head + data + tail)
    found = torch.load(stream, weights_only=True)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert zipfile.ZipFile(stream).testzip() is None  # checksums as a zip's


# -- the cost of planning


@pytest.mark.parametrize("size", [0, 1, 5000, 2**20 + 7])
def test_the_checksum_is_the_zip_formats(size: int) -> None:
    """Whichever library computes it: files travel between machines that have one or the other."""
    data = torch.randint(0, 256, (size,), dtype=torch.uint8).numpy().tobytes()
    assert crc32(data) == zlib.crc32(data)
    assert crc32(data[3:], crc32(data[:3])) == zlib.crc32(data)


@pytest.mark.parametrize("bucket_mb", [8, 16384])
def test_planning_for_256_ranks_takes_less_than_a_second(bucket_mb: int) -> None:
    """288 parameters with three states: rank 0's time for the plan, and the boxes that all ranks together write."""
    shapes = [(4096, 4096)] * 224 + [(4096,)] * 64
    entries = [Entry(f"p{i}", torch.Size(shape).numel(), "fp16") for i, shape in enumerate(shapes)]
    layout = plan(entries, 256, bucket_bytes=bucket_mb << 20, itemsize={"fp16": 2})
    kinds = ("model", "exp_avg", "exp_avg_sq")
    plans = [
        SavePlan(
            [],
            planner_data=(
                {},
                [
                    (f"{kind}.{entries[piece.param].name}", torch.float32, shapes[piece.param], piece.lo, piece.hi)
                    for piece in layout.pieces(rank)
                    for kind in kinds
                ],
            ),
        )
        for rank in range(256)
    ]
    start = time.process_time()
    _, metadata = ShortPlanner().create_global_plan(plans)
    seconds = time.process_time() - start
    num_boxes = sum(len(found.chunks) for found in metadata.state_dict_metadata.values())
    assert num_boxes <= len(kinds) * (len(shapes) + 3 * 256 * len(layout.buckets))
    print(f"{len(layout.buckets)} buckets, {num_boxes} boxes, {seconds:.2f} s")
    assert seconds < 1.0
