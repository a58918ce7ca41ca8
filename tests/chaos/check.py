"""`python -m tests.chaos.check DIR`: assert the invariants I1 to I8 on the recording of a run.

Exit code 0 if every invariant holds, 1 otherwise, 2 if DIR has no complete history.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.chaos import answers_rules, event_rules, isolation_rules, progress_rules, recovery_rules
from tests.chaos.history import History, read
from tests.chaos.violation import Violation

SHOWN = 20  # violations shown per invariant


def check(history: History) -> list[Violation]:
    """Return every violation, ordered by invariant."""
    found = answers_rules.check(history) + progress_rules.check(history) + event_rules.check(history)
    found += isolation_rules.check(history) + recovery_rules.check(history)
    found += [Violation("I5", text) for text in history.run["leaks"]]
    return sorted(found, key=lambda each: each.invariant)


def report(violations: list[Violation]) -> str:
    lines = []
    for invariant in sorted({each.invariant for each in violations}):
        same = [each for each in violations if each.invariant == invariant]
        lines += [str(each) for each in same[:SHOWN]]
        if len(same) > SHOWN:
            lines.append(f"{invariant}: {len(same) - SHOWN} more")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        history = read(Path(arguments[0]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{arguments[0]}: no complete history: {error!r}", file=sys.stderr)
        return 2
    violations = check(history)
    print(report(violations) or f"clean: {len(history.exchanges)} requests, {len(history.events)} events")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
