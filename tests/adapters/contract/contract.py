"""What every adapter promises, as tests: the same words mean the same on each framework.

A framework joins by a file `subject_<name>.py` with a class `Subject` (the network of reference.py, built in it) and a
line in subjects.py. What a framework cannot give stands in its `capabilities.py`; the contract then asks that it is
refused, with a sentence. A subject has

    framework, act, weight      the adapter's name; the class name of `act`, and the name of the head's weight
    names                       optional: the contract's name of a layer to the framework's, for those it has
    watch(*probes, **options)   as tt.watch with the model
    call(x), fail(x), train(x)  one step of inference, one that raises, one with backward: NumPy in and out
    arguments(x), array(value)  what capture is given, and what it gives, as NumPy
    parameters(), traces()      bytes of what is learnt; everything that a careless tap could leave behind
"""

from __future__ import annotations

from contract_capabilities import CapabilitiesContract
from contract_recording import RecordingContract


class Contract(RecordingContract, CapabilitiesContract):
    """Collected by test_contract.py for every subject."""
