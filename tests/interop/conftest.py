"""What the tests with other people's libraries share: their marker, and no network."""

import os
from pathlib import Path

import pytest

# Before the ranks' fork server starts: nothing here may ask a hub for anything.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)
