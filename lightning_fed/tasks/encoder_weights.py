"""Loads an encoder's pretrained weights from a local file."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_ENDINGS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")


def is_weight_file(weights: str) -> bool:
    """Returns whether ``encoder_weights`` is a file path instead of the name of published weights."""
    return weights.endswith(_ENDINGS) or os.sep in weights


def load_encoder_weights(encoder: nn.Module, path: str | os.PathLike[str]) -> None:
    """Loads an encoder's weights from a file.

    The file contains safetensors, or a state dict or checkpoint from ``torch.save``. The weights may come from timm or
    smp, or from a whole network with the encoder. Other tensors, such as a classifier, are skipped and logged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"Expected `encoder_weights` to be the name of published weights or a file, but {path} does not exist."
        )
    saved: dict[str, Any] = (
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    )
    state: dict[str, Tensor] = saved.get("state_dict", saved)
    expected = {name: value for name, value in encoder.state_dict().items() if not name.endswith("num_batches_tracked")}
    entries = _renamed(state, expected)
    missing = [name for name in expected if name not in entries]
    if missing:
        raise ValueError(
            f"Expected {path.name} to hold the encoder's {len(expected)} entries, but {len(missing)} are missing "
            f"({', '.join(missing[:3])}, ...). The file has entries named {', '.join(list(state)[:3])}, ...: the file "
            "may belong to another encoder."
        )
    wrong = [name for name in expected if entries[name].shape != expected[name].shape]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"Expected entry {name!r} of {path.name} to have shape {tuple(expected[name].shape)}, but got"
            f" {tuple(entries[name].shape)} ({len(wrong)} entries differ): the file belongs to another encoder, or to"
            " images with another number of channels."
        )
    left_over = [name for name in entries if name not in encoder.state_dict()]
    if left_over:
        _log.info(
            "%d entries of %s do not belong to the encoder: %s, ...",
            len(left_over),
            path.name,
            ", ".join(left_over[:3]),
        )
    encoder.load_state_dict({name: entries[name] for name in entries if name in encoder.state_dict()}, strict=False)


def _renamed(state: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    best, best_count = dict(state), 0
    for anchor in expected:  # the file's first entry with any prefix
        starts = [0, *(match.end() for match in re.finditer(r"\.", anchor))]
        for prefix, ending in ((anchor[:start], anchor[start:]) for start in starts):
            for file_prefix in (
                name.removesuffix(ending) for name in state if name == ending or name.endswith(f".{ending}")
            ):
                renamed = {
                    prefix + name.removeprefix(file_prefix): state[name]
                    for name in state
                    if name.startswith(file_prefix)
                }
                count = sum(name in expected for name in renamed)
                if count > best_count:
                    best, best_count = renamed, count
        if best_count > len(expected) // 2:
            break
    return best
