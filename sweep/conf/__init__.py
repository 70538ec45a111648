"""The sweep's data: YAML only, this file makes the folder one that Hydra finds by its module name."""
