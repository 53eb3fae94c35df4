"""Callbacks for trainers; each file loads the framework it is for, and nothing here is loaded by `import tensortap`."""
