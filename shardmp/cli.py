"""The `shardmp` command.

Owns:      the options' names, their help, what is printed, exit codes.
Takes:     the command line; some options also from the variables that Kubeflow sets for torchrun (PET_*).
Gives:     calls into the library: no logic of its own.
Invariant: what a user did wrong is one message on stderr and exit code 2; torch is imported only where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from . import launch

USAGE_ERROR = 2

app = typer.Typer(
    name="shardmp",
    help="Sharded mixed-precision training for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say(text: str, stderr: bool = True) -> None:
    """One message as it is: never wrapped, so that it can be copied and searched for."""
    Console(stderr=stderr, highlight=False).print(text, soft_wrap=True, markup=False)


@contextmanager
def _errors_of(command: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as mistake:
        _say(f"shardmp {command}: error: {mistake}")
        raise typer.Exit(USAGE_ERROR) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"shardmp {version('shardmp')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def options_of_all(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the versions and leave.")
    ] = False,
) -> None:
    pass


# Options end at the script: whatever follows it belongs to it.
@app.command("launch", context_settings={"allow_interspersed_args": False})
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
    with _errors_of("launch"):
        command = launch.plan(request, os.environ)
    for remark in command.remarks:
        _say(f"shardmp launch: {remark}")
    if dry_run:
        print(command.text())
    else:
        launch.start(command)


@app.command("rendezvous")
def rendezvous_command(
    port: Annotated[int, typer.Option(help="The port to listen on; 0 for a free one.")] = launch.DEFAULT_STORE_PORT,
    host: Annotated[str, typer.Option(help="The address to listen on. Default: all, of IPv4 and IPv6.")] = "",
) -> None:
    """Run the store in which nodes meet, in a process of its own: then any node may die. Ends on SIGINT or SIGTERM."""

    def ready(bound: int) -> None:
        where = f"{host}:{bound}" if host else f"port {bound} of every address"
        _say(
            f"shardmp rendezvous: listening on {where}; on every node: "
            f"shardmp launch --separate-store --rdzv-endpoint {host or 'THIS_HOST'}:{bound} ...",
            stderr=False,
        )

    with _errors_of("rendezvous"):
        launch.serve_store(host, port, ready)
    _say("shardmp rendezvous: ended", stderr=False)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
