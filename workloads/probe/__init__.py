"""Measures what a node's devices and network can do, as the engine uses them: rates that predictions are made from."""
