"""Record and judge: `python -m outside.layouts.third OUT [--late] [--record] [--statistics] [TEXT …]`, from tests/.

With `--reports` it does so with the set of reported faults.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tensortap as tt
from outside.layouts.reports.cases import FAULTS as REPORTED
from outside.layouts.reports.cases import correct as reported_pairs
from outside.layouts.third.cases import FAULTS, correct
from outside.layouts.third.judge import outcomes, record_all

if __name__ == "__main__":
    flags, words = ([w for w in sys.argv[2:] if w.startswith("--") == flag] for flag in (True, False))
    late = "--late" in flags
    known = (*REPORTED, *reported_pairs()) if "--reports" in flags else (*FAULTS, *correct())
    chosen = [c for c in known if (not words or any(w in c.name for w in words))]
    chosen = [c for c in chosen if "--record" in flags or c.late == late or "--all" in flags]
    out = Path(sys.argv[1])
    errors = record_all(chosen, out, [tt.stats()] if "--statistics" in flags else [])
    for name, error in errors.items():
        print(f"{name} did not run:\n{error[-600:]}", file=sys.stderr)
    if "--record" not in flags:
        for faults in (True, False):
            found = []
            for o in outcomes([c for c in chosen if (c.answer is not None) == faults and c.name not in errors], out):
                found.append(o)
                print(f"  {'ok ' if o.right else 'BAD'} {o.name}: {o.answer[:400]}", flush=True)
            print(f"{'faults' if faults else 'correct'}: {sum(o.right for o in found)} of {len(found)}\n", flush=True)
