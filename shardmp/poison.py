"""The memory of a failure: after one nothing more is done.

Owns:      why the ranks may have left their common order, or why this rank's state may be a mix.
Takes:     work that changes state step by step, or sends.
Gives:     a refusal of whatever comes after such work has not reached its end.
Invariant: whatever is interrupted (an error, Ctrl-C, memory that runs out) leaves the state of before or of after, or
           everything afterwards is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


class Poison:
    """What has failed, and the refusal of everything after it."""

    failure: str | None = None
    why: Callable[[], str] | None = None
    """What this rank knows of a cause, beside the failure itself; "" where there is none."""

    def refuse_after_failure(self) -> None:
        """Raise if a collective, or other work of all ranks, has failed before.

        Raises:
            RuntimeError: ranks may be a step apart; only a restart from a checkpoint is safe.
        """
        if self.failure is not None:
            raise RuntimeError(
                f"a collective failed before ({self.failure}); ranks may be a step apart, so nothing more is done: "
                "restart from the last checkpoint"
            )

    def because(self) -> str:
        """What `why` says, as the end of an error's words."""
        return "" if self.why is None else self.why()

    def poison(self, reason: str) -> None:
        """Remember that this rank left the common order of collectives."""
        self.failure = self.failure or reason

    @contextlib.contextmanager
    def all_or_nothing(self, operation: str) -> Iterator[None]:
        """Work that changes state step by step: an exception inside, of whatever kind, poisons and goes on its way.

        What can be refused is checked before: inside there is nothing that a user could mend.

        Args:
            operation: what a later refusal says ("step 3").

        Raises:
            RuntimeError: poisoned before.
        """
        self.refuse_after_failure()
        try:
            yield
        except BaseException as error:
            if self.failure is None:
                self.failure = f"{operation} raised {type(error).__name__}"
                self.failure += f": {error}" if str(error) else ""  # second, for a message may raise too
            raise
