"""Documents that are packed into sequences: their lengths, and how sequences are dealt over ranks."""
