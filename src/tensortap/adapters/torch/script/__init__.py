"""The models, steps and losses of a script that says nothing about them."""
