"""Commands that read a sweep's folder, or requeue its points: status, logs, explain, retry."""
