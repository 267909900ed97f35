"""The image's health check: whether each rank in this container has made a step lately.

Owns:      what is healthy, and the line that `docker inspect` shows.
Takes:     SHARDMP_HEARTBEAT, as the ranks have it, and SHARDMP_HEARTBEAT_MAX_AGE in seconds (600, the time that a collective
           waits for a missing rank); or --max-age.
Gives:     exit code 0 (healthy) or 1, as Docker and Kubernetes want it.
Invariant: it reads file times and nothing else: no torch, no network, no rank is disturbed.
"""

from __future__ import annotations

import argparse
import os
import sys

from shardmp import heartbeat

DEFAULT_MAX_AGE = 600.0


def verdict(text: str, max_age: float) -> tuple[bool, str]:
    """Whether all ranks have made a step within `max_age` seconds, and the reason."""
    if not text:
        return False, f"{heartbeat.VARIABLE} is not set: there is no heartbeat to look at"
    ages = heartbeat.ages(text)
    if not ages:
        return False, f"no rank has called shardmp.shard() yet: there is no file {text}"
    late = {name: age for name, age in ages.items() if age > max_age}
    if late:
        said = ", ".join(f"{name} {age:.0f} s ago" for name, age in late.items())
        return False, f"no step within {max_age:g} s: {said}"
    return True, f"{len(ages)} ranks, the slowest made a step {max(ages.values()):.1f} s ago"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = os.environ.get("SHARDMP_HEARTBEAT_MAX_AGE") or DEFAULT_MAX_AGE
    parser.add_argument("--max-age", type=float, default=default, help="seconds (default: %(default)s)")
    healthy, reason = verdict(os.environ.get(heartbeat.VARIABLE, ""), parser.parse_args().max_age)
    print(reason)
    return 0 if healthy else 1


if __name__ == "__main__":
    sys.exit(main())
