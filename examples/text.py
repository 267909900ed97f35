"""The text to train on: read, split into a training and a held-out part, dealt out in random windows.

A token is a byte, so any file will do. Everything here is a function of the bytes and a seed.
"""

from pathlib import Path

import torch
from torch import Tensor


def read_text(path: Path | None) -> bytes:
    """A file's bytes, or all topics of Python's own documentation in alphabetical order.

    Raises:
        ValueError: it cannot be read.
    """
    if path is None:
        try:
            from pydoc_data.topics import topics
        except ImportError:
            raise ValueError("this Python has no documentation (pydoc_data.topics): give a file with --text") from None
        return "\n\n".join(topics[name] for name in sorted(topics)).encode()
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"--text {path}: {error.strerror}") from None


def split_text(text: bytes, context: int) -> tuple[Tensor, Tensor]:
    """(training part, held-out part), uint8: the last tenth is held out, and is at least one window long.

    Raises:
        ValueError: the text is empty or too short.
    """
    needed = 10 * (context + 1)
    if len(text) < needed:
        size = f"{len(text)} bytes are too few" if text else "the file is empty"
        raise ValueError(
            f"--text: {size}: with --context {context} at least {needed} are needed, since a tenth is held out"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    border = len(data) - len(data) // 10
    return data[:border], data[border:]


class Batches:
    """Windows of `data` at random places, as (tokens, targets) of shape (size, context) each."""

    def __init__(self, data: Tensor, context: int, size: int, seed: int, device: torch.device) -> None:
        self.windows = data.unfold(0, context + 1, 1)  # (places, context + 1), a view
        self.size = size
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self) -> tuple[Tensor, Tensor]:
        places = torch.randint(len(self.windows), (self.size,), generator=self.generator)
        windows = self.windows[places].to(self.device).long()
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, Tensor]:
        """Where the random places have got to."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])
