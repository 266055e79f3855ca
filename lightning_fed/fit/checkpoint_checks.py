"""Checks of a checkpoint before a fit goes on from it: its bytes, its model, its method and its clients."""

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


def check_file(path: str | os.PathLike[str] | None) -> None:
    """Checks the bytes of a checkpoint against the checksums in it, at which ``torch.load`` does not look.

    Args:
        path: The file; nothing is checked of what is no local file or was saved without checksums.

    Raises:
        ValueError: If its bytes are not those that were written.

    """
    if path is None or not Path(path).is_file() or not zipfile.is_zipfile(path):
        return
    if not torch.serialization.get_crc32_options():
        return
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError) as error:
        raise ValueError(f"The checkpoint {str(path)!r} is damaged: {error}. Go on from another one.") from error
    if damaged is not None:
        raise ValueError(
            f"The checkpoint {str(path)!r} is damaged: {damaged!r} in it has other bytes than were written. Go on from"
            " another one."
        )


def check_model(state: Mapping[str, Tensor]) -> None:
    """Checks that the model from which a fit starts can be trained by clients.

    Raises:
        MisconfigurationException: If an entry that travels is not finite or has negative statistics.

    """
    fault = find_implausible(state)
    if fault is not None:
        raise MisconfigurationException(
            f"The fit would start from a model that no client can train: {fault}. If it came from a checkpoint, go on"
            " from an earlier one. A constant that holds infinities does not have to travel: make it a buffer, or name"
            " it in `frozen`."
        )


def check_method(then: str, now: str) -> None:
    """Checks that a checkpoint is of the fit's own method.

    Args:
        then: Name of the method of the checkpoint; empty where it does not say.
        now: Name of the fit's.

    Raises:
        ValueError: If it is another one.

    """
    if then and then != now:
        raise ValueError(
            f"The checkpoint is of the method {then!r}, and this fit is one of {now!r}: its server has remembered other"
            " things. To start from its model, load the model alone:"
            ' `model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])`.'
        )


def check_batch_norm(then: str, now: str) -> None:
    """Checks that a fit treats BatchNorm's running statistics as the fit of its checkpoint.

    Args:
        then: The option of the checkpoint as text; empty in checkpoints without one.
        now: The option of the fit.

    Raises:
        ValueError: If the options differ.

    """
    if then and then != now:
        raise ValueError(
            f"Expected `batch_norm` to be {then}, as in the checkpoint, but got {now}: resume with the same option, or"
            " start a new fit from the model's weights:"
            ' `model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])`.'
        )


def warn_of_batch_norm_option(then: str, now: str) -> None:
    """Warns if an evaluation treats BatchNorm in another way than the fit of its checkpoint.

    Args:
        then: The option of the checkpoint as text; empty in checkpoints without one.
        now: The option of the evaluation.

    """
    if then and then != now:
        _log.warning(
            "The values of the checkpoint belong to batch_norm=%s, and this evaluation has %s: set batch_norm=%s to"
            " reproduce them.",
            then,
            now,
            then,
        )


def check_steps(then: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Compares the update steps and private callbacks of a fit and a checkpoint.

    Args:
        then: The checkpoint's steps with their options, by name, the innermost step first, and private callbacks;
            ``None`` in a checkpoint without this record.
        now: The fit's.

    Raises:
        ValueError: If a step, a callback, an option or the order differs.

    """
    old = "of which the file has no record" if then is None else ", ".join(then.values()) or "none"
    new = ", ".join(now.values()) or "none"
    if then is None or list(then.items()) != list(now.items()):
        raise ValueError(
            f"Expected the update steps of the checkpoint, {old}, but got {new}: bounds, noise and epsilon would not"
            " hold for the whole fit. Resume with the same steps, or start a new fit from the model's weights, for"
            " which the old epsilon does not hold:"
            ' `model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])`.'
        )


def describe_clients(clients: Sequence[Client]) -> str:
    """Number and digest of a federation's clients, by which a checkpoint knows them again.

    Example:
        >>> describe_clients(["a", "b"]) == describe_clients(["a", "c"]), describe_clients(range(1_000_000))
        (False, '1000000 clients range(0, 1000000)')

    """
    if isinstance(clients, range):
        return f"{len(clients)} clients {clients}"
    if not isinstance(clients, list | tuple):  # too long to be read, maybe
        return f"{len(clients)} clients"
    hasher = hashlib.sha256()
    for client in clients:
        hasher.update(f"{client!r},".encode(errors="surrogatepass"))
    return f"{len(clients)} clients {hasher.hexdigest()[:16]}"


def count_of(description: Any) -> str:
    """The number of clients in what :func:`describe_clients` returned."""
    return str(description).partition(" ")[0]
