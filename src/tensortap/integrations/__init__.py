"""Callbacks for trainers: transformers, Lightning, Accelerate and Keras.

Each module loads the framework it is for, and may import `watch` and everything below it. `import tensortap` loads none
of them.
"""
