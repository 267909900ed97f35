"""Which optimizers' states mean the same, and which groups are the same: what a checkpoint's optimizer is compared by.

Owns:      the table of classes that may go on from each other's checkpoints.
Takes:     names: of classes, and of the parameters in groups.
Gives:     nothing, or an error that says what differs; which saved group belongs to which.
Invariant: a group is its parameters, never its number; a state of the same keys is not the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Classes whose state is the same numbers, so that torch itself lets one go on from the other's state_dict. What differs is
# an option that belongs to the class, which stays that of the optimizer: see OF_THE_CLASS.
_EQUAL_STATES = (
    {
        "Adam",
        "AdamW",
    },  # step, exp_avg, exp_avg_sq (and max_exp_avg_sq); AdamW decays weights instead of adding to gradients
)

# Options by which such classes differ. AdamW sets its own whatever it loads, in torch too.
OF_THE_CLASS = {"decoupled_weight_decay"}


def check_class(saved: str, own: str) -> None:
    """Whether an optimizer of class `own` may go on from the state of a `saved`.

    Raises:
        ValueError: no; by both names.
    """
    if saved != own and not any({saved, own} <= family for family in _EQUAL_STATES):
        raise ValueError(
            f"the checkpoint has the state of {saved}, the optimizer is {own}; load weights alone with "
            "shardmp.load(directory, model)"
        )


def match_groups(own: Sequence[Sequence[str]], saved: Mapping[int, Sequence[str]]) -> dict[int, int]:
    """By number of a saved group, the number of the group with the same parameters, of those that both have.

    Args:
        own: the names of each group's parameters. saved: the same, by the number in the checkpoint.

    Raises:
        ValueError: a parameter is with others in the checkpoint; by its name.
    """
    home = {name: number for number, names in enumerate(own) for name in names}
    found: dict[int, int] = {}
    taken: dict[int, int] = {}
    for number, names in saved.items():
        for name in names:
            if name not in home:
                continue
            there = found.setdefault(number, home[name])
            if there != home[name] or taken.setdefault(there, number) != number:
                raise ValueError(
                    f"parameter groups differ: {name} is in group {home[name]} of the optimizer and in group {number} of the "
                    "checkpoint, which do not hold the same parameters: make the groups as the saved run did"
                )
    for number in saved:  # groups of which no name is known go by their place
        if number not in found and number < len(own) and number not in taken:
            found[number] = number
    return found
