"""One training step: building, data parallelism, pipeline, optimizer."""
