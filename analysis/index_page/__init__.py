"""The report's page, ``index.html``, and the same numbers as ``report.json``."""
