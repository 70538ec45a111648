"""Memory, traffic and time of a layout in closed form."""
