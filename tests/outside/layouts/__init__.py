"""One small model trained in many parallel layouts, correctly and with planted faults, against one process."""
