"""Correct models that we did not design raise no warning in `tt.check_model`."""

from __future__ import annotations

import pytest

from outside.checked_models import TORCH, TRANSFORMERS, Case, alarms

QUICK = ("TransformerEncoder masked", "LSTM", "SyncBatchNorm", "GPT2LMHeadModel", "BertForSequenceClassification")
CASES = [*TORCH, *TRANSFORMERS]


def _marked(case: Case) -> object:
    quick = case.name.rpartition("/")[2] in QUICK
    return pytest.param(case, id=case.name, marks=() if quick else pytest.mark.thorough)


@pytest.mark.parametrize("case", [_marked(case) for case in CASES])
def test_no_alarm(case):
    """A correct model gives no warning and no error."""
    if case.name.startswith("transformers/"):
        pytest.importorskip("transformers")
    assert alarms(case)[0] == []
