"""Reads a config.json, given as a file or as its folder, as a list of layers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workloads.spec.checks import suggest
from workloads.spec.config_json.families import FAMILIES
from workloads.spec.config_json.fields import Fields
from workloads.spec.config_json.refused_families import REFUSED
from workloads.spec.config_json.without_effect import has_no_effect
from workloads.spec.errors import InvalidExperiment
from workloads.spec.layer_kinds.model import LayeredModel

MOST_BYTES = 16 * 2**20
"""A larger file is no config.json."""
_ENCODERS = ("vision_config", "audio_config")
_OF_ENCODERS = ("vision_", "audio_", "image_", "projector_", "projection_", "multimodal_projector_", "mm_projector_")


def config_path(path: Path) -> Path:
    """The file that a user means with a file or a folder."""
    return path / "config.json" if path.is_dir() else path


def name_of(path: Path) -> str:
    """Name of the model in a file: that of its folder, or of the file if it is not called config.json. Names of the
    Hugging Face cache lose their owner and their snapshot."""
    file = config_path(path).absolute()
    name = file.stem
    if name == "config":
        name = file.parent.name
        if file.parent.parent.name == "snapshots":
            name = file.parent.parent.parent.name
    return name.removesuffix(".json").rpartition("--")[2] or "model"


def read_config(path: Path) -> LayeredModel:
    """The model that a config.json describes. Raises `InvalidExperiment`, with one line for each mistake."""
    return layers_from_config(name_of(path), _json(config_path(path)))


def _json(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        hint = "; nothing is downloaded: give the path of a config.json, or of its folder"
        raise InvalidExperiment(f"{file}: no such file{hint if file.suffix != '.json' else ''}") from None
    except OSError as error:
        raise InvalidExperiment(f"{file}: {error.strerror or error}") from None
    if len(content) > MOST_BYTES:
        raise InvalidExperiment(f"{file} has more than {MOST_BYTES // 2**20} MiB; it is no config.json")
    try:
        data = json.loads(content)
    except UnicodeDecodeError:
        raise InvalidExperiment(f"{file} is not UTF-8 text") from None
    except RecursionError:
        raise InvalidExperiment(f"{file} is nested too deeply") from None
    except ValueError as error:
        raise InvalidExperiment(f"{file} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidExperiment(f"{file} does not hold a mapping")
    return data


def layers_from_config(name: str, data: Mapping[str, Any]) -> LayeredModel:
    """The language part of a configuration. Vision and audio encoders are left out, and said."""
    fields = dict(data)
    encoders = [encoder for encoder in _ENCODERS if fields.pop(encoder, None) is not None]
    left_out = [f"{encoder.partition('_')[0]} encoder ({encoder})" for encoder in encoders]
    text = fields.pop("text_config", None)
    if text is not None:
        if not isinstance(text, Mapping):
            raise InvalidExperiment(f"{name}: text_config must be a mapping")
        fields = _language_part(name, fields, text)
    dropped = [name for name, value in fields.items() if name.endswith("dropout") and value]
    left_out += [f"dropout of {fields.pop(name)} ({name})" for name in dropped]
    kind = fields.get("model_type")
    if kind is None:
        raise InvalidExperiment(f"{name}: model_type is missing")
    if isinstance(kind, str) and kind in REFUSED:
        raise InvalidExperiment(f"{name}: no kinds of layers describe model_type={kind!r}: it has {REFUSED[kind]}")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise InvalidExperiment(f"{name}: no reader for model_type={kind!r}{suggest(str(kind), FAMILIES)}")
    reader = Fields(name, fields)
    model = FAMILIES[kind](reader, kind)
    ignored = reader.refuse_unread()
    return dataclasses.replace(model, left_out=(*left_out, *model.left_out), without_effect=ignored)


def _language_part(name: str, outer: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the language part, with what the outer ones say about it."""
    known = ("model_type", "tie_word_embeddings", "use_unified_vision_chunk", "spatial_merge_size")
    unknown = [
        key
        for key, value in outer.items()
        if key not in known and not key.startswith(_OF_ENCODERS) and not has_no_effect(key, value)
    ]
    if unknown:
        raise InvalidExperiment(
            *(f"{name}: {key} beside text_config is not understood; it may change the computation" for key in unknown)
        )
    tied = outer.get("tie_word_embeddings")
    kind = outer.get("model_type")
    return {
        **({"model_type": f"{kind}_text"} if kind is not None else {}),
        **({"tie_word_embeddings": tied} if tied is not None else {}),
        **text,
    }
