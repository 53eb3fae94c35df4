"""One step: rows are recorded, and at its end kept, held for look-back, or dropped."""
