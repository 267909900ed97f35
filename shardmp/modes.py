"""`optimizer.train()` and `optimizer.eval()`: methods of an optimizer's class that move the parameters themselves.

Owns:      the order of such a call.
Takes:     the update, whose inner optimizer has the method, and the parts that publish masters.
Gives:     parameters that are the rounding of the masters after it.
Invariant: all ranks call it at the same place; after a failure half-way nothing steps or saves.
"""

from __future__ import annotations

import torch

from .collectives import Collectives
from .gradients import Gradients
from .parameters import Parameters
from .update import Update


@torch.no_grad()
def call_on_masters(
    method: str, place: str, update: Update, parameters: Parameters, gradients: Gradients, collectives: Collectives
) -> None:
    """Let the optimizer's own method act on the masters, and let every rank have their rounding. Collective.

    Args:
        place: where the run is, for errors. The caller has seen that no parameter was written since the last step.

    Raises:
        RuntimeError: inside a backward; after a collective has failed.
    """
    collectives.refuse_after_failure()
    if gradients.in_backward:
        raise RuntimeError(f"optimizer.{method}() inside a backward")
    collectives.at(f"{place}, optimizer.{method}()")
    with collectives.all_or_nothing(f"optimizer.{method}()"):
        parameters.all_ready()  # a gather may still send rows that are about to change
        update.call(method)
        for index in reversed(range(len(parameters.buckets))):
            parameters.publish(index)
        parameters.finish_publishing()
        parameters.note_versions()
