"""Which layouts are possible, and what each engine supports."""
