"""The contract's subjects: one for every framework that is installed."""

from __future__ import annotations

import pytest
from subjects import SUBJECTS, subject_of

pytest.register_assert_rewrite("contract", "contract_capabilities", "contract_recording", "watched")


@pytest.fixture(params=SUBJECTS)
def subject(request):
    """A new model of the contract's network."""
    return subject_of(request.param)
