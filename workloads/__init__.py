"""What one experiment is, costs and does."""
