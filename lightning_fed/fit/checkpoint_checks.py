"""Checks of a checkpoint before a fit resumes: bytes, model, method, options and clients."""

from __future__ import annotations

import hashlib
import logging
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_fed.messages import Client
from lightning_fed.model.entries import find_implausible

_log = logging.getLogger(__name__)

_LOAD_WEIGHTS = '`model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])`'


def check_file(path: str | os.PathLike[str] | None) -> None:
    """Verifies the checksums in a checkpoint file, which ``torch.load`` ignores.

    Remote files and files without checksums are accepted. A damaged file raises ``ValueError``.
    """
    if path is None or not Path(path).is_file() or not zipfile.is_zipfile(path):
        return
    if not torch.serialization.get_crc32_options():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: {error}. Resume from another checkpoint."
        ) from error
    if damaged is not None:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: the bytes of {damaged!r} have changed since they were written. "
            "Resume from another checkpoint."
        )


def check_model(state: Mapping[str, Tensor]) -> None:
    """Refuses an initial model with NaN or infinite shared entries, or with negative variances."""
    fault = find_implausible(state)
    if fault is not None:
        raise MisconfigurationException(
            f"The fit would start from a model that no client can train: {fault}. If the model comes from a "
            "checkpoint, resume from an earlier one. A constant with infinite values need not be sent: make it a "
            "buffer, or name it in `frozen`."
        )


def check_option(name: str, then: str, now: str) -> None:
    """Refuses a resumed fit if option ``name`` changed from ``then`` in the checkpoint (``""``: unknown) to ``now``."""
    if then and then != now:
        raise ValueError(
            f"Expected `{name}` to be {then}, as in the checkpoint, but got {now}: resume with the same value, or "
            f"start a new fit from the model's weights: {_LOAD_WEIGHTS}."
        )


def warn_of_batch_norm_option(then: str, now: str) -> None:
    """Warns if ``batch_norm`` changed from ``then`` in the checkpoint (``""``: unknown) to ``now`` in an evaluation."""
    if then and then != now:
        _log.warning(
            "The checkpoint's scores were measured with batch_norm=%s, but this evaluation uses %s: set "
            "batch_norm=%s to reproduce the scores.",
            then,
            now,
            then,
        )


def check_steps(then: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Refuses to resume if update steps or privacy callbacks (order, options) differ from the checkpoint.

    ``then`` (the checkpoint) and ``now`` (the fit) map an update step's name to a text with the options. ``then`` is
    ``None`` if the checkpoint lacks this mapping.
    """
    old = "which the checkpoint does not record" if then is None else ", ".join(then.values()) or "none"
    new = ", ".join(now.values()) or "none"
    if then is None or list(then.items()) != list(now.items()):
        raise ValueError(
            f"Expected the update steps of the checkpoint, {old}, but got {new}: bounds, noise and epsilon would not "
            "hold for the whole fit. Resume with the same steps, or start a new fit from the model's weights, to "
            f"which the old epsilon does not apply: {_LOAD_WEIGHTS}."
        )


def describe_clients(clients: Sequence[Client]) -> str:
    """Returns the number of clients and a hash of the client names as text, for comparison with a checkpoint."""
    if isinstance(clients, range):
        return f"{len(clients)} clients {clients}"
    if not isinstance(clients, list | tuple):  # a lazy sequence may be too long to read
        return f"{len(clients)} clients"
    hasher = hashlib.sha256()
    for client in clients:
        hasher.update(f"{client!r},".encode(errors="surrogatepass"))
    return f"{len(clients)} clients {hasher.hexdigest()[:16]}"


def count_of(description: Any) -> str:
    """Returns the number of clients, as text, from a ``description`` by :func:`describe_clients`."""
    return str(description).partition(" ")[0]
