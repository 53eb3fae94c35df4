"""The rules, one file for each subject. A rule is a function of a `RunHistory`; its keywords are its thresholds.

May import `diagnose.history`, `diagnose.rule`, `diagnose.measures`, `reduce`, `select` and what lies below.
"""
