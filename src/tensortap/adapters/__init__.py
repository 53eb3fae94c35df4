"""How each framework is observed: one package a framework, which alone imports it, and what all of them share.

`protocol` is the contract, `registry` the list, `lookup` finds the framework of a model when one is given. May import
`record`, `reduce`, `select`, `store`, `distributed` and the plain values; never `watch`, nor one framework another.
"""
