"""How each framework is observed: one package for each, the only one that imports it, and modules that all share.

`protocol` is the contract, `registry` the list, `lookup` finds the framework of a model when one is given. May import
`record`, `reduce`, `select`, `store`, `distributed` and the plain values; never `watch`, and no framework's package
imports another's.
"""
