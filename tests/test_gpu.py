"""What can be seen on CUDA alone: host synchronisation, memory, sums of any shape, what comes from the CPU.

The central tests run there too: see conftest.py. Without SHARDMP_TEST_DEVICE=cuda (`make test-gpu`) all here are skipped.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
from helpers import equal, masters, sharded
from rank_worker import DEVICE
from ranks import on_ranks
from torch import nn

import shardmp
from shardmp.exchange import sum_squares
from shardmp.layout import BLOCK, UNIT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU and SHARDMP_TEST_DEVICE=cuda (make test-gpu)"),
]


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """torch raises where the host waits for a stream: at `.item()`, `.tolist()`, `nonzero`, and blocking copies."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def layers(device: str = "cuda") -> nn.Sequential:
    torch.manual_seed(0)
    kinds = {"device": device}
    return nn.Sequential(nn.Linear(300, 300, **kinds), nn.LayerNorm(300, **kinds), nn.Linear(300, 300, **kinds))


@pytest.mark.parametrize("options", [{}, {"stage": 1}, {"overlap": False}, {"reduce": "native"}], ids=str)
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@on_ranks(1, 2)
def test_7_ten_clean_steps_never_make_the_host_wait(precision: str, options: dict[str, object]) -> None:
    policy = shardmp.Precision(param=precision, **({"init_scale": 256.0} if precision == "fp16" else {}))
    model, optimizer = sharded(
        layers(), torch.optim.AdamW, 0.01, precision=policy, bucket_mb=0.1, max_grad_norm=1.0, **options
    )
    x = torch.randn(8, 300, device="cuda")
    reports = []
    for step in range(13):
        # The first steps make buffers, and the allocator may wait for the driver.
        with no_synchronisation() if step >= 3 else contextlib.nullcontext():
            optimizer.backward(model(x).square().mean())
            reports.append(optimizer.step())
    assert not any(report.skipped for report in reports)


@on_ranks(1, 2)
def test_7_nor_do_steps_with_a_parameter_that_this_rank_does_not_use() -> None:
    model, optimizer = sharded(layers(), torch.optim.AdamW, 0.01, precision="bf16")
    x = torch.randn(8, 300, device="cuda")
    for step in range(6):
        with no_synchronisation() if step >= 3 else contextlib.nullcontext():
            optimizer.backward(model.module[2](x.bfloat16()).float().square().mean())
            optimizer.step()
    before = layers()[0].weight
    assert torch.equal(optimizer.master("0.weight"), before)  # nobody had a gradient: no decay, no step


@on_ranks(1)
def test_reading_a_report_does_not_wait_for_what_was_enqueued_after_its_step() -> None:
    """A copy in the current stream would: the next step reads it behind that step's whole backward."""
    model, optimizer = sharded(layers(), torch.optim.AdamW, 0.01)
    for _ in range(2):
        optimizer.backward(model(torch.ones(1, 300)).mean())
        report = optimizer.step()
    torch.cuda._sleep(3_000_000_000)  # cycles: a second or more
    assert report.loss is not None
    assert not torch.cuda.current_stream().query(), "the host waited for the sleep"
    torch.cuda.synchronize()


@pytest.mark.parametrize("width", [BLOCK, UNIT])
def test_a_blocks_sum_of_squares_does_not_depend_on_how_many_are_summed_with_it(width: int) -> None:
    """torch's reductions on CUDA choose the order of a row's sum by the number of rows, too: shards' sizes would show."""
    blocks = torch.randn(200, width, generator=torch.Generator().manual_seed(0)).cuda()
    alone = torch.empty(200, device="cuda")
    for row in range(200):
        sum_squares(blocks[row : row + 1], alone[row : row + 1])
    for rows in (2, 3, 7, 15, 16, 17, 33, 64, 200):
        together = torch.empty(rows, device="cuda")
        sum_squares(blocks[:rows], together)
        assert torch.equal(together, alone[:rows]), rows


@on_ranks(1, 2)
def test_8_the_allocator_holds_what_memory_says_and_predicts() -> None:
    before = torch.cuda.memory_allocated()
    plain = nn.Sequential(*(nn.Linear(1024, 1024, device="cpu") for _ in range(12)))
    model, optimizer = sharded(plain, torch.optim.AdamW, 0.01, bucket_mb=2)
    for _ in range(2):
        optimizer.backward(model(torch.ones(1, 1024)).mean())
        optimizer.step()
    optimizer.synchronize()
    torch.cuda.synchronize()
    held, predicted = optimizer.memory(), optimizer.predicted_memory()
    allocated = torch.cuda.memory_allocated() - before
    assert {**held, "buckets": 0} == {**predicted, "buckets": 0}
    assert held["buckets"] <= predicted["buckets"]
    # The rest: sums of blocks, extremes, tiles of scratch, cuBLAS's workspace.
    assert sum(held.values()) <= allocated <= 1.05 * sum(held.values()) + 2**25


@on_ranks(1, 2)
def test_a_model_on_the_cpu_trains_as_one_that_was_on_the_gpu() -> None:
    finals = []
    for device in ("cpu", "cuda"):
        model, optimizer = sharded(layers("cpu").to(device), torch.optim.AdamW, 0.01)
        for _ in range(3):
            optimizer.backward(model(torch.ones(2, 300)).square().mean())
            optimizer.step()
        finals.append(masters(optimizer))
    assert equal(*finals)


@on_ranks(1)
def test_step_counts_that_an_unfused_optimizer_brings_move_to_the_gpu() -> None:
    """torch keeps them on the CPU there; its fused kernels refuse that."""
    plain = nn.Linear(64, 64)
    original = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plain(torch.ones(2, 64)).sum().backward()
    original.step()
    original.zero_grad()
    assert original.state[plain.weight]["step"].device.type == "cpu"
    twin = copy.deepcopy(plain)
    expected = torch.optim.AdamW(twin.parameters(), lr=0.01)
    state = original.state_dict()
    state["param_groups"][0]["fused"] = True  # torch moves the counts where it loads for a fused step
    expected.load_state_dict(state)

    model, optimizer = shardmp.shard(plain, original, precision="fp32")
    optimizer.backward(model(torch.ones(2, 64)).square().sum())
    optimizer.step()
    twin(torch.ones(2, 64)).square().sum().backward()
    expected.step()
    assert torch.equal(optimizer.master("weight"), twin.weight)


@on_ranks(1)
def test_a_capturable_optimizer_is_taken() -> None:
    """Its trial step must run on the GPU: torch refuses it on the CPU."""
    model, optimizer = sharded(layers(), torch.optim.AdamW, 0.01, capturable=True)
    optimizer.backward(model(torch.ones(1, 300)).mean())
    assert not optimizer.step().skipped


@on_ranks(1, 2)
def test_a_loss_on_the_cpu_counts_as_any_other() -> None:
    model, optimizer = sharded(layers(), torch.optim.AdamW, 0.01)
    loss = model(torch.ones(1, 300)).square().mean()
    optimizer.backward(loss.cpu())
    assert optimizer.step().loss == loss.item()


@on_ranks(1)
def test_a_script_that_sets_the_gpu_as_default_device_can_shard() -> None:
    torch.set_default_device("cuda")
    try:
        model, optimizer = sharded(layers(), torch.optim.AdamW, 0.01)
        optimizer.backward(model(torch.ones(1, 300)).mean())
        assert not optimizer.step().skipped
    finally:
        torch.set_default_device(None)
