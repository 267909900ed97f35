"""What a DeepSpeed checkpoint holds beside its tensors, in the words of ours.

Owns:      options, counters and names: what of DeepSpeed's is what here.
Takes:     an opened checkpoint of DeepSpeed.
Gives:     the optimizer's name and groups, the loss scale's state, the user's values, options for `shard`.
Invariant: what cannot be carried over is an error or is reported by name, never left out in silence.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import codec
from .deepspeed_files import Saved
from .manifest import CheckpointError

# Of a model file, what is DeepSpeed's own; any other key is the user's.
_OWN_KEYS = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names"),
    *("skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version"),
    *("checkpoint_parallel_dimensions", "universal_checkpoint_info"),
}


def torch_state(saved: Saved, rank: int) -> dict[str, Any]:
    """The `state_dict` of the torch optimizer inside."""
    key = "optimizer_state_dict" if saved.stage == 3 else "base_optimizer_state"
    found = saved.optimizers[rank].get(key)
    if isinstance(found, list):
        raise ValueError(f"{saved.path}: checkpoints saved with elastic_checkpoint are not imported")
    if not isinstance(found, dict) or not found.get("param_groups"):
        raise CheckpointError(f"{saved.path}: the optimizer's file of rank {rank} has no {key}")
    return found


def groups_of(saved: Saved) -> list[dict[str, Any]]:
    """The parameter groups, with names for parameters and torch's options alone."""
    groups = []
    shapes = saved.models[0]["param_shapes"]
    for number, group in enumerate(torch_state(saved, 0)["param_groups"]):
        if group.get("bias_correction") not in (None, True, 1):
            raise ValueError(f"{saved.path}: group {number} has bias_correction=False, which torch's Adam has not")
        options = {k: v for k, v in group.items() if k not in ("params", "param_names", "bias_correction", "step")}
        for key, value in options.items():
            codec.dumps(value, f"param_groups[{number}][{key!r}]", [])
        groups.append({**options, "params": [name for index in group["params"] for name in shapes[index]]})
    return groups


def optimizer_name(saved: Saved, told: str | None) -> str:
    """Adam or AdamW: DeepSpeed's own optimizers have the same state for both, and say which in its configuration alone.

    Raises:
        ValueError: neither, or it cannot be known.
    """
    if told is not None:
        if told not in ("Adam", "AdamW"):
            raise ValueError(f"optimizer: expected 'Adam' or 'AdamW', got {told!r}")
        return told
    decoupled = torch_state(saved, 0)["param_groups"][0].get("decoupled_weight_decay")
    configured = saved.models[0].get("ds_config")
    options = configured.get("optimizer") if isinstance(configured, dict) else None
    if decoupled is None and isinstance(options, dict):
        kind = str(options.get("type")).lower()
        if kind not in ("adam", "adamw"):
            raise ValueError(f"{saved.path}: expected Adam or AdamW, the configuration has {options.get('type')!r}")
        decoupled = kind == "adamw" or (options.get("params") or {}).get("adam_w_mode", True)
    if decoupled is None:
        raise ValueError(f"{saved.path} does not say whether its optimizer is Adam or AdamW: give optimizer=")
    return "AdamW" if decoupled else "Adam"


def extra_of(model: dict[str, Any]) -> tuple[str, list[Tensor], list[str]]:
    """JSON of the scheduler's state and of what the user gave to `save_checkpoint`, its tensors, and what is left out."""
    dropped: list[str] = []

    def storable(value: Any, where: str) -> bool:
        try:
            codec.dumps(value, where, [])
        except TypeError:
            dropped.append(where)
            return False
        return True

    own = {key: value for key, value in model.items() if key not in _OWN_KEYS and storable(value, str(key))}
    values: dict[str, Any] = {"client_state": own}
    scheduler = model.get("lr_scheduler")
    if scheduler is not None and storable(scheduler, "lr_scheduler"):
        values["lr_scheduler"] = scheduler
    tensors: list[Tensor] = []
    return codec.dumps(values, "extra", tensors).decode(), tensors, dropped


def scaler_state(found: Any) -> dict[str, Any]:
    """The loss scale's state: the next growth comes at the step at which DeepSpeed's would."""
    state = {"dynamic": False, "pending": None, "scale": 1.0, "growth": 0, "hysteresis": 1, "hopeless": 0}
    if found is None or not getattr(found, "dynamic", False):
        return {**state, "scale": float(getattr(found, "cur_scale", 1.0))}
    # It counts from the last overflow, is one behind, and grows at each multiple of the window.
    clean = found.cur_iter - found.last_overflow_iter - 2
    return {
        **state,
        "dynamic": True,
        "scale": float(found.cur_scale),
        "growth": max(clean, 0) % found.scale_window,
        "hysteresis": found.cur_hysteresis,
    }


def options_of(saved: Saved) -> str:
    """The options of `shard` that the run had."""
    optimizer, config = saved.optimizers[0], saved.models[0].get("ds_config")
    config = config if isinstance(config, dict) else {}
    scaler = optimizer.get("loss_scaler")
    if scaler is not None and getattr(scaler, "dynamic", False):
        policy = (
            f'shardmp.Precision("fp16", init_scale={float(scaler.cur_scale)}, growth_interval={scaler.scale_window}, '
            f"hysteresis={scaler.delayed_shift}, min_scale={float(scaler.min_scale)})"
        )
    elif (config.get("fp16") or {}).get("enabled") is True:
        policy = f'shardmp.Precision("fp16", static_scale={float(getattr(scaler, "cur_scale", 1.0))})'
    else:
        policy = '"bf16"' if any((config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16")) else '"fp32"'
    clip = optimizer.get("clip_grad", config.get("gradient_clipping"))
    return f"precision={policy}" + (f", max_grad_norm={float(clip)}" if clip else "")
