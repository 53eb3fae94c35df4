"""What to observe and when: ports, patterns and sites, operations, probes, triggers.

May import `types`, `errors` and `reduce` (for the reducers that probes hold), and nothing else of ours.
"""
