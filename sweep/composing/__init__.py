"""Configuration: overrides and YAML files, composed by Hydra and checked."""
