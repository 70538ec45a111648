"""Memory, traffic and kernel times of a rank, observed while it trains."""
