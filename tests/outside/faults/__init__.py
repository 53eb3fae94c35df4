"""Faults re-created from published studies of bugs in deep learning, each with its correct form, and healthy trainings.

Each is a script of a few seconds. A fixed hash of its name puts it into the part that rules may be tuned on or into the
part that is only scored.
"""
