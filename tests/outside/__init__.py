"""Subjects that this project did not design: models and training loops as other people write them.

`make outside` runs all of them and writes docs/outside.md; `make test` runs a small sample.
"""
