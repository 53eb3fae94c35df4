"""Faults and correct trainings of other models and layouts: scored, and never used to set a tolerance or a rule."""
