"""A policy that exists is consistent, and says what stays FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shardmp.precision import Precision, as_precision


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"param": "fp8"}, ValueError, "param.*fp16, bf16, fp32.*fp8"),
        ({"output": "fp16"}, ValueError, "output"),
        ({"autocast": 1}, TypeError, "autocast"),
        ({"growth_interval": 0}, ValueError, "growth_interval"),
        ({"growth_interval": 2.5}, TypeError, "growth_interval"),
        ({"hysteresis": 0}, ValueError, "hysteresis"),
        ({"max_skips": True}, TypeError, "max_skips"),
        ({"init_scale": 0}, ValueError, "init_scale"),
        ({"init_scale": float("inf")}, ValueError, "init_scale"),
        ({"init_scale": "65536"}, TypeError, "init_scale"),
        ({"init_scale": 0.5}, ValueError, "init_scale.*min_scale 1.0"),
        ({"min_scale": 4.0, "max_scale": 2.0}, ValueError, "min_scale 4.0 is above max_scale 2.0"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor"),
        ({"static_scale": -1.0}, ValueError, "static_scale"),
        ({"keep_fp32": [nn.LayerNorm]}, TypeError, "keep_fp32"),
        ({"keep_fp32": (torch.Tensor,)}, TypeError, "keep_fp32"),
        ({"param": "bf16", "init_scale": 2.0}, ValueError, "init_scale.*bf16 has no loss scale"),
        ({"param": "fp32", "static_scale": 2.0}, ValueError, "static_scale.*fp32 has no loss scale"),
    ],
)
def test_a_bad_policy_names_its_option(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Precision(**options)


def test_words_become_policies() -> None:
    assert as_precision("bf16") == Precision(param="bf16")
    assert as_precision("fp16").dtype == torch.float16
    with pytest.raises(ValueError, match="half"):
        as_precision("half")
    with pytest.raises(TypeError, match="precision"):
        as_precision(torch.float16)  # type: ignore[arg-type]


def model() -> nn.Module:
    block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)))
    return nn.ModuleDict({"body": block, "head": nn.Linear(2, 2)})


def test_norm_layers_stay_fp32_by_default() -> None:
    policy = Precision()
    assert set(policy.fp32_modules(model())) == {"body.1", "body.2.0"}
    assert policy.fp32_parameters(model()) == {"body.1.weight", "body.1.bias", "body.2.0.weight", "body.2.0.bias"}


def test_names_and_patterns_keep_modules_and_parameters() -> None:
    assert Precision(keep_fp32=("head",)).fp32_parameters(model()) == {"head.weight", "head.bias"}
    assert Precision(keep_fp32=("head.bias",)).fp32_parameters(model()) == {"head.bias"}
    assert set(Precision(keep_fp32=("body", nn.LayerNorm)).fp32_modules(model())) == {"body"}
    assert Precision(keep_fp32=()).fp32_parameters(model()) == set()


def test_a_pattern_that_matches_nothing_is_a_slip() -> None:
    with pytest.raises(ValueError, match=r"'haed\.\*' matches no module"):
        Precision(keep_fp32=("haed.*",)).fp32_parameters(model())


def test_in_fp32_everything_is_fp32() -> None:
    assert len(Precision(param="fp32").fp32_parameters(model())) == 10
    assert Precision(param="fp32").fp32_modules(model()) == {}
