"""docs/optimizers.md says of every class of torch's what happens to it; of other libraries' where they are installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script() -> Any:
    """benchmarks/optimizer_table.py, as a module."""
    specification = importlib.util.spec_from_file_location(
        "optimizer_table", ROOT / "benchmarks" / "optimizer_table.py"
    )
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["optimizer_table"] = module
    specification.loader.exec_module(module)
    return module


def documented(library: str) -> dict[str, str]:
    """By class, how it is stepped, or "refused"."""
    section = (ROOT / "docs" / "optimizers.md").read_text().split(f"\n### {library}\n")[1].split("\n### ")[0]
    cells = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    return {row[1].strip().strip("`"): row[2].strip() for row in cells}


def test_the_documented_routes_of_torchs_own_classes_are_what_the_probe_says() -> None:
    module = script()
    found = {name: module.row(kind)[0] for name, kind in module.classes("torch")}
    assert found == documented("torch")
    assert set(found.values()) == {"fused", "tiled", "refused"}


@pytest.mark.interop
@pytest.mark.parametrize("library", ["schedulefree", "prodigyopt", "bitsandbytes", "torchao", "transformers"])
def test_the_documented_routes_of_other_libraries_classes_are_what_the_probe_says(library: str) -> None:
    pytest.importorskip(library)
    module = script()
    rows = {line.split("|")[1].strip(" `"): line.split("|")[2].strip() for line in module.table(library)[2:]}
    known = documented(library)
    assert {name: route for name, route in rows.items() if name in known} == {
        name: route for name, route in known.items() if name in rows
    }
    assert rows.keys() & known.keys()
