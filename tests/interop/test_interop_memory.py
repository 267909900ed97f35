"""What real models keep for backward is what `shardmp budget` traces, and docs/precision.md's table is what they hold."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from helpers import sharded
from interop_models import MODELS, batch, maker
from ranks import on_ranks
from torch import Tensor, nn
from traced_models import bytes_besides, saved_storages

from shardmp.activations import Batch, Input, Trace, own_loss

ROOT = Path(__file__).resolve().parent.parent.parent
CPU = torch.device("cpu")


def written(tensors: dict[str, Tensor]) -> Batch:
    """A batch as the command is told of it: names, shapes and dtypes."""
    return Batch(tuple(Input(name, tuple(value.shape), value.dtype) for name, value in tensors.items()))


def inputs_of(name: str) -> dict[str, Tensor]:
    """Without a mask: a model of transformers looks at its values, and a trace has none."""
    return {key: value for key, value in batch(name, 3).items() if key != "attention_mask"}


def seen(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Bytes that torch's own hooks see saved in a real forward."""
    with saved_storages() as saved:
        loss = own_loss(model, **inputs)
    assert loss.requires_grad
    return bytes_besides(saved, model, list(inputs.values()))


@pytest.mark.parametrize("name", list(MODELS))
def test_a_real_model_in_fp32_keeps_what_was_traced(name: str) -> None:
    inputs = inputs_of(name)
    found = Trace(maker(name), "FP32", device=CPU)(written(inputs))
    assert found.kept == pytest.approx(seen(maker(name)(), inputs), rel=0.02)


@pytest.mark.parametrize("name", list(MODELS))
@on_ranks(1)
def test_a_real_model_in_shardmps_fp16_keeps_what_was_traced(name: str) -> None:
    inputs = inputs_of(name)
    model, _ = sharded(maker(name)())
    found = Trace(maker(name), "shardmp", device=CPU)(written(inputs))
    assert found.kept == pytest.approx(seen(model, inputs), rel=0.02)


def test_the_pages_table_of_models_is_what_the_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    example = importlib.import_module("memory_of_models")
    page = [line.strip("|").split("|") for line in (ROOT / "docs" / "precision.md").read_text().splitlines()]
    table = {
        (cells[0].strip(), cells[2].strip()): [cell.strip() for cell in cells] for cells in page if len(cells) == 11
    }
    for case in example.cases():
        row = example.row_of(case)
        told = table[row[0], row[2]]
        assert told[1] == row[1]
        for said, found in zip(told[3:], row[3:], strict=True):
            assert float(said) == pytest.approx(float(found), rel=0.02, abs=0.011), (row[0], row[2])
