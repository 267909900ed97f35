"""One small training, by the full recipe and with each technique of mixed precision taken away.

Owns the recipes, the model that can follow them, and the loop that trains it. Takes batches of bytes; gives a `Run`: what
the losses were and what was lost. "The full recipe" is shardmp itself; a run that lacks a technique is a plain loop here,
since shardmp has no switch to leave one out. AdamW computes in FP32 in all runs, and its moments are FP32 in all but pure
BF16, so that a run differs from the recipe in what its name says and in nothing else.
"""

import math
import time
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmp

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 64, 128, 4, 2, 8
# The batch is 256 times as large as what this process computes, as on 256 ranks or in 256 micro-batches: the loss is divided
# by the whole number of tokens. AdamW takes no notice of a factor, but FP16 gradients do.
SHARES_OF_BATCH = 256
LR, FINE_LR, EPS = 1e-3, 1e-5, 1e-12
Batch = tuple[Tensor, Tensor]
K_OF_TENSOR_CORE = 16  # products that one instruction adds before its accumulator is written


@dataclass(frozen=True)
class Recipe:
    """One way to train. The defaults are the full recipe.

    Attributes:
        dtype: of activations, gradients and of the weights that products see.
        backup: whether the update goes to FP32 weights; else to those of `dtype`.
        scaled: whether the loss is scaled.
        fp32_sums: whether products of matrices add in FP32; else each accumulator is rounded to `dtype`.
        fp32_statistics: whether norms and softmax are computed in FP32.
        fp32_moments: whether AdamW's state is.
    """

    name: str
    dtype: torch.dtype = torch.float16
    backup: bool = True
    scaled: bool = True
    fp32_sums: bool = True
    fp32_statistics: bool = True
    fp32_moments: bool = True


FULL = Recipe("the full recipe (shardmp)")
RECIPES = (
    Recipe("FP32", torch.float32, scaled=False),
    FULL,
    replace(FULL, name="no weight backup", backup=False),
    replace(FULL, name="no loss scale", scaled=False),
    replace(FULL, name="FP16 sums in products", fp32_sums=False),
    replace(FULL, name="FP16 norms and softmax", fp32_statistics=False),
    Recipe("pure BF16", torch.bfloat16, backup=False, scaled=False, fp32_moments=False),
)


# -- arithmetic without FP32


def sum_in_16_bits(values: Tensor) -> Tensor:
    """The sum over the last dimension, one addition after another, each rounded to the dtype of `values`."""
    total = torch.zeros_like(values[..., 0])
    for part in values.unbind(-1):
        total = total + part
    return total


class Sum16(torch.autograd.Function):
    """`sum_in_16_bits` with the gradient of a sum."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:
        ctx.shape = values.shape
        return sum_in_16_bits(values)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad.unsqueeze(-1).expand(ctx.shape)


def product_16(a: Tensor, b: Tensor) -> Tensor:
    """(m, k) @ (k, n) with 16-bit accumulators: what a Tensor Core does where FP32 accumulation is switched off."""
    total = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for start in range(0, a.shape[1], K_OF_TENSOR_CORE):
        part = slice(start, start + K_OF_TENSOR_CORE)
        total = (total.float() + a[:, part].float() @ b[part].float()).to(a.dtype)
    return total


class Linear16(torch.autograd.Function):
    """x @ w^T, and its two gradients, by `product_16`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product_16(x.flatten(0, -2), weight.t()).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        return product_16(flat, weight).view_as(x), product_16(flat.t(), x.flatten(0, -2))


# -- the model


class Norm(nn.LayerNorm):
    """LayerNorm, which shardmp keeps in FP32; `fp32 = False` computes and adds in the dtype of its input."""

    fp32 = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fp32:
            weight, bias = self.weight.float(), self.bias.float()
            return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)
        mean = Sum16.apply(x) / x.shape[-1]
        centred = x - mean.unsqueeze(-1)
        variance = Sum16.apply(centred * centred) / x.shape[-1]
        return centred / torch.sqrt(variance + self.eps).unsqueeze(-1) * self.weight + self.bias


class Linear(nn.Linear):
    fp32_sums = True

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.fp32_sums else Linear16.apply(x, self.weight)


class Block(nn.Module):
    fp32_softmax = True

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(WIDTH), Norm(WIDTH)
        self.query_key_value = Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = Linear(WIDTH, WIDTH, bias=False)
        self.expand = Linear(WIDTH, 4 * WIDTH, bias=False)
        self.contract = Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # three times (batch, heads, length, width / heads)
        q, k, v = self.query_key_value(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = softmax(scores.masked_fill(future, -torch.inf), fp32=self.fp32_softmax)
        x = x + self.out((weights.to(v.dtype) @ v).transpose(1, 2).reshape(x.shape))
        return x + self.contract(F.gelu(self.expand(self.norm2(x))))


def softmax(x: Tensor, fp32: bool) -> Tensor:
    if fp32:
        return torch.softmax(x.float(), -1)
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / Sum16.apply(powers).unsqueeze(-1)


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = Norm(WIDTH), Linear(WIDTH, 256, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def follow(self, recipe: Recipe) -> "GPT":
        """Takes the recipe's dtype and arithmetic. Norms that compute in FP32 keep FP32 weights too."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.fp32_sums = recipe.fp32_sums
            elif isinstance(module, Block):
                module.fp32_softmax = recipe.fp32_statistics
            if isinstance(module, Norm):
                module.fp32 = recipe.fp32_statistics
            if not (isinstance(module, Norm) and recipe.fp32_statistics and recipe.backup):
                for name, parameter in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(parameter.detach().to(recipe.dtype)))
        return self


# -- training


@dataclass
class Run:
    """What a run showed.

    Attributes:
        recipe: how it trained.
        losses: of each step.
        validation: the loss on held-out text after the last step.
        skipped: steps without an update because of an overflow.
        scale: the loss scale at the end.
        unmoved: the share of the blocks' weights that the middle step left as they were.
        zero_gradients: the share of their gradients that were zero in it.
        seconds: of the whole run.
        weights: at the end, in FP32; the masters where there are some.
    """

    recipe: Recipe
    losses: list[float] = field(default_factory=list)
    validation: float = math.nan
    skipped: int = 0
    scale: float = 1.0
    unmoved: float = math.nan
    zero_gradients: float = math.nan
    seconds: float = 0.0
    weights: dict[str, Tensor] = field(default_factory=dict)

    @property
    def last_loss(self) -> float:
        """The mean training loss of the last ten steps."""
        last = self.losses[-10:]
        return sum(last) / len(last)


@dataclass
class Gradients:
    """True gradients of one step, of the FP32 run: what FP16 would have to hold."""

    activations: Tensor = field(default_factory=lambda: torch.empty(0))
    weights: Tensor = field(default_factory=lambda: torch.empty(0))


class Plain:
    """AdamW and a loss scale in a loop that can leave a technique out."""

    def __init__(self, model: GPT, recipe: Recipe) -> None:
        # Masters start as the FP32 values, not as their rounding, and so they do in shardmp.
        exact = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.model, self.recipe = model.follow(recipe), recipe
        self.scale = 65536.0 if recipe.scaled else 1.0
        self.parameters = dict(model.named_parameters())
        self.weights = {
            name: exact[name] if recipe.backup else parameter.detach() for name, parameter in self.parameters.items()
        }
        state = torch.float32 if recipe.fp32_moments else recipe.dtype
        self.first = {name: torch.zeros_like(p, dtype=state) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p, dtype=state) for name, p in self.parameters.items()}
        self.applied = 0

    def backward(self, loss: Tensor) -> None:
        (loss * self.scale).backward()

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def masters(self) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in self.weights.items()}

    @torch.no_grad()
    def step(self, lr: float) -> bool:
        """One update; False where it is skipped."""
        gradients = {name: gradient.float() / self.scale for name, gradient in self.gradients().items()}
        for parameter in self.parameters.values():
            parameter.grad = None
        if not all(bool(gradient.isfinite().all()) for gradient in gradients.values()):
            self.scale /= 2 if self.recipe.scaled else 1
            return False
        self.applied += 1
        for name, gradient in gradients.items():
            first = self.first[name].float().lerp_(gradient, 0.1)
            second = self.second[name].float().lerp_(gradient * gradient, 0.01)
            self.first[name].copy_(first)
            self.second[name].copy_(second)
            root = (second / (1 - 0.99**self.applied)).sqrt_().add_(EPS)
            update = lr * (first / (1 - 0.9**self.applied)) / root
            self.weights[name].copy_(self.weights[name].float() - update)  # here 16-bit weights are rounded
            self.parameters[name].copy_(self.weights[name])
        return True


class Sharded:
    """The same words for shardmp."""

    def __init__(self, model: GPT) -> None:
        adamw = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.99), eps=EPS, weight_decay=0.0)
        self.model, self.optimizer = shardmp.shard(model, adamw)
        self.names = [name for name, _ in self.model.named_parameters()]

    @property
    def scale(self) -> float:
        return self.optimizer.loss_scale

    def backward(self, loss: Tensor) -> None:
        self.optimizer.backward(loss)

    def gradients(self) -> dict[str, Tensor]:
        return {name: self.optimizer.full_grad(name) for name in self.names}

    def masters(self) -> dict[str, Tensor]:
        return {name: self.optimizer.master(name).clone() for name in self.names}

    def step(self, lr: float) -> bool:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        skipped = self.optimizer.step().skipped
        self.optimizer.zero_grad()
        return not skipped


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor], fp32: bool = True) -> Tensor:
    """The mean over this process's tokens."""
    tokens, targets = batch
    logits = model(tokens).flatten(0, 1)
    if fp32:
        return F.cross_entropy(logits.float(), targets.flatten())
    shifted = logits - logits.detach().amax(-1, keepdim=True)
    logs = shifted - torch.log(Sum16.apply(torch.exp(shifted))).unsqueeze(-1)
    return -logs.gather(1, targets.flatten().unsqueeze(1)).float().mean()


def learning_rate(step: int, steps: int, fine: bool) -> float:
    """Ten steps up, then down to nothing; constant and small for fine-tuning."""
    if fine:
        return FINE_LR
    return LR * min((step + 1) / 10, 1.0) * (1 - step / steps)


def train(
    recipe: Recipe,
    batches: list[Batch],
    held_out: list[Batch],
    *,
    seen: Gradients | None = None,
    start: dict[str, Tensor] | None = None,
) -> Run:
    """One run.

    Args:
        seen: takes the gradients of the middle step.
        start: FP32 weights to fine-tune; without them the seed's.
    """
    began, run = time.monotonic(), Run(recipe)
    torch.manual_seed(0)
    model = GPT()
    if start is not None:
        model.load_state_dict(start)
    stepper = Sharded(model) if recipe == FULL else Plain(model, recipe)
    for step, batch in enumerate(batches):
        watched = step >= len(batches) // 2 and math.isnan(run.unmoved)
        handles, activations = watch(stepper.model) if watched and seen is not None else ([], [])
        loss = loss_of(stepper.model, batch, recipe.fp32_statistics)
        stepper.backward(loss / SHARES_OF_BATCH)
        for handle in handles:
            handle.remove()
        before = stepper.masters() if watched else {}
        gradients = {name: gradient.clone() for name, gradient in stepper.gradients().items()} if watched else {}
        run.losses.append(loss.item())
        applied = stepper.step(learning_rate(step, len(batches), start is not None))
        run.skipped += not applied
        if watched and applied:
            inner = [name for name in before if is_inner(name)]
            run.unmoved = share([stepper.masters()[name] == before[name] for name in inner])
            run.zero_gradients = share([gradients[name] == 0 for name in inner])
            if seen is not None:
                seen.activations = torch.cat([gradient.flatten() for gradient in activations])
                seen.weights = torch.cat([gradients[name].flatten() for name in inner])
    with torch.inference_mode():
        run.validation = sum(loss_of(stepper.model, batch).item() for batch in held_out) / len(held_out)
    run.weights = {name: weight.float() for name, weight in stepper.masters().items()}
    run.scale, run.seconds = stepper.scale, time.monotonic() - began
    return run


def is_inner(name: str) -> bool:
    """Whether a parameter is a matrix of a block: every batch gives all of its elements a gradient."""
    return name.startswith("blocks") and "norm" not in name


def share(masks: list[Tensor]) -> float:
    return torch.cat([mask.flatten() for mask in masks]).double().mean().item()


def watch(model: nn.Module) -> tuple[list, list[Tensor]]:
    """Handles of hooks, and the list into which the gradients of all linear layers' outputs will go."""
    found: list[Tensor] = []

    def follow(module: nn.Module, inputs: tuple, output: Tensor) -> None:
        output.register_hook(lambda gradient: found.append(gradient.detach().clone()))

    return [m.register_forward_hook(follow) for m in model.modules() if isinstance(m, Linear)], found
