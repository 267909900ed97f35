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
from .deepspeed_files import NotImported, Saved
from .manifest import CheckpointError
from .pickle_reading import Record
from .regular_files import is_count, shown

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
        raise NotImported(f"{saved.path}: checkpoints saved with elastic_checkpoint are not imported")
    groups = found.get("param_groups") if isinstance(found, dict) else None
    if type(groups) is not list or not groups or not all(type(group) is dict for group in groups):
        raise CheckpointError(f"{saved.path}: the optimizer's file of rank {rank} has no {key} with groups")
    assert isinstance(found, dict)
    return found


def groups_of(saved: Saved) -> list[dict[str, Any]]:
    """The parameter groups, with names for parameters and torch's options alone."""
    groups = []
    shapes = saved.models[0]["param_shapes"]
    for number, group in enumerate(torch_state(saved, 0)["param_groups"]):
        if group.get("bias_correction") not in (None, True, 1):
            raise NotImported(f"{saved.path}: group {number} has bias_correction=False, which torch's Adam has not")
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
            raise NotImported(
                f"{saved.path}: expected Adam or AdamW, the configuration has {shown(options.get('type'))}"
            )
        decoupled = kind == "adamw" or (options.get("params") or {}).get("adam_w_mode", True)
    if decoupled is None:
        raise NotImported(f"{saved.path} does not say whether its optimizer is Adam or AdamW: give optimizer=")
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


def _scaler_fields(found: Any) -> dict[str, Any]:
    """The attributes of DeepSpeed's loss scaler; nothing where there is none.

    Raises:
        ValueError: one is not a number of its kind.
    """
    if found is None:
        return {}
    fields = found.state if isinstance(found, Record) else None
    if not isinstance(fields, dict):
        raise ValueError(f"loss_scaler: expected an object with attributes, found {shown(found)}")
    scale = fields.get("cur_scale", 1.0)
    if type(scale) not in (int, float) or not 0 < scale <= 2.0**127:
        raise ValueError(f"loss_scaler: expected cur_scale from 0 to 2^127, found {shown(scale)}")
    if not fields.get("dynamic"):
        return {"cur_scale": scale}
    for name in ("cur_iter", "scale_window", "cur_hysteresis", "delayed_shift"):
        if not is_count(fields.get(name), 2**53) or (name == "scale_window" and not fields[name]):
            raise ValueError(f"loss_scaler: expected a count as {name}, found {shown(fields.get(name))}")
    last: Any = fields.get("last_overflow_iter")
    least: Any = fields.get("min_scale")
    if type(last) is not int or not -1 <= last <= fields["cur_iter"]:
        raise ValueError(f"loss_scaler: expected last_overflow_iter up to cur_iter, found {shown(last)}")
    if type(least) not in (int, float) or not 0 < least <= 2.0**127:
        raise ValueError(f"loss_scaler: expected min_scale from 0 to 2^127, found {shown(least)}")
    return fields


def scaler_state(found: Any) -> dict[str, Any]:
    """The loss scale's state: the next growth comes at the step at which DeepSpeed's would."""
    state = {"dynamic": False, "pending": None, "scale": 1.0, "growth": 0, "hysteresis": 1, "hopeless": 0}
    scaler = _scaler_fields(found)
    if not scaler.get("dynamic"):
        return {**state, "scale": float(scaler.get("cur_scale", 1.0))}
    # It counts from the last overflow, is one behind, and grows at each multiple of the window.
    clean = scaler["cur_iter"] - scaler["last_overflow_iter"] - 2
    return {
        **state,
        "dynamic": True,
        "scale": float(scaler["cur_scale"]),
        "growth": max(clean, 0) % scaler["scale_window"],
        "hysteresis": scaler["cur_hysteresis"],
    }


def options_of(saved: Saved) -> str:
    """The options of `shard` that the run had."""
    optimizer, config = saved.optimizers[0], saved.models[0].get("ds_config")
    config = config if isinstance(config, dict) else {}
    scaler = _scaler_fields(optimizer.get("loss_scaler"))
    if scaler.get("dynamic"):
        policy = (
            f'shardmp.Precision("fp16", init_scale={float(scaler["cur_scale"])}, growth_interval={scaler["scale_window"]}, '
            f"hysteresis={scaler['delayed_shift']}, min_scale={float(scaler['min_scale'])})"
        )
    elif (config.get("fp16") or {}).get("enabled") is True:
        policy = f'shardmp.Precision("fp16", static_scale={float(scaler.get("cur_scale", 1.0))})'
    else:
        policy = '"bf16"' if any((config.get(key) or {}).get("enabled") for key in ("bf16", "bfloat16")) else '"fp32"'
    clip = optimizer.get("clip_grad", config.get("gradient_clipping"))
    return f"precision={policy}" + (f", max_grad_norm={float(clip)}" if clip else "")
