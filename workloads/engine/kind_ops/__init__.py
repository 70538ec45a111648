"""Operations of layers that differ by kind: attention to windows and chunks, sinks, gates, other activations."""
