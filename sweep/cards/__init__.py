"""Cards: results that can be run again and judged."""
