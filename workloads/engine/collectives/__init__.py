"""Process groups and collectives, and the layers that call them."""
