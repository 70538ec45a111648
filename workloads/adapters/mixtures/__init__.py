"""What mixtures of experts need from other engines' packages."""
