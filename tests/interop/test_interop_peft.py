"""Adapters by peft on a frozen base: adapters equal the plain reference, the base keeps every bit and its dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interop_models import POLICY, batch, expected_run, losses, maker, train_as_expected
from ranks import on_ranks
from torch import nn

import shardmp

LIMITS = {"timeout": 240.0, "group_timeout": 120.0}
CLIP = 0.02  # the gradient of adapters alone is small
TARGETS = {"gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def with_adapters(name: str, *, half: bool = False, norms: torch.dtype | None = None, **options: Any) -> Any:
    """Makes a model with LoRA adapters, whose second factor is not zero, so that both train from the first step."""

    def make() -> nn.Module:
        from peft import LoraConfig, get_peft_model

        base = maker(name)()
        base = base.half() if half else base
        if norms is not None:
            for module in base.modules():
                if isinstance(module, nn.LayerNorm):
                    module.to(norms)
        torch.manual_seed(13)
        config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=TARGETS[name], **options)
        model = get_peft_model(base, config)
        for each, parameter in model.named_parameters():
            if "lora_B" in each:
                nn.init.normal_(parameter, std=0.02)
        return model.train()

    return make


def frozen_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def assert_base_untouched(model: nn.Module, before: dict[str, torch.Tensor]) -> None:
    after = dict(model.named_parameters())
    for name, value in before.items():
        assert torch.equal(after[name].to(value.dtype), value), name
        assert after[name].grad is None, name


@pytest.mark.parametrize("name", TARGETS)
@on_ranks(2, **LIMITS)
def test_lora_on_an_fp32_base_equals_the_reference_and_leaves_the_base_alone(world_size: int, name: str) -> None:
    """deepspeedai/DeepSpeed#2615, huggingface/peft#1249: frozen weights got optimizer state, decay, or another dtype."""
    make = with_adapters(name)
    before = frozen_of(make())
    steps = losses(name, world_size)
    run = expected_run(make, steps, clip=CLIP)
    assert all("lora_" in each for each in run.masters)
    assert len(run.masters) < len(before)
    model, optimizer = train_as_expected(make, steps, run, clip=CLIP)
    assert_base_untouched(model, before)
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.float32}
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float16}
    for kind, num_copies in (("masters", 1), ("moments", 2)):
        whole_base = 4 * num_copies * sum(value.numel() for value in before.values())
        assert optimizer.memory()[kind] * world_size < whole_base / 2, "kept for the adapters alone"


@pytest.mark.parametrize("name", TARGETS)
@on_ranks(2, **LIMITS)
def test_lora_on_a_base_in_half_precision_equals_the_reference(world_size: int, name: str) -> None:
    """deepspeedai/DeepSpeed#8113: the usual base is FP16 already, its frozen norm layers among it."""
    make = with_adapters(name, half=True)
    before = frozen_of(make())
    assert {value.dtype for value in before.values()} == {torch.float16}
    steps = losses(name, world_size)
    # Norm layers compute in FP32: the reference says so by FP32 weights of the same values.
    run = expected_run(with_adapters(name, half=True, norms=torch.float32), steps, clip=CLIP)
    model, _ = train_as_expected(make, steps, run, clip=CLIP)
    assert_base_untouched(model, before)


@on_ranks(2, **LIMITS)
def test_lora_under_gradient_checkpointing_equals_the_reference(world_size: int) -> None:
    """huggingface/peft#137: with a frozen base nothing that enters a block requires a gradient."""
    plain = with_adapters("llama")

    def make() -> nn.Module:
        model = plain()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    steps = losses("llama", world_size, backwards=2)
    train_as_expected(make, steps, expected_run(plain, steps, clip=CLIP), clip=CLIP)


@on_ranks(2, **LIMITS)
def test_weights_saved_beside_adapters_train_with_them(world_size: int) -> None:
    """`modules_to_save` keeps a trainable copy of the head beside the frozen one."""
    make = with_adapters("llama", modules_to_save=["lm_head"])
    steps = losses("llama", world_size)
    run = expected_run(make, steps, clip=CLIP)
    assert any("modules_to_save" in name for name in run.masters)
    before = frozen_of(make())
    model, _ = train_as_expected(make, steps, run, clip=CLIP)
    assert_base_untouched(model, before)


@on_ranks(2, **LIMITS)
def test_a_disabled_adapter_gives_the_bases_output_right_after_a_step(rank: int) -> None:
    """Preference training takes its reference model from the same weights, with the adapters off."""
    plain = with_adapters("llama")()
    base = maker("llama")()
    kwargs = batch("llama", 3)
    model, optimizer = shardmp.shard(
        plain, torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5), precision=POLICY
    )
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = base(**kwargs).logits.float()
    optimizer.backward(model(**batch("llama", rank)).loss)
    assert not optimizer.step().skipped
    with torch.no_grad(), model.disable_adapter():
        found = model(**kwargs).logits
    with torch.no_grad():
        adapted = model(**kwargs).logits
    assert torch.equal(found, expected)
    assert not torch.equal(adapted, expected)


@on_ranks(2, **LIMITS)
def test_merged_adapters_give_the_masters_weights(rank: int) -> None:
    """The end of a run: what is merged must be the trained adapters, not those of before the last gather."""
    plain = with_adapters("llama")()
    start = {name: value.clone() for name, value in plain.state_dict().items()}
    model, optimizer = shardmp.shard(
        plain, torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.5), precision=POLICY
    )
    optimizer.backward(model(**batch("llama", rank)).loss)
    assert not optimizer.step().skipped
    optimizer.synchronize()
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    a = optimizer.master(f"{prefix}.lora_A.default.weight").half()
    b = optimizer.master(f"{prefix}.lora_B.default.weight").half()
    merged = model.module.merge_and_unload()
    found = merged.model.layers[0].self_attn.q_proj.weight
    # peft multiplies in FP32 on the CPU; the scaling is lora_alpha / r.
    expected = start[f"{prefix}.base_layer.weight"] + (b.float() @ a.float()) * 2.0
    assert torch.allclose(found.float(), expected, atol=1e-4)
    assert not torch.allclose(start[f"{prefix}.base_layer.weight"], expected, atol=1e-4)
