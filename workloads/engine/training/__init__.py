"""One training step: building the engine, data parallelism, pipeline, optimizer."""
