"""Real cases of loss scaling and of FP16's range: what users of such libraries ran into, each with its source.

Every test asserts on every rank: many of these show on one rank only. Numbers are powers of two or small fractions, so
`==` is meant unless a tolerance is written.
"""

import math
import warnings

import pytest
import torch
from case_tools import STAGES, Weights, fp16, one_step, states, value
from ranks import on_ranks
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

import shardmp

# --------------------------------------------------------------------------------------------------------------------
# Loss scale


@STAGES
@on_ranks(2)
def test_c01_overflow_on_one_rank_pytorch_115710(rank: int, stage: int) -> None:
    """pytorch/pytorch#115710, ecmwf/WeatherGenerator#2718, facebookresearch/fairscale#421: one rank alone skipped."""
    model = Weights(w=4)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.5), precision=fp16(1024.0), stage=stage)

    report = one_step(model, optimizer, w=torch.tensor([1.0, 1.0, 1.0, 128.0 if rank else 1.0]))
    assert value(model) == [1.0] * 4
    assert optimizer.master("w").tolist() == [1.0] * 4
    assert report.skipped is True
    assert (report.loss_scale, optimizer.loss_scale, optimizer.skipped_steps) == (1024.0, 512.0, 1)
    overflow = report.overflow
    assert (overflow.parameters, overflow.kind, overflow.ranks, overflow.step) == (("w",), "inf", (1,), 1)

    report = one_step(model, optimizer, w=torch.ones(4))
    assert report.skipped is False
    assert report.overflow is None
    assert value(model) == [0.5] * 4
    assert (optimizer.loss_scale, optimizer.skipped_steps) == (512.0, 1)


@STAGES
@pytest.mark.parametrize("no_sync", [False, True])
@on_ranks(2)
def test_c03_overflow_in_a_micro_batch_espnet_3283(rank: int, stage: int, no_sync: bool) -> None:
    """espnet/espnet#3283, EleutherAI/DeeperSpeed#66: inf stayed in the accumulated gradient."""
    model = Weights(w=4)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=0.5), precision=fp16(1024.0), stage=stage)

    def window(large: bool) -> shardmp.StepReport:
        scales = []
        for micro_batch in range(4):
            x = torch.tensor([1.0, 1.0, 1.0, 1024.0 if large and micro_batch == 1 and rank == 1 else 1.0])
            scales.append(optimizer.loss_scale)
            if no_sync and micro_batch < 3:
                with model.no_sync():
                    optimizer.backward(model(w=x) / 4)
            else:
                optimizer.backward(model(w=x) / 4)
        assert len(set(scales)) == 1
        return optimizer.step()

    assert window(large=True).skipped
    assert value(model) == [1.0] * 4
    assert (optimizer.loss_scale, optimizer.skipped_steps) == (512.0, 1)
    assert not window(large=False).skipped
    assert value(model) == [0.5] * 4
    assert (optimizer.loss_scale, optimizer.skipped_steps) == (512.0, 1)


@STAGES
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["default", "fused", "foreach"])
@pytest.mark.parametrize("scheduler_first", [False, True])
@on_ranks(2)
def test_c04_schedule_on_a_skipped_step_pytorch_55585(stage: int, options: dict, scheduler_first: bool) -> None:
    """pytorch/pytorch#55585, pytorch/pytorch#67590, huggingface/transformers#11144, huggingface/accelerate#4242."""
    model = Weights(w=1)
    plain = SGD(model.parameters(), lr=1.0, **options)
    scheduler = LambdaLR(plain, lambda epoch: 0.5**epoch) if scheduler_first else None
    model, optimizer = shardmp.shard(model, plain, precision=fp16(4.0), stage=stage)
    scheduler = scheduler or LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    epochs, values, skips = [], [], []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for x in (math.inf, 1.0, 1.0):
            report = one_step(model, optimizer, w=x)
            skips.append(report.skipped)
            if not report.skipped:
                scheduler.step()
            epochs.append(scheduler.last_epoch)
            values += value(model)
    assert skips == [True, False, False]
    assert epochs == [0, 1, 2]
    assert values == [1.0, 0.0, -0.5]
    assert not [str(w.message) for w in seen if "lr_scheduler.step()" in str(w.message)]


@STAGES
@pytest.mark.parametrize("kind", ["adam", "adam-foreach", "sgd", "sgd-foreach"])
@on_ranks(2)
def test_c07_state_untouched_by_skipped_steps_deepspeed_8432(rank: int, stage: int, kind: str) -> None:
    """deepspeedai/DeepSpeed#8432, allenai/OLMo-core#309: an inf had already reached the moments or the step count."""
    model = Weights(w=4)
    foreach = True if kind.endswith("foreach") else None
    if kind.startswith("adam"):
        plain = Adam(model.parameters(), lr=2.0**-6, foreach=foreach)
    else:
        plain = SGD(model.parameters(), lr=2.0**-6, momentum=0.5, foreach=foreach)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(1024.0), stage=stage)
    for i in range(3):
        report = one_step(model, optimizer, w=torch.tensor([1.0, 1.0, 1.0, 128.0 * 2**i if rank else 1.0]))
        assert report.skipped
        for state in states(optimizer):
            assert all(not torch.as_tensor(number).any() for number in state.values() if number is not None), state
    assert optimizer.loss_scale == 128.0
    assert value(model) == [1.0] * 4

    one_step(model, optimizer, w=torch.ones(4))
    assert value(model) == [0.984375] * 4
    held = states(optimizer)
    assert len(held) == (1 if rank == 0 else 0)  # four elements lie on one rank
    for state in held:
        if kind.startswith("adam"):
            assert state["step"] == 1
        else:
            assert state["momentum_buffer"][:4].tolist() == [1.0] * 4


class Fp16Loss(nn.Module):
    """The loss is an FP16 number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (self.w * x.to(self.w.dtype)).sum()


@STAGES
@pytest.mark.parametrize("output", ["param", "fp32"])
@on_ranks(2)
def test_c08_fp16_seed_of_65536_overflows_once_pytorch_76918(stage: int, output: str) -> None:
    """pytorch/pytorch#76918: 65536 is not an FP16 number, so the first scaled seed is inf, whatever the loss's dtype."""
    model = Fp16Loss()
    plain = SGD(model.parameters(), lr=1.0)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(65536.0, output=output), stage=stage)
    skips = []
    for _ in range(2):
        loss = model(torch.tensor(0.25))
        assert loss.dtype == (torch.float16 if output == "param" else torch.float32)
        optimizer.backward(loss)
        skips.append(optimizer.step().skipped)
    assert skips == [True, False]
    assert optimizer.loss_scale == 32768.0
    assert value(model) == [0.75] * 2


@STAGES
@on_ranks(2)
def test_c08_fp16_loss_is_scaled_and_averaged_in_fp32_pytorch_85791(stage: int) -> None:
    """pytorch/pytorch#85791, deepspeedai/DeepSpeed#1599: 2 x 40000 is inf in FP16, its gradients are not."""
    model = Fp16Loss()
    plain = SGD(model.parameters(), lr=2.0**-16)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(2.0, output="param"), stage=stage)
    loss = model(torch.tensor(20000.0))
    assert loss.dtype == torch.float16
    optimizer.backward(loss)
    report = optimizer.step()
    assert not report.skipped
    assert optimizer.skipped_steps == 0
    assert report.loss == 40000.0
    assert optimizer.master("w").tolist() == [0.69482421875] * 2


# --------------------------------------------------------------------------------------------------------------------
# FP16's range


@STAGES
@pytest.mark.parametrize(
    ("size", "gradient", "norm", "right"), [(1024, 3000.0, 96000.0, 0.9921875), (4, 300.0, 600.0, 0.875)]
)
@on_ranks(2)
def test_c09_norm_beyond_65504_fairscale_263(stage: int, size: int, gradient: float, norm: float, right: float) -> None:
    """facebookresearch/fairscale#263, tracel-ai/burn#5699, facebookresearch/fairseq#2384: the norm became inf."""
    model = Weights(w=size)
    plain = SGD(model.parameters(), lr=0.25)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(1.0), stage=stage, max_grad_norm=1.0)
    report = one_step(model, optimizer, w=gradient)
    assert report.grad_norm == norm
    assert not report.skipped
    assert optimizer.skipped_steps == 0
    assert value(model) == [right] * size


@STAGES
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("how", ["option", "method", "written"])
@on_ranks(2)
def test_c10_clipping_comes_after_unscaling_unet_468(stage: int, scale: float, how: str) -> None:
    """milesial/Pytorch-UNet#468, harubaru/waifu-diffusion#64: scaled gradients were clipped, and training stood still."""
    model = Weights(w=4)
    plain = SGD(model.parameters(), lr=0.5)
    at_start = 1.0 if how == "option" else None
    model, optimizer = shardmp.shard(model, plain, precision=fp16(scale), stage=stage, max_grad_norm=at_start)
    optimizer.backward(model(w=4.0))
    if how == "method":
        optimizer.clip_grad_norm_(1.0)
    elif how == "written":
        optimizer.max_grad_norm = 1.0
    report = optimizer.step()
    assert report.grad_norm == 8.0
    assert value(model) == [0.75] * 4
    # The factor is 1 / (8 + 1e-6) as in torch, so the master is a rounding away from 0.75.
    torch.testing.assert_close(optimizer.master("w"), torch.full((4,), 0.75), rtol=0, atol=2e-7)


@STAGES
@on_ranks(2)
def test_c10_an_infinite_norm_makes_no_nan_pytorch_46849(stage: int) -> None:
    """pytorch/pytorch#46849: a norm of inf gave a factor of 0, and 0 x inf is NaN."""
    model = Weights(w=2)
    plain = SGD(model.parameters(), lr=0.5, momentum=0.5)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(4.0), stage=stage, max_grad_norm=1.0)
    report = one_step(model, optimizer, w=torch.tensor([1.0, math.inf]))
    assert report.skipped
    assert value(model) == [1.0, 1.0]
    assert optimizer.master("w").tolist() == [1.0, 1.0]
    assert all(torch.isfinite(state["momentum_buffer"]).all() for state in states(optimizer))
    assert not one_step(model, optimizer, w=torch.tensor([0.5, 0.5])).skipped
    assert value(model) == [0.75, 0.75]


@STAGES
@on_ranks(2)
def test_c11_adams_eps_is_zero_in_fp16_glide_finetune_5(stage: int) -> None:
    """afiaka87/glide-finetune#5, google-deepmind/optax#1754: 1e-8 is 0 in FP16, and 0/0 is NaN."""
    model = Weights(w=2)
    plain = Adam(model.parameters(), lr=2.0**-6, eps=1e-8)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(1024.0), stage=stage)
    one_step(model, optimizer, w=torch.tensor([0.0, 2.0**-14]))
    master = optimizer.master("w")
    assert master[0] == 1.0
    assert master[1].item() == pytest.approx(0.98437756, abs=1e-7)
    assert value(model) == [1.0, 0.984375]


@STAGES
@pytest.mark.parametrize(("scale", "right"), [(1024.0, 0.9990234375), (1.0, 1.0)])
@on_ranks(2)
def test_c12_unscaling_is_done_in_fp32_peft_341(stage: int, scale: float, right: float) -> None:
    """huggingface/peft#341, huggingface/transformers#23165, deepspeedai/DeepSpeed#5426: small gradients were flushed."""
    model = Weights(w=2)
    plain = SGD(model.parameters(), lr=2.0**16)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(scale), stage=stage)
    one_step(model, optimizer, w=2.0**-26)
    assert optimizer.master("w").tolist() == [right] * 2
    assert value(model) == [right] * 2


@STAGES
@pytest.mark.parametrize("no_sync", [False, True])
@pytest.mark.parametrize("average", ["ranks", "micro_batches"])
@on_ranks(2)
def test_c14_accumulation_is_fp32_pytorch_106395(stage: int, no_sync: bool, average: str) -> None:
    """pytorch/pytorch#106395: 2048 + 1 is 2048 in FP16, so fifteen ones vanished beside it."""
    model = Weights(w=2)
    plain = SGD(model.parameters(), lr=1.0)
    model, optimizer = shardmp.shard(model, plain, precision=fp16(1.0), stage=stage, average=average)
    for micro_batch, x in enumerate([2048.0] + [1.0] * 15):

        def backward(x: float = x) -> None:
            loss = model(w=x)
            optimizer.backward(loss / 16 if average == "ranks" else loss)

        if no_sync and micro_batch < 15:
            with model.no_sync():
                backward()
        else:
            backward()
    assert optimizer.full_grad("w").tolist() == [128.9375] * 2
    optimizer.step()
    assert optimizer.master("w").tolist() == [-127.9375] * 2


@STAGES
@on_ranks(2)
def test_c14_parameter_used_in_the_last_micro_batch_only_pytorch_196996(stage: int) -> None:
    """pytorch/pytorch#196996: fresh 16-bit gradients met accumulated FP32 ones, and an assertion failed."""
    model = Weights(a=2, b=2)
    model, optimizer = shardmp.shard(model, SGD(model.parameters(), lr=1.0), precision="bf16", stage=stage)
    optimizer.backward(model(a=1.0))
    optimizer.backward(model(a=1.0, b=4.0))
    assert optimizer.full_grad("a").tolist() == [2.0] * 2
    assert optimizer.full_grad("b").tolist() == [4.0] * 2
    optimizer.step()
    assert optimizer.master("a").tolist() == [-1.0] * 2
    assert optimizer.master("b").tolist() == [-3.0] * 2


class Rotary(nn.Module):
    """Buffers of every kind, integer inputs."""

    def __init__(self) -> None:
        super().__init__()
        frequencies = 1 / 10000 ** (torch.arange(0, 32, 2) / 32)
        self.register_buffer("inv_freq", frequencies.clone())
        self.register_buffer("copy", frequencies.clone(), persistent=False)
        self.register_buffer("ids", torch.tensor([2049]))
        self.register_buffer("mask", torch.tensor([True]))
        self.linear = nn.Linear(32, 4)

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert ids.dtype == torch.int64
        angles = torch.arange(2048)[:, None] * self.inv_freq
        return self.linear(x).float().sum() * self.mask, angles.cos(), ids


@STAGES
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("param", ["fp16", "bf16"])
@on_ranks(2)
def test_c17_buffers_and_integers_are_never_cast_gpt_neox_1003(stage: int, autocast: bool, param: str) -> None:
    """EleutherAI/gpt-neox#1003, huggingface/transformers#25681, mosaicml/composer#197, deepspeedai/DeepSpeed#1144."""
    plain = Rotary()
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    right = (torch.arange(2048)[:, None] * before["inv_freq"]).cos()
    policy = shardmp.Precision(param=param, autocast=autocast)
    model, optimizer = shardmp.shard(plain, SGD(plain.parameters(), lr=0.125), precision=policy, stage=stage)
    for _ in range(2):
        loss, cosines, ids = model(torch.tensor([40001]), torch.ones(3, 32))
        assert ids.dtype == torch.int64
        assert ids.item() == 40001
        assert (cosines - right).abs().max() < 1e-3
        optimizer.backward(loss.sum())
        optimizer.step()
        for name, buffer in model.named_buffers():
            assert buffer.dtype == before[name].dtype
            assert torch.equal(buffer, before[name])
