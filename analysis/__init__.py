"""The report, its figures and pages, and comparisons of results."""
