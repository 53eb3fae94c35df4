"""Record cases by name: `python -m outside.layouts OUT NAME …`, from tests/. Without names, all of them.

A script `OUT/spread.py` is run there on one process and on two, as torchrun runs it.
"""

from __future__ import annotations

import os
import runpy
import sys
from functools import partial
from pathlib import Path

from forked_ranks import run_ranks

from outside.layouts.judge import FAULTS, SCORED_FAULTS, correct_pairs, record_cases, scored_pairs

if __name__ == "__main__":
    wanted = sys.argv[2:]
    chosen = [
        case
        for case in (*FAULTS, *correct_pairs(), *SCORED_FAULTS, *scored_pairs())
        if not wanted or case.name in wanted
    ]
    out = Path(sys.argv[1]).absolute()
    failed = record_cases(chosen, out)
    if (out / "spread.py").exists():
        os.chdir(out)
        codes = [code for ranks in (1, 2) for code in run_ranks(ranks, partial(runpy.run_path, "spread.py"), out)]
        failed |= {"spread.py": f"exit codes {codes}"} if any(codes) else {}
    for name, error in failed.items():
        print(name, error, file=sys.stderr)
    sys.exit(bool(failed))
