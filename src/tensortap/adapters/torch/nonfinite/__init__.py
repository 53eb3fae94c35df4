"""Where a NaN or an infinity was born, and why."""
