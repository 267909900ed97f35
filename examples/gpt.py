"""A byte-level GPT in plain torch: it knows nothing of precision, ranks or shards.

Takes token ids of shape (batch, time), gives logits of shape (batch, time, 256). 11.5M parameters at 6 layers of width 384.
It has no buffers, and the loss stays outside: logits leave the wrapped model as FP32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256  # one token per byte: no tokenizer, and any file is valid text
NEIGHBOURS = 4


@dataclass(frozen=True)
class GPTConfig:
    context: int = 128
    layers: int = 6
    width: int = 384
    heads: int = 6

    def __post_init__(self) -> None:
        for name in ("context", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width {self.width} and {self.heads} heads")


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        # (batch, time, 3 width) -> three times (batch, heads, time, width / heads)
        qkv = self.query_key_value(x).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(F.gelu(self.expand(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class NGrams(nn.Module):
    """Adds to each byte what its last few bytes say together.

    A byte alone says little, and attention is slow to find out which are its neighbours: this is what lets a run of two
    minutes spell words.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.mix = nn.Linear(NEIGHBOURS * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, NEIGHBOURS - 1, 0))  # zeros before the first byte
        windows = [padded[:, shift : shift + x.shape[1]] for shift in range(NEIGHBOURS)]
        return x + self.mix(torch.cat(windows, dim=-1))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.ngrams = NGrams(config)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("out.weight", "contract.weight")):
                nn.init.zeros_(parameter)  # every block starts as the identity
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.ngrams(self.token(tokens)) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.inference_mode()
def generate(model: nn.Module, prompt: Tensor, length: int, context: int, generator: torch.Generator) -> Iterator[int]:
    """Yields `length` sampled bytes that continue `prompt` (a 1-D tensor of at least one byte)."""
    tokens = prompt.long()
    for _ in range(length):
        logits = model(tokens[None, -context:])[0, -1]  # (256,)
        # The draw is made on the CPU: a seed gives the same text on every device that computes the same logits.
        drawn = torch.multinomial(torch.softmax(logits.float().cpu() / 0.7, dim=0), 1, generator=generator)
        tokens = torch.cat((tokens, drawn.to(tokens.device)))
        yield int(drawn)
