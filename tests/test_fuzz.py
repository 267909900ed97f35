"""Random trainings against the plain reference and across ranks: a seeded tenth here, all of them by `make test-fuzz`.

    python tests/test_fuzz.py [--count 240] [--first SEED]

runs so many configurations, prints each that fails as a script, made smaller, and ends with "N configurations, M failed".
"""

from __future__ import annotations

import argparse
import sys
import time

import pytest
import torch
from fuzzing import LAYERS, OPTIMIZERS, as_script, check, draw, shrink
from ranks import close_pool

FIRST, COUNT = 1000, 240


@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT // 10))
def test_a_random_training_equals_the_reference_to_the_last_bit(seed: int) -> None:
    configuration = draw(seed)
    wrong = check(configuration)
    assert wrong is None, f"{wrong}\n\n{as_script(configuration)}"


def test_the_seeds_draw_every_layer_optimizer_and_option() -> None:
    """Else the runs would leave out what they claim to try."""
    drawn = [draw(seed) for seed in range(FIRST, FIRST + COUNT)]
    assert {layer for c in drawn for layer in c.layers} == set(LAYERS)
    assert {(c.optimizer, c.options) for c in drawn} == {
        (name, tuple(options.items())) for name, sets in OPTIMIZERS.items() for options in sets
    }
    assert {(c.precision, c.reduce) for c in drawn} == {
        ("fp16", "exact"),
        ("fp16", "fp32"),
        ("bf16", "fp32"),
        ("fp32", "fp32"),
    }
    for field in (
        "ranks",
        "stage",
        "average",
        "max_grad_norm",
        "bucket_mb",
        "overlap",
        "no_sync",
        "tile",
        "autocast",
        "divide_by",
        "history",
        "between",
    ):
        assert len({getattr(c, field) for c in drawn}) > 1, field
    assert any(c.loud for c in drawn)
    assert any(c.idle for c in drawn)
    assert any(c.resume for c in drawn)


def test_a_wrong_run_is_found_and_made_smaller() -> None:
    """A fault that shows wherever there is more than one layer: the smallest such configuration is what is left."""
    start = draw(FIRST + 2)
    smallest = shrink(start, lambda c: "linear" in c.layers or len(c.layers) > 1, tries=200)
    assert len(smallest.layers) == (1 if "linear" in smallest.layers else 2)
    assert (smallest.ranks, smallest.width, smallest.bucket_mb, smallest.loud) == (1, 8, None, ())
    script = as_script(smallest)
    compile(script, "script", "exec")
    assert f"seed={smallest.seed}" in script


def main() -> int:
    parser = argparse.ArgumentParser(description="Random trainings against the plain reference and across ranks.")
    parser.add_argument("--count", type=int, default=COUNT, help="configurations to run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=FIRST, help="seed of the first one (default: %(default)s)")
    given = parser.parse_args()
    torch.set_num_threads(1)  # as ranks have: kernels of norms add in as many parts as there are threads
    failed, start = 0, time.monotonic()
    for number, seed in enumerate(range(given.first, given.first + given.count), 1):
        configuration = draw(seed)
        wrong = check(configuration)
        if wrong is not None:
            failed += 1
            smaller = shrink(configuration, lambda c: check(c) is not None)
            print(f"seed {seed}: {wrong}\n\n{as_script(smaller)}", flush=True)
        if number % 20 == 0:
            print(f"{number} of {given.count} in {time.monotonic() - start:.0f} s, {failed} failed", flush=True)
    close_pool()
    print(f"{given.count} configurations, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
