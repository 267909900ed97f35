"""The `shardmp` command.

Owns:      the options' names, their help, what is printed.
Takes:     the command line; some options also from the variables that Kubeflow sets for torchrun (PET_*).
Gives:     calls into the library: no logic of its own.
Invariant: every command is made by `command_line.command`; torch is imported only where it is needed.
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from . import launch
from .command_line import command, say, show

app = typer.Typer(
    name="shardmp",
    help="Sharded mixed-precision training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardmp {version('shardmp')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def options_of_all(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and leave.")
    ] = False,
) -> None:
    pass


# Options end at the script: whatever follows it belongs to it.
@command(
    app,
    "launch",
    "shardmp launch --nproc-per-node 8 train.py --steps 1000",
    context_settings={"allow_interspersed_args": False},
)
def launch_command(
    script: Annotated[str, typer.Argument(help="The training script; what follows it is its own.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="The script's arguments.")] = None,
    nnodes: Annotated[str, typer.Option(envvar="PET_NNODES", help="Nodes: N, or MIN:MAX for elastic.")] = "1",
    nproc_per_node: Annotated[
        str, typer.Option(envvar="PET_NPROC_PER_NODE", help="Ranks on this node: a number, auto, gpu or cpu.")
    ] = "1",
    node_rank: Annotated[
        int | None,
        typer.Option(envvar="PET_NODE_RANK", help="This node's number: fixes the order of ranks. Not elastic."),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(envvar="PET_RDZV_ENDPOINT", metavar="HOST:PORT", help="Where nodes meet; the same on every node."),
    ] = None,
    rdzv_id: Annotated[
        str, typer.Option(envvar="PET_RDZV_ID", help="The job's name, the same on every node, another for each job.")
    ] = launch.DEFAULT_ID,
    separate_store: Annotated[
        bool, typer.Option("--separate-store", help="The endpoint is a running `shardmp rendezvous`: no node hosts it.")
    ] = False,
    max_restarts: Annotated[
        int | None,
        typer.Option(envvar="PET_MAX_RESTARTS", help="Restarts of all ranks after a failure. Default: 0; elastic: 3."),
    ] = None,
    keep_alive: Annotated[
        int, typer.Option(help="Seconds of silence after which a node counts as gone.")
    ] = launch.DEFAULT_KEEP_ALIVE,
    local_addr: Annotated[
        str | None,
        typer.Option(help="This node's address for the others. Default: the one that routes to the endpoint."),
    ] = None,
    log_dir: Annotated[
        str | None, typer.Option(envvar="PET_LOG_DIR", help="Also write each rank's output to files in this folder.")
    ] = None,
    shutdown_timeout: Annotated[
        int | None, typer.Option(help="Seconds from SIGTERM to SIGKILL of the ranks (torch 2.13 and newer; 30 there).")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print torchrun's command and start nothing.")] = False,
) -> None:
    """Start a script with torchrun on this node: the same command on every node."""
    request = launch.Request(
        script=script,
        arguments=tuple(arguments or ()),
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        separate_store=separate_store,
        max_restarts=max_restarts,
        keep_alive=keep_alive,
        local_addr=local_addr,
        log_dir=log_dir,
        shutdown_timeout=shutdown_timeout,
    )
    command = launch.plan(request, os.environ)
    for remark in command.remarks:
        say(f"shardmp launch: {remark}")
    if dry_run:
        print(command.text())
    else:
        launch.start(command)


@command(app, "rendezvous", "shardmp rendezvous --port 29500")
def rendezvous_command(
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for a free one.")] = launch.DEFAULT_STORE_PORT,
    host: Annotated[str, typer.Option(help="The address to listen on. Default: all, of IPv4 and IPv6.")] = "",
) -> None:
    """Run the store in which nodes meet, in a process of its own: then any node may die. Ends on SIGINT or SIGTERM."""

    def ready(bound: int) -> None:
        where = f"{host}:{bound}" if host else f"port {bound} of every address"
        say(
            f"shardmp rendezvous: listening on {where}; on every node: "
            f"shardmp launch --separate-store --rdzv-endpoint {host or 'THIS_HOST'}:{bound} ...",
            stderr=False,
        )

    launch.serve_store(host, port, ready)
    say("shardmp rendezvous: ended", stderr=False)


CHECKPOINT_HELP = "A checkpoint, or a directory of them."
STEP_HELP = "The step to take. Default: the latest."


@command(app, "export", "shardmp export runs/gpt model.safetensors --dtype fp16")
def export_command(
    checkpoint: Annotated[Path, typer.Argument(help=CHECKPOINT_HELP)],
    output: Annotated[Path, typer.Argument(help="The safetensors file to write.")],
    dtype: Annotated[str, typer.Option(help="fp32 (the master weights), fp16 or bf16.")] = "fp32",
    step: Annotated[int | None, typer.Option(help=STEP_HELP)] = None,
) -> None:
    """Write a checkpoint's weights into one safetensors file, with the keys of the plain model."""
    from .exporting import export

    export(checkpoint, output, dtype=dtype, step=step)
    say(f"{output}: {output.stat().st_size:,} bytes", stderr=False)


@command(app, "inspect", "shardmp inspect runs/gpt --step 300")
def inspect_command(
    checkpoint: Annotated[Path, typer.Argument(help=CHECKPOINT_HELP)],
    step: Annotated[int | None, typer.Option(help=STEP_HELP)] = None,
    verify: Annotated[bool, typer.Option(help="Compare every byte with its checksum.")] = True,
) -> None:
    """Print what a checkpoint holds, and whether it is intact."""
    from .exporting import Contents

    contents = Contents(checkpoint, step)
    say(str(contents.path), stderr=False)
    if contents.manifest is not None:
        about = contents.manifest
        say(f"step {about.step}, {about.ranks} ranks, shardmp {about.shardmp}, torch {about.torch}", stderr=False)
    tied, total = contents.tied(), 0
    for entry in contents.entries():
        where = f"tied to {tied[entry.name]}" if entry.name in tied else f"{entry.bytes:,} bytes, {entry.pieces} pieces"
        total += 0 if entry.name in tied else entry.bytes
        shape, dtype = list(entry.shape), str(entry.dtype).removeprefix("torch.")
        say(f"  {entry.name}  {shape}  {dtype}  {where}", stderr=False)
    say(f"{total:,} bytes", stderr=False)
    if verify:
        contents.verify()
        say("intact: every byte has the checksum that was written", stderr=False)


@command(app, "import-deepspeed", "shardmp import-deepspeed runs/deepspeed runs/shardmp")
def import_deepspeed_command(
    source: Annotated[Path, typer.Argument(help="What was given to DeepSpeed's save_checkpoint, or a tag in it.")],
    output: Annotated[Path, typer.Argument(help="A directory of checkpoints, for shardmp.load or Checkpoints.")],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint. Default: what `latest` names.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="Adam or AdamW, where the files do not say which.")] = None,
) -> None:
    """Make a checkpoint of one that DeepSpeed has written with ZeRO 1, 2 or 3: masters, moments, steps, loss scale."""
    from .deepspeed_import import import_deepspeed

    made = import_deepspeed(source, output, tag=tag, optimizer=optimizer)
    say(str(made.path), stderr=False)
    say(f"step {made.step}; DeepSpeed {made.version}, ZeRO-{made.stage}, {made.ranks} ranks", stderr=False)
    say(f"the run had: shardmp.shard(model, optimizer, {made.options})", stderr=False)
    for name in made.dropped:
        say(f"left out, it is not made of plain values: {name}", stderr=False)


@command(
    app, "formats", "shardmp formats 65504 --in bf16", context_settings={"ignore_unknown_options": True}
)  # a negative number is not an option
def formats_command(
    number: Annotated[
        str | None,
        typer.Argument(help="65504, 1e-8, -0.1, 2^-24, nan, or bits: 0x7bff, 0b..., '0 11110 1111111111'."),
    ] = None,
    fmt: Annotated[str, typer.Option("--in", help="fp64, fp32, tf32, bf16, fp16, e4m3 or e5m2.")] = "fp16",
    compare: Annotated[bool, typer.Option("--compare", help="The number in every format.")] = False,
) -> None:
    """Show what number formats hold, or how one number is stored, its neighbours and its rounding error."""
    from . import format_tables

    show(format_tables.answer(number, fmt, compare=compare))


@command(app, "budget", "shardmp budget --params 7B --ranks 64 --fits 80GiB")
def budget_command(
    params: Annotated[str | None, typer.Option(help="Parameters of the model: 7e9, 7B, 124M.")] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Or a function that makes the model; on the meta device."),
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks over which the state is sharded.")] = 8,
    ranks_per_host: Annotated[int | None, typer.Option(help="Default: the largest divisor of --ranks up to 8.")] = None,
    stage: Annotated[int, typer.Option(help="1 or 2.")] = 2,
    precision: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "fp16",
    moments: Annotated[
        int,
        typer.Option(
            help="FP32 states per parameter: AdamW 2, SGD with momentum 1. A class that is stepped once a step "
            "(docs/optimizers.md) may hold temporaries of its shard besides."
        ),
    ] = 2,
    backwards: Annotated[int, typer.Option(help="Backwards per step.")] = 1,
    bucket_mb: Annotated[
        float | None, typer.Option(help="MiB of parameters in a bucket. Default: what shard() takes for so many ranks.")
    ] = None,
    exact: Annotated[bool, typer.Option("--exact", help="reduce='exact'.")] = False,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPES",
            help="Trace the model's forward and backward: 4x128:int64, or ids=4x128:int64,labels=4x128:int64.",
        ),
    ] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Called with the model and the batch's tensors. Default: the output's own loss, or its mean.",
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Whose kernels are traced: cpu or cuda. Default: cuda where there is one.")
    ] = None,
    fits: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Find the fewest ranks, and the largest batch, that fit: 16GiB.")
    ] = None,
    flops: Annotated[
        float | None, typer.Option(help="FLOP/s of a rank: from how many tokens on is the wire hidden?")
    ] = None,
    link: Annotated[float | None, typer.Option(help="Bytes/s of a host's card (of a rank's link on one host).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All figures in bytes, as JSON.")] = False,
) -> None:
    """Predict what each rank holds and sends, before anything is allocated."""
    from . import budget_tables, budgets

    found = budgets.budget(
        model,
        parameters=params,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        stage=stage,
        precision=precision,
        moments=moments,
        backwards=backwards,
        bucket_mb=bucket_mb,
        exact=exact,
        batch=batch,
        loss=loss,
        device=device,
        fits=fits,
        flops=flops,
        link=link,
    )
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(budget_tables.tables(found))


@command(app, "doctor", "srun --ntasks-per-node 8 shardmp doctor --params 7B")
def doctor_command(
    params: Annotated[
        str | None, typer.Option(help="Forecast the collectives of a step of so many parameters: 63e6, 7B.")
    ] = None,
    precision: Annotated[str, typer.Option(help="Of that step: fp16, bf16 or fp32.")] = "fp16",
    stage: Annotated[int, typer.Option(help="Of that step: 1 or 2.")] = 2,
    bucket_mb: Annotated[
        float | None, typer.Option(help="Of that step: MiB of parameters in a bucket. Default: as shard() takes it.")
    ] = None,
    backwards: Annotated[int, typer.Option(help="Of that step: backwards.")] = 1,
    exact: Annotated[bool, typer.Option("--exact", help="Of that step: reduce='exact'.")] = False,
    slow: Annotated[float, typer.Option(help="A host below this part of the usual bandwidth is slow.")] = 0.5,
    min_mb_per_s: Annotated[float | None, typer.Option(help="MB/s that every link must reach. Default: any.")] = None,
    max_latency_ms: Annotated[float | None, typer.Option(help="Latency that no link may exceed. Default: any.")] = None,
    max_skew: Annotated[float, typer.Option(help="Seconds between the clocks of two hosts.")] = 1.0,
    min_shm: Annotated[str, typer.Option(metavar="SIZE", help="What must be free in /dev/shm.")] = "1GiB",
    every_rank: Annotated[bool, typer.Option("--every-rank", help="Pairs of all ranks, not of hosts.")] = False,
    pair_mb: Annotated[float, typer.Option(help="MiB of the largest message between two ranks.")] = 16.0,
    arrival_timeout: Annotated[float, typer.Option(help="Seconds in which all ranks must arrive.")] = 120.0,
    timeout: Annotated[float, typer.Option(help="Seconds for one collective.")] = 30.0,
    backend: Annotated[str | None, typer.Option(help="gloo or nccl. Default: nccl where there is a GPU.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON, in place of tables.")] = False,
    report: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the report here, as JSON.")] = None,
) -> None:
    """Examine a cluster before a job: started on every rank, as the job will be. Exit code 1 where something is wrong."""
    from . import doctor, doctor_command

    run = doctor_command.planned(params, precision, stage, bucket_mb, backwards, exact)
    limits = doctor_command.thresholds(slow, min_mb_per_s, max_latency_ms, max_skew, min_shm)
    most = int(pair_mb * 2**20)
    settings = doctor.Settings(run, limits, every_rank, most, arrival_timeout, timeout, strict, backend)
    code = doctor_command.run(settings, as_json, report, say, show)
    raise typer.Exit(code)


@command(app, "env", "shardmp env --json")
def env_command(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Describe this machine and how this process was started, for an issue. Secrets are not shown."""
    from . import environment_report

    found = environment_report.report()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        say("\n".join(environment_report.lines(found)), stderr=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
