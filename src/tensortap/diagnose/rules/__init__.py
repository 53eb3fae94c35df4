"""The rules, by what they look at. Each is a function of a snapshot whose keywords are its thresholds."""
