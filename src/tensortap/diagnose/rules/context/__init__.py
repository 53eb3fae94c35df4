"""Rules over the training context: causes, with the line of the user's code. May import what other rules may."""
