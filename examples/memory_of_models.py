"""Is dynamic memory 3 to 4 times static memory? What real models hold, traced without allocating any of it.

    python examples/memory_of_models.py                    # prints a table; --markdown, as in docs/precision.md

Takes a minute on a CPU. GPT is examples/gpt.py; the others come from the configurations of transformers, where it is
installed. Attention has no dropout, as the fused kernels of CPUs want it; dropout elsewhere is each model's own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from gpt import GPT, GPTConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardmp

HEADS = (
    "model",
    "parameters",
    "batch",
    "static",
    "FP32",
    "ratio",
    "autocast",
    "ratio",
    "shardmp",
    "ratio",
    "shardmp to FP32",
)


@dataclass(frozen=True)
class Case:
    """A model with a batch."""

    name: str
    make: Callable[[], nn.Module]
    batch: str
    loss: Callable[..., Tensor] | None = None


def next_byte(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of examples/train_gpt.py, of (batch, time + 1) bytes."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def from_transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """Makes a model of this class from its default configuration and `options`."""

    def make() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return make


def cases() -> list[Case]:
    """Models from 11.5 million to 1.2 billion parameters, at batches for which people use them."""
    found = [Case("GPT", lambda: GPT(GPTConfig()), f"{size}x129:int64", next_byte) for size in (4, 64)]
    if find_spec("transformers") is None:
        return found
    gpt2 = from_transformers("GPT2LMHeadModel", "GPT2Config", attn_pdrop=0.0)
    bert = from_transformers("BertForMaskedLM", "BertConfig", attention_probs_dropout_prob=0.0)
    resnet = from_transformers("ResNetForImageClassification", "ResNetConfig", num_labels=1000)
    llama = from_transformers(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    found += [Case("GPT-2", gpt2, f"input_ids={n}x1024:int64,labels={n}x1024:int64") for n in (1, 8)]
    found += [Case("BERT base", bert, f"input_ids={n}x512:int64,labels={n}x512:int64") for n in (4, 16)]
    images = "pixel_values=32x3x224x224,labels=32:int64"
    found.append(Case("ResNet-50", resnet, images))
    found += [Case("Llama 3.2 1B", llama, f"input_ids={n}x2048:int64,labels={n}x2048:int64") for n in (1, 4)]
    return found


def row_of(case: Case) -> list[str]:
    """A row of the table: gigabytes, and dynamic memory as a multiple of static memory, all on one device."""
    found = shardmp.budget(case.make, batch=case.batch, loss=case.loss, precision="fp16", ranks=1)
    ways = found["activations"]["memory"]
    dynamic = {name: row["peak"] + row["batch"] for name, row in ways.items()}
    static = 16 * found["parameters"]
    first = case.batch.split(",")[0].partition("=")[2] or case.batch
    cells = [case.name, f"{found['parameters'] / 1e6:,.1f}M", first.partition(":")[0], f"{static / 1e9:.3g}"]
    for size in dynamic.values():
        cells += [f"{size / 1e9:.3g}", f"{size / static:.2f}"]
    fp32, _, ours = dynamic.values()
    return [*cells, f"{ours / fp32:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", action="store_true", help="print the table as docs/precision.md has it")
    parser.add_argument("--only", default="", help="models whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row_of(case) for case in cases() if options.only in case.name]
    if options.markdown:
        for cells in (HEADS, ("---",) * len(HEADS), *rows):
            print(f"| {' | '.join(cells)} |")
        return
    table = Table(*HEADS, title="GB on one device; ratio: dynamic to static", title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=max(140, Console().width)).print(table)


if __name__ == "__main__":
    main()
