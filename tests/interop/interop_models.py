"""Small models of other people's classes, from their configurations alone, and losses on made-up data.

Owns   nothing. Each library is imported where it is used, so that collecting the tests needs none of them.
Takes  a name of `MODELS`, and an attention implementation.
Gives  functions that make the same model each time, and losses by step, backward and rank as the reference takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import reference
import torch
from test_step import assert_equal, expect, train
from torch import Tensor, nn

import shardmp

VOCABULARY = 96
# Gradients of a mean loss of such models stay below 1, times 256 far below 65504.
INIT_SCALE = 256.0
POLICY = shardmp.Precision(init_scale=INIT_SCALE)

Make = Callable[[], nn.Module]


def _quiet() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def gpt2(**options: Any) -> nn.Module:
    t = _quiet()
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 3}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, **off, bos_token_id=1, eos_token_id=2, **options))


def llama(**options: Any) -> nn.Module:
    t = _quiet()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 112, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, **heads, **options))


def bert(**options: Any) -> nn.Module:
    t = _quiet()
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 112, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 3}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return t.BertForMaskedLM(t.BertConfig(**sizes, **heads, **off, **options))


def t5(**options: Any) -> nn.Module:
    t = _quiet()
    sizes = {"vocab_size": VOCABULARY, "d_model": 48, "d_kv": 16, "d_ff": 112, "num_layers": 2, "num_heads": 3}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, **options))


def vit(**options: Any) -> nn.Module:
    t = _quiet()
    sizes = {"hidden_size": 48, "intermediate_size": 112, "image_size": 16, "patch_size": 4, "num_labels": 7}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 3}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return t.ViTForImageClassification(t.ViTConfig(**sizes, **heads, **off, **options))


def whisper(**options: Any) -> nn.Module:
    t = _quiet()
    sizes = {"vocab_size": VOCABULARY, "num_mel_bins": 8, "d_model": 48, "encoder_layers": 2, "decoder_layers": 2}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    sizes |= {"encoder_ffn_dim": 112, "decoder_ffn_dim": 112, "max_source_positions": 16, "max_target_positions": 24}
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return t.WhisperForConditionalGeneration(t.WhisperConfig(**sizes, **heads, **off, **ids, **options))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "whisper": whisper,
}


def maker(name: str, **options: Any) -> Make:
    """Makes the model with the same random weights each time, in training mode, as a user's script would."""

    def make() -> nn.Module:
        torch.manual_seed(11)
        return MODELS[name](**options).train()

    return make


def batch(name: str, seed: int) -> dict[str, Tensor]:
    """Inputs with padding where the model takes a mask, and labels of which some do not count."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(3, VOCABULARY, shape, generator=generator)

    if name == "vit":
        pixels = torch.randn(3, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 7, (3,), generator=generator)}
    labels = tokens(2, 9)
    labels[1, 6:] = -100
    if name == "whisper":
        return {"input_features": torch.randn(2, 8, 32, generator=generator), "labels": labels}
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": tokens(2, 9), "attention_mask": mask, "labels": labels}


def losses(name: str, world_size: int, steps: int = 3, backwards: int = 1) -> list[reference.Step]:
    """The model's own loss on a batch of its own for each step, backward and rank."""

    def loss_for(step: int, backward: int, rank: int) -> reference.Loss:
        inputs = batch(name, 1 + 100 * step + 10 * backward + rank)
        return lambda model: model(**inputs)["loss"]

    return [[[loss_for(s, b, r) for r in range(world_size)] for b in range(backwards)] for s in range(steps)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Over what trains alone, as recipes for adapters write it."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.003, weight_decay=0.1)


def expected_run(make: Make, steps: list[reference.Step], *, clip: float = 0.5, **options: Any) -> reference.Run:
    """The reference's run, which must have trained: no step skipped, clipping active, every weight moved."""
    scale = reference.LossScale(init_scale=INIT_SCALE)
    run = expect(make, adamw, steps, loss_scale=scale, fused=True, max_grad_norm=clip, **options)
    assert run.skipped_steps == 0
    assert any(step.norm > clip for step in run.trace), [step.norm for step in run.trace]
    start = dict(make().named_parameters())
    assert not any(torch.equal(master, start[name].float()) for name, master in run.masters.items())
    return run


def train_as_expected(
    make: Make, steps: list[reference.Step], run: reference.Run, *, clip: float = 0.5, **options: Any
) -> tuple[shardmp.ShardedModule, shardmp.ShardedOptimizer]:
    """This rank's part with the library, in several buckets; masters and parameters are those of `run`, by bits."""
    options = {"precision": POLICY, "stage": 2, "bucket_mb": 0.02, **options}
    found = train(make, adamw, steps, max_grad_norm=clip, **options)
    assert_equal(found, run)
    return found[0], found[1]
