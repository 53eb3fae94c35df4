"""Taps inside graphs that torch.compile makes; README.md says how.

Holds the operators that hooks put into a graph (`operators`, `backward`), the objects that receive what those
operators see when the graph runs (`receivers`), and which code of a model is compiled (`code`). May import `autograd`,
`modules` and `distributed` of this adapter, `adapters.protocol` and everything below the adapters (`record`, `reduce`,
`select`).
"""
