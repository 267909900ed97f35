"""Trains a byte-level GPT of 11.5M parameters in FP16, with FP32 masters and moments sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py      # two ranks
    python examples/train_gpt.py                                        # one rank, the same program
    python examples/train_gpt.py --checkpoints runs/gpt --resume auto   # goes on where it was stopped or killed
    python examples/train_gpt.py --profile                              # a trace of three steps for Perfetto, TensorBoard
    python examples/train_gpt.py --help

An ordinary training script: shardmp is the call in `main` that is marked, and `optimizer.backward(loss)`.
The model is in gpt.py, the data in text.py, the progress bar, the metrics file and the table in display.py, the trace in
profiling.py.
"""

import argparse
import codecs
import contextlib
import functools
import io
import logging
import math
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import profiling
import torch
import torch.distributed as dist
import torch.nn.functional as F
from display import Display
from gpt import GPT, GPTConfig, generate
from text import Batches, read_text, split_text
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import shardmp
from shardmp.budgeting import unsharded_memory
from shardmp.launcher import detect

INIT_SCALE, GROWTH_INTERVAL = 2.0**16, 20
INTERRUPTED = 130  # a shell's exit status for Ctrl-C: 128 + SIGINT


# -- options


def is_first() -> bool:
    """Whether this rank speaks for all, as the launcher says before there is a process group."""
    with contextlib.suppress(ValueError):  # variables that contradict each other: shardmp.init says which
        return detect(os.environ).rank == 0
    return os.environ.get("RANK", "0") == "0"


def at_least(kind: type, lowest: float) -> Callable[[str], float]:
    """An argparse type: a finite number that is not below `lowest`."""

    def parse(text: str) -> float:
        value = kind(text)
        if not lowest <= value < math.inf:
            raise argparse.ArgumentTypeError(f"expected at least {lowest}, got {text}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value" by it
    return parse


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    count, number = at_least(int, 1), at_least(float, 0.0)

    add = parser.add_argument_group("data").add_argument
    text_help = "train on this file's bytes (default: Python's own documentation)"
    add("--text", type=Path, metavar="FILE", default=argparse.SUPPRESS, help=text_help)
    add("--batch", type=count, default=1, help="sequences in a micro-batch of one rank")
    add("--accumulate", type=count, default=1, help="micro-batches of one rank per step; each is reduced at its end")
    add("--context", type=count, default=128, help="bytes in a sequence")
    add("--seed", type=int, default=0, help="seed of the first weights; rank r draws its batches with seed + r")

    add = parser.add_argument_group("model").add_argument
    add("--layers", type=count, default=6, help="transformer blocks")
    add("--width", type=count, default=384, help="width of the residual stream, a multiple of --heads")
    add("--heads", type=count, default=6, help="attention heads")

    add = parser.add_argument_group("optimization").add_argument
    add("--steps", type=count, default=300, help="optimizer steps")
    add("--lr", type=number, default=6e-4, help="the highest learning rate of AdamW")
    add("--warmup", type=at_least(int, 0), default=30, help="steps of linear warm-up; a cosine to a tenth follows")
    add("--weight-decay", type=number, default=0.1, help="of matrices; biases, norms and embeddings have none")
    add("--max-grad-norm", type=at_least(float, 1e-6), default=1.0, help="clip the gradient to this norm")

    add = parser.add_argument_group("mixed precision and sharding").add_argument
    add("--precision", choices=("fp16", "bf16", "fp32"), default="fp16", help="of parameters and gradients")
    add("--stage", type=int, choices=(1, 2), default=2, help="ZeRO stage; they differ under no_sync() alone")
    add("--reduce", choices=("fp32", "native"), default="fp32", help="sum gradients in FP32, or as the backend does")
    add("--bucket-mb", type=at_least(float, 1e-3), default=4, help="MiB of a bucket: small ones hold less in flight")
    add("--init-scale", type=at_least(float, 1.0), default=INIT_SCALE, help="the first loss scale; FP16 only")
    growth_help = (
        "clean steps before the loss scale doubles; FP16 only; 2000 is usual, but a short run is to meet overflows"
    )
    add("--growth-interval", type=count, default=GROWTH_INTERVAL, help=growth_help)

    add = parser.add_argument_group("checkpoints").add_argument
    where_help = "save here, also on SIGTERM and Ctrl-C (default: nowhere)"
    add("--checkpoints", type=Path, metavar="DIR", default=argparse.SUPPRESS, help=where_help)
    add("--save-every", type=count, default=100, help="steps between two checkpoints")
    add("--keep", type=count, default=2, help="checkpoints that are kept")
    add(
        "--resume",
        choices=("auto", "never"),
        default="never",
        help="auto: from the latest checkpoint, where there is one",
    )

    add = parser.add_argument_group("output").add_argument
    add("--eval-every", type=count, default=100, help="steps between two validations")
    add("--eval-batches", type=count, default=16, help="batches of one rank in a validation")
    add("--metrics", type=Path, metavar="FILE", default=Path("runs/train_gpt.jsonl"), help="JSON Lines file to write")
    profile_help = "trace three steps, each rank to FILE.rank<r>.pt.trace.json (FILE: runs/profile/train_gpt)"
    where = {"nargs": "?", "const": Path("runs/profile/train_gpt"), "default": argparse.SUPPRESS}
    add("--profile", type=Path, metavar="FILE", **where, help=profile_help)
    add("--prompt", default="The ", help="start of the sample that the trained model continues")
    add("--sample-bytes", type=at_least(int, 0), default=200, help="length of the sample")

    return parser.parse_args(arguments, argparse.Namespace(checkpoints=None, profile=None))


@contextlib.contextmanager
def first_rank_speaks() -> Iterator[None]:
    """Inside it all ranks run into the same mistakes: the first says which, in one line, and the program ends with status 2."""
    if is_first():
        try:
            yield
        except ValueError as mistake:
            print(f"train_gpt.py: error: {mistake}", file=sys.stderr)
            sys.exit(2)
        return
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    except (ValueError, SystemExit) as end:
        if isinstance(end, ValueError) or end.code:
            time.sleep(10.0)  # a launcher ends all ranks when one has failed: let the first one speak before
            sys.exit(2)
        raise


def precision_policy(args: argparse.Namespace) -> shardmp.Precision:
    if args.precision == "fp16":
        return shardmp.Precision("fp16", init_scale=args.init_scale, growth_interval=args.growth_interval)
    if (args.init_scale, args.growth_interval) != (INIT_SCALE, GROWTH_INTERVAL):
        raise ValueError(f"--init-scale, --growth-interval: {args.precision} has no loss scale, fp16 alone has")
    return shardmp.Precision(args.precision)


def check_checkpoints(args: argparse.Namespace) -> None:
    if args.resume == "auto" and args.checkpoints is None:
        raise ValueError("--resume auto: name the directory with --checkpoints")


# -- optimization


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Matrices decay; biases, norms and embeddings do not."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    decays = {id(weight) for weight in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in decays]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """What the highest learning rate is multiplied by, at the step counted from 0: a line up, then a cosine to 0.1."""
    if step < warmup:
        return (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress))


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


@torch.inference_mode()
def evaluate(model: nn.Module, held_out: Batches, count: int) -> float:
    """The mean loss of `count` batches of every rank, the same on all ranks."""
    model.eval()
    loss = torch.stack([loss_of(model, *held_out.draw()) for _ in range(count)]).mean()
    model.train()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


# -- Ctrl-C


class StopRequest:
    """Ctrl-C lets all ranks finish the same step and stop after it; a second one leaves at once."""

    def __init__(self, device: torch.device, display: Display) -> None:
        self.device = device
        self.display = display
        self.asked_at: float | None = None
        self.leave_at_once = False
        signal.signal(signal.SIGINT, self._asked)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        # A launcher may pass on what the terminal has sent already: within a second it is the same Ctrl-C.
        if self.leave_at_once or (self.asked_at is not None and now - self.asked_at > 1.0):
            self.display.release()
            os._exit(INTERRUPTED)  # no clean-up: it could wait for ranks that have left
        self.asked_at = self.asked_at or now

    def agreed(self) -> bool:
        """Whether any rank was asked to stop. All ranks call it together; several exchange a few bytes."""
        asked = self.asked_at is not None
        if not dist.is_initialized():
            return asked
        flag = torch.tensor(float(asked), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)


# -- checkpoints


class NoCheckpoints:
    """In the place of `shardmp.Checkpoints` where nothing is saved."""

    def after_step(self) -> None: ...

    def save(self) -> None: ...

    def close(self) -> None: ...


def open_checkpoints(
    args: argparse.Namespace,
    model: shardmp.ShardedModule,
    optimizer: shardmp.ShardedOptimizer,
    scheduler: LambdaLR,
    training: Batches,
    display: Display,
) -> shardmp.Checkpoints | NoCheckpoints:
    """What saves the run, resumed where that was asked for."""
    if args.checkpoints is None:
        return NoCheckpoints()
    options = {"every": args.save_every, "keep": args.keep}
    extra, per_rank = {"scheduler": scheduler}, {"data": training}
    checkpoints = shardmp.Checkpoints(args.checkpoints, model, optimizer, extra=extra, per_rank=per_rank, **options)
    loaded = checkpoints.resume() if args.resume == "auto" else None
    if loaded is not None:
        if loaded.per_rank is None:  # another number of ranks: batches that nobody has drawn yet
            training.generator.manual_seed(training.generator.initial_seed() + 1_000_003 * optimizer.steps)
        display.write("resumed", step=optimizer.steps, path=loaded.path, ranks=loaded.ranks)
        display.say(f"resumed after step {optimizer.steps} from {loaded.path}, saved by {loaded.ranks} ranks")
    return checkpoints


# -- the run


def train(
    args: argparse.Namespace,
    model: shardmp.ShardedModule,
    optimizer: shardmp.ShardedOptimizer,
    parts: tuple[Tensor, Tensor],
    world: shardmp.World,
    display: Display,
    stop: StopRequest,
    trace_step: Callable[[], None],
) -> tuple[dict[str, float], float] | None:
    """The losses at the end, and the bytes sent per step; None where Ctrl-C stopped the run before."""
    seed = args.seed + world.rank  # every rank draws other batches
    training = Batches(parts[0], args.context, args.batch, seed, world.device)
    tokens_per_step = world.world_size * args.accumulate * args.batch * args.context
    scheduler = LambdaLR(optimizer, functools.partial(lr_factor, steps=args.steps, warmup=args.warmup))
    checkpoints = open_checkpoints(args, model, optimizer, scheduler, training, display)
    steps_before, sent_before = optimizer.steps, optimizer.wire_bytes()  # the first weights' bytes are no step's
    losses: deque[float] = deque(maxlen=20)
    validation_loss = math.nan
    for step in range(steps_before + 1, args.steps + 1):
        if stop.agreed():
            checkpoints.save()
            checkpoints.close()
            display.write("stopped", step=step - 1)
            display.say(f"stopped by Ctrl-C after step {step - 1} of {args.steps}, metrics in {args.metrics}")
            return None
        lr = scheduler.get_last_lr()[0]
        for _ in range(args.accumulate):
            tokens, targets = training.draw()
            loss = loss_of(model, tokens, targets)
            optimizer.backward(loss)
        report = optimizer.step()
        optimizer.zero_grad()
        if not report.skipped:  # the schedule counts updates: a skipped step does not use it up
            scheduler.step()
        losses.append(report.loss)
        display.step(step, report, optimizer, lr, tokens_per_step)
        trace_step()
        if step % args.eval_every == 0 or step == args.steps:
            # Made anew each time: the same windows, so that validations can be compared.
            held_out = Batches(parts[1], args.context, args.batch, seed, world.device)
            validation_loss = evaluate(model, held_out, args.eval_batches)
            display.validation(step, validation_loss)
        checkpoints.after_step()  # leaves the program, with status 143, where a rank got SIGTERM
    checkpoints.close()
    if not losses:
        raise ValueError(
            f"--resume auto: the checkpoint is of step {optimizer.steps}, and --steps {args.steps} are done"
        )
    sent = (optimizer.wire_bytes() - sent_before) / (args.steps - steps_before)
    return {"training_loss": sum(losses) / len(losses), "validation_loss": validation_loss}, sent


def show_sample(model: nn.Module, args: argparse.Namespace, display: Display, device: torch.device) -> None:
    """Text that continues the prompt. All ranks make the same; the first shows it, byte by byte."""
    model.eval()
    prompt = torch.tensor(list(os.fsencode(args.prompt) or b"\n"), device=device)
    generator = torch.Generator().manual_seed(args.seed)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may be several bytes
    display.say(f"\nsample:\n{args.prompt}", end="")
    for byte in generate(model, prompt, args.sample_bytes, args.context, generator):
        display.say(decoder.decode(bytes((byte,))), end="")
    display.say(decoder.decode(b"", final=True))


def main() -> int:
    with first_rank_speaks():
        args = parse_options()
        parts = split_text(read_text(getattr(args, "text", None)), args.context)
        config = GPTConfig(args.context, args.layers, args.width, args.heads)
        precision = precision_policy(args)
        check_checkpoints(args)
        if args.profile is not None:
            profiling.check(args.profile, args.steps)
        display = Display(is_first(), args.steps, args.metrics, append=args.resume == "auto")

    logging.getLogger("shardmp").addHandler(logging.NullHandler())  # the display says of each overflow what it did
    world = shardmp.init()
    stop = StopRequest(world.device, display)
    torch.manual_seed(args.seed)
    model = GPT(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = AdamW(parameter_groups(model, args.weight_decay), lr=args.lr, betas=(0.9, 0.95))

    # >>> The one call that shardmp adds. From here on the parameters are FP16, and this rank keeps only its share of the
    # >>> FP32 masters, of the moments and of the summed gradients. The training loop has no precision code.
    model, optimizer = shardmp.shard(
        model,
        optimizer,
        precision=precision,
        stage=args.stage,
        reduce=args.reduce,
        average="micro_batches",  # the mean over all micro-batches of all ranks: the loop divides nothing
        max_grad_norm=args.max_grad_norm,
        bucket_mb=args.bucket_mb,
    )

    display.write("options", **vars(args), parameters=num_parameters, ranks=world.world_size)
    display.say(
        f"{num_parameters / 1e6:.1f}M parameters, {args.precision}, stage {args.stage}, {world.world_size} x "
        f"{world.device.type}; {len(parts[0]):,} bytes to train on, {len(parts[1]):,} held out"
    )
    try:
        with display, profiling.traced(args.profile, world, optimizer, display.say) as trace_step:
            done = train(args, model, optimizer, parts, world, display, stop, trace_step)
    except SystemExit:  # SIGTERM: all ranks have saved and leave together
        display.say(f"stopped by SIGTERM after step {optimizer.steps} of {args.steps}, saved in {args.checkpoints}")
        if dist.is_initialized():
            dist.destroy_process_group()
        raise
    if done is not None:
        losses, sent = done
        display.summary(losses, optimizer, unsharded_memory(num_parameters, moments=2), sent, args.accumulate)
        stop.leave_at_once = True  # nothing is left that ranks should finish together
        if not stop.agreed():
            show_sample(model, args, display, world.device)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0 if done is not None else INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
