"""What all tests share: one thread per process, and an end to the ranks' worker processes with the session."""

import pytest
import torch
from ranks import close_pool


def pytest_configure() -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    close_pool()
