"""The process that a suite gives its cases to; and for people, one family or one case."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from pathlib import Path

from faults.files import check, families, sandbox
from faults.suite import table


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        name, seed, *bounds = sys.argv[2:]
        sandbox.serve(families(name)[name], int(seed), range(*map(int, bounds)))
        return 0
    if sys.argv[1:2] == ["case"]:
        return repeat(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--effort", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    begun = time.monotonic()
    rows = list(check(asked.effort, asked.seed, asked.only))
    print(table(rows))
    print(f"{sum(row.tried for row in rows):,} in {time.monotonic() - begun:.0f} s")
    return 1 if any(row.wrong for row in rows) else 0


def repeat(name: str, seed: int, number: int) -> int:
    """One case in this process, with the traceback of what it raised."""
    judged = sandbox.judged

    def shown(family: sandbox.Family, made: object, case: sandbox.Case) -> tuple[str, str]:
        attempt = family.attempt

        def loud(made: object, case: sandbox.Case) -> None:
            try:
                attempt(made, case)
            except BaseException:
                traceback.print_exc()
                raise

        return judged(sandbox.Family(**{**vars(family), "attempt": loud}), made, case)

    sandbox.judged = shown
    with tempfile.TemporaryDirectory() as place:
        (outcome,) = sandbox.work(
            families(name)[name], seed, range(number, number + 1), Path(place).resolve()
        )
    print(outcome)
    return outcome.ended == "wrong"


if __name__ == "__main__":
    sys.exit(main())
