"""Published models as the planner sees them."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from workloads.spec.config_json.expressible import model_spec
from workloads.spec.config_json.read import layers_from_config
from workloads.spec.model_spec import ModelSpec

FILE = Path(__file__).parents[1] / "spec" / "published_models.json"
PUBLISHED: dict[str, Any] = json.loads(FILE.read_text())["models"]


@lru_cache(maxsize=64)
def published(name: str) -> ModelSpec:
    """The model of this name, such as ``openai/gpt-oss-20b``."""
    return model_spec(layers_from_config(name.rpartition("/")[2], PUBLISHED[name]["config"]))
