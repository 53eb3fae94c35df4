"""Every adapter keeps the contract."""

from contract import Contract


class TestContract(Contract):
    """See contract.py; conftest.py has the frameworks."""
