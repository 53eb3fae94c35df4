"""Watch the compiled steps of a JAX script for `tensortap run`: what goes in and what comes out, by pytree path.

Holds: the watcher (what of JAX is replaced), compiled functions under watch, which of their arguments are parameters,
and the adapter that records them. Imports the JAX adapter and below.
"""
