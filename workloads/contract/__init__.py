"""What a launcher and a rank agree on: files, heartbeats, stages, clocks."""
