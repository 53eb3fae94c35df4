"""How each framework is observed. An adapter is loaded only for a model of its framework."""
