"""Hugging Face transformers: randomly initialised small models of six kinds train as the plain reference does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from helpers import late_gathers
from interop_models import INIT_SCALE, MODELS, POLICY, batch, expected_run, losses, maker, train_as_expected
from ranks import on_ranks
from torch import nn

import shardmp

LIMITS = {"timeout": 240.0, "group_timeout": 120.0}  # importing transformers takes long on a busy machine


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, **LIMITS)
def test_transformers_models_equal_the_reference(world_size: int, name: str, attention: str) -> None:
    make = maker(name, attn_implementation=attention)
    steps = losses(name, world_size)
    model, _ = train_as_expected(make, steps, expected_run(make, steps))
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@on_ranks(2, **LIMITS)
def test_several_backwards_of_transformers_models_equal_the_reference(world_size: int, name: str) -> None:
    """Accumulation, as every fine-tuning recipe has it; stage 1 has its own way under `no_sync`."""
    make = maker(name)
    steps = losses(name, world_size, backwards=2)
    expected = {no_sync: expected_run(make, steps, no_sync=no_sync) for no_sync in (False, True)}
    train_as_expected(make, steps, expected[False], stage=2)
    train_as_expected(make, steps, expected[True], stage=1, no_sync=True)


@pytest.mark.parametrize(("name", "pattern"), [("llama", "*norm"), ("t5", "*.wo")])
@on_ranks(2, **LIMITS)
def test_norms_of_llama_and_the_layers_in_which_t5_overflows_can_stay_fp32(
    world_size: int, name: str, pattern: str
) -> None:
    """Pretrained T5 overflows FP16 in its feed-forward's `wo`; transformers' own RMS norms are not torch's."""
    make = maker(name)
    steps = losses(name, world_size)
    keep = (*reference.NORM_LAYERS, pattern)
    policy = shardmp.Precision(init_scale=INIT_SCALE, keep_fp32=keep)
    model, _ = train_as_expected(make, steps, expected_run(make, steps, keep_fp32=keep), precision=policy)
    kept = [each for each, p in model.named_parameters() if p.dtype == torch.float32]
    word = pattern.strip("*.")
    assert kept == [each for each, _ in make().named_parameters() if f"{word}.weight" in each]


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "whisper"])
@on_ranks(2, **LIMITS)
def test_embeddings_that_transformers_tied_stay_tied_and_train_as_one(world_size: int, name: str) -> None:
    """NVIDIA/Megatron-LM#7228, deepspeedai/DeepSpeed#8376: tied weights fell apart, or were counted twice."""
    make = maker(name)
    tied = _tied(make())
    assert tied, "this model ties nothing: this test tests nothing"
    steps = losses(name, world_size)
    run = expected_run(make, steps)
    model, optimizer = train_as_expected(make, steps, run)
    assert _tied(model.module) == tied
    for names in tied:
        values = [model.state_dict()[each] for each in names]
        assert len({value.data_ptr() for value in values}) == 1
        trained = [each for each in names if each in run.masters]
        assert len(trained) == 1
        assert torch.equal(values[-1], optimizer.master(trained[0]).half())


def _tied(model: nn.Module) -> list[tuple[str, ...]]:
    """Groups of names of one parameter."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


@pytest.mark.parametrize("name", ["llama", "bert", "whisper"])
@on_ranks(2, **LIMITS)
def test_rotary_tables_positions_and_frozen_weights_keep_dtype_and_value(world_size: int, name: str) -> None:
    """deepspeedai/DeepSpeed#4932, huggingface/transformers#25681: a model that is cast has its rotary tables rounded."""

    def kept(model: nn.Module) -> dict[str, torch.Tensor]:
        frozen = {each: p.detach() for each, p in model.named_parameters() if not p.requires_grad}
        return {**dict(model.named_buffers()), **frozen}

    make = maker(name)
    before = kept(make())
    assert before, "this model keeps nothing: this test tests nothing"
    steps = losses(name, world_size)
    model, _ = train_as_expected(make, steps, expected_run(make, steps))
    after = kept(model.module)
    assert after.keys() == before.keys()
    for each, value in before.items():
        assert after[each].dtype == value.dtype, each
        assert torch.equal(after[each], value), each


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, **LIMITS)
def test_gradient_checkpointing_of_transformers_gives_the_bits_of_training_without_it(
    world_size: int, name: str
) -> None:
    """pytorch/pytorch#81296: what is recomputed inside backward must see the same weights, dtypes and autocast."""
    # Under checkpointing T5 asks a gradient of its position bias, for which SDPA takes another kernel.
    plain = maker(name, attn_implementation="eager" if name == "t5" else "sdpa")

    def make() -> nn.Module:
        model: Any = plain()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    steps = losses(name, world_size)
    run = expected_run(plain, steps)
    calls: list[int] = []

    def make_counted() -> nn.Module:
        model = make()
        block = next(module for module in model.modules() if _is_checkpointed(module))
        first = next(module for module in block.modules() if not list(module.children()))
        first.register_forward_pre_hook(lambda *_: calls.append(1))
        return model

    train_as_expected(make_counted, steps, run)
    assert len(calls) == 2 * len(steps), "what is in a block runs in forward and again in backward"


def _is_checkpointed(module: nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing


@on_ranks(2, **LIMITS)
def test_outputs_stay_model_outputs_with_fp32_logits(rank: int) -> None:
    """Users write `output.loss` and `output.logits`, and pass `past_key_values` on."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    plain = maker("llama")()
    model, optimizer = shardmp.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), precision=POLICY)
    output = model(**batch("llama", rank))
    assert type(output) is CausalLMOutputWithPast
    assert (output.loss.dtype, output.logits.dtype) == (torch.float32, torch.float32)
    assert output.past_key_values.layers[0].keys.dtype == torch.float16
    optimizer.backward(output.loss)
    assert not optimizer.step().skipped


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "whisper"])
@on_ranks(2, **LIMITS)
def test_generate_right_after_a_step_equals_that_of_a_plain_copy_with_the_gathered_weights(
    world_size: int, rank: int, name: str
) -> None:
    """huggingface/trl and OpenRLHF roll out between steps: a read before the gather ends would give garbage."""
    make = maker(name)
    prompt = {key: value for key, value in batch(name, 5).items() if key in ("input_ids", "input_features")}
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    plain = make()
    model, optimizer = shardmp.shard(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.003), precision=POLICY, bucket_mb=0.02
    )
    for step in losses(name, world_size):
        optimizer.backward(step[0][rank](model))
        with late_gathers():
            assert not optimizer.step().skipped
            model.eval()
            found = model.generate(**prompt, **options)
        model.train()
    assert torch.isfinite(found.scores[0]).any()

    copy = make().eval()
    masters = {each: optimizer.master(each) for each in optimizer._names}
    replica = reference.Replica(copy, torch.float16, reference.NORM_LAYERS, autocast=True)
    kept = reference.kept_in_fp32(copy, reference.NORM_LAYERS)[1]
    for each, master in masters.items():
        replica.parameters[each].data = master if each in kept else master.half()
    with torch.autocast("cpu", torch.float16):
        expected = replica.model.generate(**prompt, **options)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.scores, expected.scores, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
@on_ranks(2, **LIMITS)
def test_save_pretrained_right_after_a_step_writes_every_weight_once(rank: int, name: str, tmp_path: Path) -> None:
    """Parameters are views of a few storages: a writer that keeps one tensor of each would lose the rest."""
    plain = maker(name)()
    model, optimizer = shardmp.shard(plain, torch.optim.AdamW(plain.parameters(), lr=0.003), precision=POLICY)
    optimizer.backward(model(**batch(name, rank)).loss)
    with late_gathers():
        assert not optimizer.step().skipped
        model.save_pretrained(tmp_path)  # called on every rank, it writes on the first
    torch.distributed.barrier()
    # Without a dtype it loads everything in 16 bits, as most of the file is: the norm layers' weights too.
    loaded = type(plain).from_pretrained(tmp_path, dtype=torch.float32, local_files_only=True)
    values = dict(loaded.named_parameters())
    for each in optimizer._names:
        master = optimizer.master(each)
        assert torch.equal(values[each].float(), master.to(dict(plain.named_parameters())[each].dtype).float()), each
