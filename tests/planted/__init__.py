"""Known bugs of parallel training, planted in the engine one by one: every one of them must be found."""
