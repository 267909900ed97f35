"""DeepSpeed as a contestant: its configuration, what has to be patched, and the compiled parts that it keeps.

Owns:      every call of DeepSpeed, and the folder where its extensions are built.
Takes:     a workload, settings, precision and stage.
Gives:     a `Trainer`.
Invariant: a patch is asked for by a contestant's name; nothing else of DeepSpeed is changed.

[Note: stale locks] DeepSpeed compiles extensions when it first runs, under a lock that is a plain file. A process that is
killed meanwhile leaves the file, and every later run on the machine waits for it for ever, without a word. The benchmark
has extensions of its own, and `remove_stale_locks` before a launch: whoever made them is gone by then.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from contestants import Settings, Trainer
    from workloads import Workload

# Elements in a bucket, 16 MiB. Its own 5e8 would be a gigabyte, allocated anew in every backward and never filled by
# these models, so that nothing would overlap.
BUCKET = 2**23


def remove_stale_locks(extensions: Path) -> None:
    """Remove the locks that killed builds have left in a folder of torch extensions; nobody may be building there."""
    for lock in extensions.rglob("lock"):
        lock.unlink(missing_ok=True)


def build() -> None:
    """Compile and load the extensions that the contestants use, if they are not there yet."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder.cpu import CPUAdamBuilder, ShareMemCommBuilder

    for builder in (ShareMemCommBuilder(), CPUAdamBuilder()):
        builder.load(verbose=True)


def make_deepspeed(
    workload: Workload,
    settings: Settings,
    precision: str,
    stage: int,
    *,
    torch_adam: bool = False,
    no_norm: bool = False,
) -> Trainer:
    """Set it up on this rank.

    Args:
        precision: "bf16" or "fp16"; FP16 makes its CPU accelerator say that it can.
        torch_adam: torch's fused AdamW in place of DeepSpeed's own Adam for CPUs.
        no_norm: leave out the gradient's norm, which ZeRO-1 and -2 compute in every step; only where nothing is clipped.

    Raises:
        ValueError: no_norm together with clipping.
    """
    if no_norm and settings.clip is not None:
        raise ValueError("the variant without a norm cannot clip: run it with --clip off")
    # Its set-up looks for MPI where it is not told that the launcher has done its work.
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    from contestants import Trainer
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    dtype = torch.bfloat16 if precision == "bf16" else torch.float16
    if precision == "fp16":
        get_accelerator().is_fp16_supported = lambda: True
    model = workload.build()
    parameters = list(model.parameters())
    optimizer: Any = (
        torch.optim.AdamW(parameters, lr=settings.lr, fused=True)
        if torch_adam
        else DeepSpeedCPUAdam(parameters, lr=settings.lr, weight_decay=1e-2, adamw_mode=True)
    )
    config = _config(precision, stage, settings.clip)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    if no_norm:
        engine.optimizer.scaled_global_norm = lambda: torch.ones(())

    def forward(x: Tensor) -> Tensor:
        return engine(x.to(dtype) if x.is_floating_point() else x)

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return Trainer(forward, step, skipped=lambda: engine.skipped_steps)


def _config(precision: str, stage: int, clip: float | None) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if stage == 3:
        zero["stage3_prefetch_bucket_size"] = BUCKET
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0 if clip is None else clip,  # it clips at 1.0 where nothing is said
        "steps_per_print": 2**30,
        precision: {"enabled": True},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
