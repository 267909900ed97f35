"""Convolution nets as torchvision and diffusion models build them, with BatchNorm, written out here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import reference
import torch
from interop_models import expected_run, train_as_expected
from ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """A residual block of ResNet, with a strided convolution on the way past it where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        past = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(x)) + past)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 12, 5, 2, padding=2, bias=False), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.layers = nn.Sequential(Block(12, 12, 1), Block(12, 20, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(20, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.layers(self.stem(x))).flatten(1))


def double(inputs: int, outputs: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), norm(outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1)
    )


class UNet(nn.Module):
    """Down, and up again by a transposed convolution and by interpolation, with what was on the way down beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = double(3, 8, nn.BatchNorm2d)
        self.down2 = double(8, 16, lambda width: nn.GroupNorm(4, width))
        self.middle = double(16, 16, nn.BatchNorm2d)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.join2 = double(32, 8, nn.BatchNorm2d)
        self.up1 = nn.ConvTranspose2d(8, 8, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.join1 = double(16, 8, nn.InstanceNorm2d)
        self.out = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        x = self.middle(F.avg_pool2d(second, 2))
        x = self.join2(torch.cat([self.up2(x), second], 1))
        x = self.join1(torch.cat([self.up1(x), first], 1)) + F.interpolate(x, scale_factor=2, mode="bilinear")
        return self.out(x).mean((2, 3))


NETS = {"resnet": ResNet, "unet": UNet}


def make_net(name: str, *, channels_last: bool = False) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(11)
        net = NETS[name]()
        return net.to(memory_format=torch.channels_last) if channels_last else net

    return make


def images(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 3, 16, 16, generator=generator), torch.randint(0, 5, (4,), generator=generator)


def losses(world_size: int, seen: list[nn.Module]) -> list[reference.Step]:
    """Cross-entropy on images of each rank's own; `seen` gets rank 0's model, to look at its buffers afterwards."""

    def loss_for(step: int, rank: int) -> reference.Loss:
        x, targets = images(1 + 10 * step + rank)

        def loss(model: nn.Module) -> Tensor:
            if rank == 0:
                seen[:] = [model]
            return F.cross_entropy(model(x), targets)

        return loss

    return [[[loss_for(step, rank) for rank in range(world_size)]] for step in range(3)]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", NETS)
@on_ranks(2, timeout=120.0)
def test_convolution_nets_with_batchnorm_equal_the_reference(world_size: int, name: str, channels_last: bool) -> None:
    """Running statistics too: they are FP32, rank 0's on every rank, and what evaluation then stands on."""
    make = make_net(name, channels_last=channels_last)
    seen: list[nn.Module] = []
    steps = losses(world_size, seen)
    run = expected_run(make, steps)
    plain = seen[0].model
    model, _ = train_as_expected(make, steps, run)
    theirs = dict(plain.named_buffers())
    assert theirs
    for each, value in model.named_buffers():
        assert value.dtype == theirs[each].dtype, each
        assert torch.equal(value, theirs[each]), each
    assert not any(torch.equal(value, torch.zeros_like(value)) for value in theirs.values())

    x, _ = images(99)
    model.eval()
    plain.eval()
    parameters = dict(plain.named_parameters())
    for each, master in run.masters.items():
        parameters[each].data = master.to(parameters[each].dtype)
    with torch.no_grad():
        assert torch.equal(model(x), seen_call(plain, x))


def seen_call(plain: nn.Module, x: Tensor) -> Tensor:
    """The reference's replica in evaluation: autocast around it, FP32 out."""
    with torch.autocast("cpu", torch.float16):
        return plain(x).float()
