"""What a layout needs, in closed form: memory, traffic and time."""
