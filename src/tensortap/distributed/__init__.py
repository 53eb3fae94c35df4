"""Several processes: ranks, and which of them hold copies or parts of one tensor."""
