"""Peak device memory of one step in closed form."""
