"""What becomes of activations that neither stay on the device nor are recomputed."""
