"""A trace of a step bears the names that docs/performance.md explains."""

from __future__ import annotations

import torch
import torch.distributed as dist
from helpers import late_gathers, sharded
from ranks import on_ranks
from torch import nn
from torch.profiler import ProfilerActivity, profile

NAMES = {"shardmp.forward_wait", "shardmp.reduce", "shardmp.verdict", "shardmp.update", "shardmp.gather"}


@on_ranks(2)
def test_every_part_of_a_step_has_its_name_in_a_trace_and_no_bit_changes() -> None:
    weights = []
    for profiled in (False, True):
        torch.manual_seed(0)
        model, optimizer = sharded(nn.Linear(64, 64), torch.optim.AdamW, 0.01)
        with late_gathers(), profile(activities=[ProfilerActivity.CPU]) if profiled else torch.enable_grad() as trace:
            for step in range(2):
                x = torch.ones(2, 64) * (step + dist.get_rank() + 1)
                optimizer.backward(model(x).square().mean())
                optimizer.step()
        weights.append(optimizer.master("weight"))
    assert {event.key for event in trace.key_averages()} >= NAMES
    assert torch.equal(*weights)
