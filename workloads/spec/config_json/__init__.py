"""Reads models from Hugging Face `config.json` files, without transformers. No torch here.

One function a family of models, found by ``model_type`` (`families.FAMILIES`), turns the fields of a file into layers
of `workloads.spec.layer_kinds`. A field that no reader reads and that is not known to be without effect is an error.
"""
