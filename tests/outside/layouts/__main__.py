"""Record cases by name: `python -m outside.layouts OUT NAME …`, from tests/. Without names, all of them."""

from __future__ import annotations

import sys
from pathlib import Path

from outside.layouts.judge import FAULTS, SCORED_FAULTS, correct_pairs, record_cases, scored_pairs

if __name__ == "__main__":
    wanted = sys.argv[2:]
    chosen = [
        case
        for case in (*FAULTS, *correct_pairs(), *SCORED_FAULTS, *scored_pairs())
        if not wanted or case.name in wanted
    ]
    failed = record_cases(chosen, Path(sys.argv[1]))
    for name, error in failed.items():
        print(name, error, file=sys.stderr)
    sys.exit(bool(failed))
