"""The state of a sweep on disk: its folder, queue, history, pilots, excluded nodes and submissions."""
