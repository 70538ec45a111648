"""Measures the rates of a node's devices and network, as the engine uses them, for predictions of step times."""
