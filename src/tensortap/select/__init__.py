"""What to observe and when: sites, operations, probes, triggers."""
