"""One rank of a real DeepSpeed: trains each run, saves it, and writes down what DeepSpeed says that it holds.

python deepspeed_run.py FOLDER RANK RANKS
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported

import deepspeed
import deepspeed.comm
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_model import CLIP, HYSTERESIS, RUNS, UNSHARDED, WINDOW, Small, make_batch, make_optimizer

NUM_STEPS = 4


def make_engine(stage: int, kind: str, more: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Small()
    optimizer = make_optimizer(model)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **more,
        "zero_optimization": {"stage": stage, **more.get("zero_optimization", {})},
        kind: {"enabled": True},
    }
    if kind == "fp16":
        config[kind] |= {"initial_scale_power": 8, "loss_scale_window": WINDOW, "hysteresis": HYSTERESIS}
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def train(engine: Any, steps: range, rank: int) -> None:
    for step in steps:
        loss = engine(*make_batch(10 * step + rank))
        overflow = engine.fp16_enabled() and step == 1
        engine.backward(loss * float("inf") if overflow else loss)
        engine.step()


def held(engine: Any, folder: Path, stage: int) -> dict[str, Any]:
    """Masters and moments as DeepSpeed's own functions give them, and the masters as its own tool takes them out."""
    found: dict[str, Any] = {"moments": {}, "masters": {}, "tool": {}}
    if not stage:
        return found
    if stage < 3:  # it finds the states of the first group alone: its links are made when the others have none yet
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            found["masters"][name] = safe_get_full_fp32_param(parameter)
            for key in ("exp_avg", "exp_avg_sq"):
                found["moments"][f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
    if hasattr(engine.optimizer, "bf16_groups"):  # BF16_Optimizer: the tool does not know its files
        return {**found, "tool": found["masters"]}
    whole = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return {**found, "tool": {name: whole[name].clone() for name in found["masters"]}}


def run(folder: Path, stage: int, kind: str, more: dict[str, Any], rank: int) -> None:
    engine = make_engine(stage, kind, more)
    train(engine, range(NUM_STEPS - 1), rank)
    engine.save_checkpoint(str(folder), tag="early")
    train(engine, range(NUM_STEPS - 1, NUM_STEPS), rank)
    client = {"epoch": 3, "order": torch.arange(4), "arguments": argparse.Namespace(lr=1)}
    engine.save_checkpoint(str(folder), client_state=client)
    found = held(engine, folder, stage)
    train(engine, range(NUM_STEPS, NUM_STEPS + 1), rank)
    found["next_scale"] = getattr(engine.optimizer, "cur_scale", None) or getattr(engine.optimizer, "loss_scale", None)
    if rank == 0:
        torch.save(found, folder / "held.pt")
    engine.destroy()


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    # Else it is compiled, under a lock file for which every later run waits where this one is killed.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It refuses FP16 on a CPU without FP16 units, though torch has it.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    for name, (stage, kind, more) in RUNS.items():
        run(folder / name, stage, kind, more, rank)
    run(folder / UNSHARDED, 0, "bf16", {}, rank)
    deepspeed.comm.barrier()


if __name__ == "__main__":
    main()
