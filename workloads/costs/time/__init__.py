"""Step time from calibrated rates."""
