"""The rules, by what they look at. Each is a function of a history whose keywords are its thresholds."""
