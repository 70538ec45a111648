"""Interface between a launcher and its ranks: files, heartbeats, stages, clocks."""
