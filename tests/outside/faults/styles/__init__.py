"""Faults and healthy trainings in the coding styles of different people, one script or two for each style.

Classes and functions, closures, Trainer classes, loops over NumPy, Keras, Hugging Face, accumulation, mixed precision:
the faults are those that published studies count, put in as a stranger would make them.
"""
