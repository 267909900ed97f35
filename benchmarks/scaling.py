"""What a step costs as work grows: in ranks, in parameters, in tensors.

    python benchmarks/scaling.py                                   # everything, and docs/scaling.png
    python benchmarks/scaling.py --parts ranks,start               # some of it, and no picture
    python benchmarks/scaling.py --sizes 1e6,1e7,1e8,1e9           # 1e9 parameters take 12 GB on each of two ranks

Owns:      the processes in which `scaling_parts` measures, one part or size in each; tables and picture.
Takes:     ranks, sizes and steps as options.
Gives:     a table for each part as Markdown, all figures as JSON, a picture where `ranks` and `parameters` were measured.
Invariant: no process outlives the command.

`ranks`: rank 0 of N, in torch's "fake" process group, whose messages go nowhere and cost what calling costs. Bytes held
and sent, messages and time of a step of a model of 34M parameters in 32 layers.
`parameters`: two real ranks; layers of 1024 x 1024, one row through them, so that all costs grow alike.
`start`: `shard()` for 6.7e9 parameters of a Llama-like model on the meta device.
`tensors`: what shardmp adds to 500 parameters of 8 elements is what Python adds to any 500 parameters: its share in the
step of 500 matrices of 256 x 512 to 1024 x 512 with 128 tokens, in as many buckets. CPU time of the main thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PARTS = ("ranks", "start", "parameters", "tensors")
DRAWN = {"ranks", "parameters"}


# -- the processes


def launch(part: str, arguments: argparse.Namespace, size: float = 0.0, ranks: int = 1) -> list[dict[str, Any]]:
    """Run one part in processes of its own, and read the first rank's rows."""
    own = {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    if part != "parameters":
        own["SHARDMP_READ_NEIGHBOURS"] = "0"  # one process plays all ranks: none is there to be read
    command = [sys.executable, str(HERE / "scaling.py"), "--worker", part, "--size", str(size)]
    for name in ("ranks", "steps", "tensors"):
        value = getattr(arguments, name)
        shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        command += [f"--{name}", shown]
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        command += ["--store", f"{folder}/store"]
        processes = []
        for rank in range(ranks):
            env = {**os.environ, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (Path(folder) / f"{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        try:
            codes = [process.wait(arguments.timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        texts = [(Path(folder) / f"{rank}.log").read_text(errors="replace") for rank in range(ranks)]
    for code, text in zip(codes, texts, strict=True):
        if code:
            raise RuntimeError(f"part {part} failed:\n{text[-3000:]}")
    (line,) = [line for line in texts[0].splitlines() if line.startswith("rows ")]
    return json.loads(line.removeprefix("rows "))


# -- what is shown

# By part: figure, heading, format.
COLUMNS = {
    "ranks": [
        ("ranks", "ranks", "{:d}"),
        ("held", "held", "{:.3f}"),
        ("ideal_held", "2 + 16/N", "{:.3f}"),
        ("in_flight", "in flight", "{:.3f}"),
        ("sent", "sent per step", "{:.3f}"),
        ("ideal_sent", "4 (N-1)/N", "{:.3f}"),
        ("messages", "messages sent", "{:d}"),
        ("collectives", "collectives", "{:d}"),
        ("step_ms", "step ms", "{:.0f}"),
    ],
    "start": [("ranks", "ranks", "{:d}"), ("parameters", "parameters", "{:,d}"), ("seconds", "shard() s", "{:.2f}")],
    "parameters": [
        ("parameters", "parameters", "{:,d}"),
        ("step_ms", "step ms", "{:.1f}"),
        ("wall_ns", "wall ns per parameter", "{:.2f}"),
        ("cpu_ns", "CPU ns per parameter", "{:.2f}"),
        ("held", "held", "{:.2f}"),
    ],
    "tensors": [
        ("tensors", "tensors", "{:d}"),
        ("parameters", "parameters", "{:,d}"),
        ("buckets", "buckets", "{:d}"),
        ("ordinary_ms", "their step ms", "{:.0f}"),
        ("tiny_ms", "tiny step ms", "{:.1f}"),
        ("plain_ms", "without shardmp", "{:.1f}"),
        ("added_us", "added us per tensor", "{:.1f}"),
        ("share", "of their step", "{:.2%}"),
    ],
}
HEADINGS = {
    "ranks": "N ranks: bytes per parameter and rank",
    "start": "`shard()` of a Llama-like model on the meta device",
    "parameters": "two ranks: time and bytes per parameter and rank",
    "tensors": "what Python adds to a step",
}


def table(part: str, rows: Sequence[dict[str, Any]]) -> str:
    """The rows of a part as Markdown."""
    columns = COLUMNS[part]
    lines = [HEADINGS[part], "", f"| {' | '.join(heading for _, heading, _ in columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(form.format(row[key]) for key, _, form in columns)} |" for row in rows]
    return "\n".join(lines)


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Three panels: bytes by ranks, time by ranks, time by parameters."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (size, cost, flat) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    rows = found["ranks"]
    ranks = [row["ranks"] for row in rows]
    for colour, key, label, formula in (
        ("C0", "held", "held", "2 + 16/N"),
        ("C1", "sent", "sent per step", "4 (N-1)/N"),
    ):
        size.plot(ranks, [row[f"ideal_{key}"] for row in rows], color=colour, linewidth=4, alpha=0.3, label=formula)
        size.plot(ranks, [row[key] for row in rows], "o", color=colour, markersize=4, label=label)
    size.set(xscale="log", xlabel="ranks N", ylabel="bytes per parameter and rank", ylim=(0, None))
    size.set_title("34M parameters: bytes follow the formulas")
    cost.plot(ranks, [row["step_ms"] for row in rows], "o-", label="step of one rank, ms")
    cost.plot(
        ranks, [row["messages"] for row in rows], "s--", markersize=3, color="0.6", label="messages that it sends"
    )
    cost.set(xscale="log", yscale="log", xlabel="ranks N")
    cost.set_title("34M parameters: messages cost calls")
    rows = found["parameters"]
    parameters = [row["parameters"] for row in rows]
    for key, label in (("wall_ns", "wall time"), ("cpu_ns", "CPU time")):
        flat.plot(parameters, [row[key] for row in rows], "o-", label=label)
    flat.set(xscale="log", xlabel="parameters", ylabel="ns per parameter and step", ylim=(0, None))
    flat.set_title("two ranks: time grows with parameters alone")
    for axes in (size, cost, flat):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


# -- the command


def listed(kind: Callable[[str], Any], lowest: int) -> Callable[[str], list[Any]]:
    """An argparse type: numbers separated by commas, none below `lowest`."""

    def parse(text: str) -> list[Any]:
        values = [kind(part) for part in text.split(",")]
        if not all(value >= lowest for value in values):
            raise argparse.ArgumentTypeError(f"expected numbers of at least {lowest}, got {text}")
        return values

    parse.__name__ = "list"
    return parse


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--ranks", type=listed(int, 2), default="2,8,64,512,1024,8192", help="of `ranks` and `start`")
    sizes = "1e6,4e6,16e6,64e6,128e6,300e6"
    parser.add_argument("--sizes", type=listed(float, 1), default=sizes, help="parameters, of `parameters`")
    parser.add_argument("--tensors", type=int, default=500, help="of `tensors`")
    parser.add_argument("--steps", type=int, default=5, help="measured steps")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one part, or one size")
    parser.add_argument(
        "--plot", type=Path, default=Path("docs/scaling.png"), help="the picture, of ranks and parameters"
    )
    parser.add_argument("--json", type=Path, default=Path("runs/scaling.json"), help="where all figures go")
    parser.add_argument("--worker", choices=PARTS, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    unknown = set(arguments.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts: expected of {', '.join(PARTS)}; got {', '.join(sorted(unknown))}")
    for name in ("steps", "tensors", "timeout"):
        if not getattr(arguments, name) >= 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(arguments, name)}")
    return arguments


def main() -> None:
    """Measure the parts, print their tables, draw the picture."""
    arguments = parse()
    if arguments.worker:
        from scaling_parts import measure

        print("rows " + json.dumps(measure(arguments.worker, arguments)), flush=True)
        return
    found: dict[str, list[dict[str, Any]]] = {}
    options = {name: str(value) for name, value in vars(arguments).items()}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    for part in arguments.parts.split(","):
        if part == "parameters":
            found[part] = [row for size in arguments.sizes for row in launch(part, arguments, size, ranks=2)]
        else:
            found[part] = launch(part, arguments)
        print(table(part, found[part]), end="\n\n", flush=True)
        arguments.json.write_text(json.dumps({"options": options, "parts": found}, indent=1))
        if part in DRAWN and found.keys() >= DRAWN:
            draw(found, arguments.plot)


if __name__ == "__main__":
    main()
