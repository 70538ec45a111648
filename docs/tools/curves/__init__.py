"""Training curves of small models that learn a real text in every precision and layout: `python -m
docs.tools.curves`."""
