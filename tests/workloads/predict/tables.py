"""Small tables of training configurations for the tests of the predictor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

MODELS = {
    1: {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192},
    3: {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192},
    8: {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336},
}


def row(model: int = 8, **changes: Any) -> dict[str, Any]:
    """Eight H200, data parallel, two sequences of 4,096 each; with changes."""
    base = {
        "gpu": "H200", "gpus": 8, **MODELS[model], "vocab": 128256, "tie_embeddings": model < 8, "seq": 4096, "mbs": 2,
        "grad_accum": 2, "dp": 8, "tp": 1, "pp": 1, "vpp": 1, "cp": 1, "ep": 1, "sharding": "zero1",
        "recompute": "none", "precision": "bf16", "codebase": "ultrasweep",
    }  # fmt: skip
    return {**base, **changes}


def random_rows(count: int, seed: int) -> pd.DataFrame:
    """Layouts of all models that multiply out."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        tp, pp = (int(rng.choice([1, 2, 4])) for _ in range(2))
        gpus = int(rng.choice([16, 32, 64]))
        rows.append(
            row(
                int(rng.choice([1, 3, 8])),
                gpus=gpus,
                dp=gpus // tp // pp,
                tp=tp,
                pp=pp,
                mbs=int(rng.choice([1, 2, 4])),
                grad_accum=int(rng.choice([4, 8, 16])),
                sharding=f"zero{rng.integers(4)}",
                recompute=str(rng.choice(["none", "selective", "full"])),
            )
        )
    return pd.DataFrame(rows)
