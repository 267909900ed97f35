"""The study: its arithmetic does what its names say, and a short run shows what the page claims."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import products_apart

from shardmp import tensorcore

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))  # where the program's own imports look when it runs as a script

import techniques  # noqa: E402
import why_mixed_precision as study  # noqa: E402
from techniques import RECIPES, Gradients, Linear16, product_16, sum_in_16_bits, train  # noqa: E402


def test_a_sum_in_16_bits_stands_still_where_the_spacing_is_two() -> None:
    assert sum_in_16_bits(torch.ones(4096, dtype=torch.float16)).item() == 2048  # 2048 + 1 is no FP16 number
    assert sum_in_16_bits(torch.ones(4096, dtype=torch.bfloat16)).item() == 256
    assert sum_in_16_bits(torch.ones(4096)).item() == 4096


def test_a_product_with_16_bit_accumulators_rounds_after_every_16_terms() -> None:
    a, b = torch.ones(1, 4096, dtype=torch.float16), torch.ones(4096, 1, dtype=torch.float16)
    assert product_16(a, b).item() == 4096  # steps of 16 are FP16 numbers
    a[0, ::16] = 0.5  # steps of 15.5: 2048 + 15.5 is not one
    assert product_16(a, b).item() != 3968 == (a.float() @ b.float()).item()


def test_gradients_of_the_16_bit_product_are_a_linear_layers() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).half().requires_grad_() for shape in ((3, 5, 8), (4, 8)))
    Linear16.apply(x, weight).float().pow(2).sum().backward()
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    torch.nn.functional.linear(*wide).pow(2).sum().backward()
    for ours, exact in zip((x, weight), wide, strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad.double(), exact.grad, rtol=1e-2, atol=5e-2)


def test_an_fp16_norm_breaks_on_large_inputs_and_an_fp32_one_does_not() -> None:
    assert study.norm_error(1.0, fp32=False) < 0.02
    assert study.norm_error(300.0, fp32=True) < 0.01
    assert study.norm_error(300.0, fp32=False) > 1  # its sum of squares is inf, so that all it gives is 0


def test_updates_below_half_a_spacing_are_lost() -> None:
    weights = torch.full((8,), 1.0)
    assert study.unmoved_by(weights, 2.0**-13, torch.float16) == 1.0  # below 1 the spacing is 2^-11: half is a tie
    assert study.unmoved_by(weights, 2.0**-11, torch.float16) == 0.0
    assert study.unmoved_by(weights, 2.0**-11, torch.bfloat16) == 1.0
    assert study.unmoved_by(weights, 2.0**-13, torch.float32) == 0.0


@pytest.fixture
def emulated() -> Iterator[None]:
    """The 16-bit products of this CPU, as the program has them; other tests keep what they had."""
    with products_apart():
        for dtype in (torch.float16, torch.bfloat16):
            tensorcore.enable(dtype)
        yield


def test_without_a_scale_gradients_vanish_and_without_masters_weights_stay(emulated: None) -> None:
    """Four steps at fine-tuning's learning rate: what each loses is seen at once, the losses need longer."""
    by_name = {recipe.name: recipe for recipe in RECIPES}
    training, held_out = study.batches(4)
    torch.manual_seed(0)
    start = {name: value.detach() for name, value in techniques.GPT().named_parameters()}
    seen = Gradients()

    def tune(name: str) -> techniques.Run:
        return train(by_name[name], training, held_out[:1], seen=seen if name == "FP32" else None, start=start)

    fp32, unscaled, no_backup, bf16 = map(tune, ("FP32", "no loss scale", "no weight backup", "pure BF16"))
    assert max(fp32.zero_gradients, no_backup.zero_gradients) < 0.001
    assert unscaled.zero_gradients > 0.02
    assert fp32.unmoved < 0.01
    assert 0.1 < no_backup.unmoved < bf16.unmoved
    assert all(math.isfinite(run.validation) for run in (fp32, unscaled, no_backup, bf16))
    at_1, at_scale = (study.formats.shares(seen.activations, study.formats.FP16, scale) for scale in (1.0, 65536.0))
    assert at_scale.underflow < 0.01
    assert at_1.underflow > 0.2


def test_the_program_runs_from_recipes_to_tables(tmp_path: Path) -> None:
    plot = importlib.util.find_spec("matplotlib") is not None
    figure = ["--figure", str(tmp_path / "numbers.png")]
    command = [sys.executable, str(EXAMPLES / "why_mixed_precision.py"), "--steps", "2", *figure]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if not plot:
        assert done.returncode == 2
        assert "pip install 'shardmp[plot]'" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    for recipe in RECIPES:
        assert f"│ {recipe.name} " in done.stdout
    assert "nan" not in done.stdout
    assert (tmp_path / "numbers.png").stat().st_size > 10_000
