"""Commands that read a sweep's folder: status, logs, explain, retry."""
