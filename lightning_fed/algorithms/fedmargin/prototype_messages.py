"""Class prototypes in messages: of the classes that a client has, and nothing of the others.

What travels up is ``prototypes:classes``, ``prototypes:means`` and ``prototypes:counts``, and the client's margin under
the name that :func:`lpm_name` gives it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from lightning_fed.algorithms.fedmargin.prototypes import Prototypes

_Client = TypeVar("_Client")

_NAMES = ("prototypes:classes", "prototypes:means", "prototypes:counts")
_MOST = 2**48  # feature vectors: what thousands of clients add up to fits an integer


def pack_prototypes(prototypes: Prototypes) -> dict[str, Tensor]:
    """The prototypes of the classes there are, as they travel.

    Example:
        >>> packed = pack_prototypes(Prototypes(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 2])))
        >>> {name: value.tolist() for name, value in packed.items()}
        {'prototypes:classes': [1], 'prototypes:means': [[3.0]], 'prototypes:counts': [2]}

    """
    classes = prototypes.present.nonzero()[:, 0]
    return {
        "prototypes:classes": classes,
        "prototypes:means": prototypes.means[classes],
        "prototypes:counts": prototypes.counts[classes],
    }


def unpack_prototypes(packed: Mapping[str, Tensor], num_classes: int) -> Prototypes | None:
    """What :func:`pack_prototypes` packed, over ``num_classes`` classes; ``None`` where there is nothing.

    Raises:
        ValueError: If the shapes do not fit each other, or a class is out of its range.

    Example:
        >>> unpack_prototypes(pack_prototypes(Prototypes(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 2]))), 2).counts
        tensor([0, 2])

    """
    if "prototypes:classes" not in packed:
        return None
    classes, means, counts = (packed[f"prototypes:{name}"].cpu() for name in ("classes", "means", "counts"))
    if means.ndim != 2 or counts.shape != classes.shape or means.shape[:1] != classes.shape:
        raise ValueError(
            "Expected prototypes of shape (C, d) with C counts and C classes, but got"
            f" {tuple(means.shape)}, {tuple(counts.shape)} and {tuple(classes.shape)}."
        )
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise ValueError(f"Expected classes in 0 to {num_classes - 1}, but got {classes.tolist()}.")
    full = Prototypes(
        torch.zeros(num_classes, means.shape[1], dtype=means.dtype), torch.zeros(num_classes, dtype=torch.int64)
    )
    full.means[classes], full.counts[classes] = means, counts
    return full


def lpm_name(margin: str, class_reduction: str) -> str:
    """Under what name a local prototype margin travels: it says how it was measured.

    Example:
        >>> lpm_name("semantic", "mean")
        'prototypes:lpm:semantic:mean'

    """
    return f"prototypes:lpm:{margin}:{class_reduction}"


def find_bad_prototypes(packed: Mapping[str, Tensor], num_classes: int | None = None) -> str | None:
    """What is wrong with prototypes that somebody else packed, in words, or ``None``; nothing if there are none.

    Args:
        packed: What travelled: prototypes, margins and whatever else.
        num_classes: Number of classes; ``None`` where it is not known.

    Example:
        >>> packed = pack_prototypes(Prototypes(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 2])))
        >>> find_bad_prototypes(packed), find_bad_prototypes(packed, num_classes=1)
        (None, 'its prototypes are of class 1 instead of 0 to 0')

    """
    margins = [value for name, value in packed.items() if name.startswith("prototypes:lpm:")]
    if any(value.numel() != 1 or not value.is_floating_point() for value in margins):
        return "its prototype margin is not a number"
    missing = [name for name in _NAMES if name not in packed]
    if missing:
        return None if len(missing) == len(_NAMES) else f"its prototypes come without {missing[0]!r}"
    classes, means, counts = (packed[name] for name in _NAMES)
    if means.ndim != 2 or classes.shape != means.shape[:1] or counts.shape != means.shape[:1]:
        shapes = ", ".join(str(tuple(packed[name].shape)) for name in _NAMES)
        return f"its prototypes have classes, means and counts of the shapes {shapes}"
    if classes.dtype != torch.int64 or counts.dtype != torch.int64 or not means.is_floating_point():
        kinds = ", ".join(str(packed[name].dtype) for name in _NAMES)
        return f"its prototypes have classes, means and counts of the types {kinds}"
    if not len(classes):
        return None
    if int(classes.min()) < 0:
        return f"its prototypes are of class {int(classes.min())}"
    if num_classes is not None and int(classes.max()) >= num_classes:
        return f"its prototypes are of class {int(classes.max())} instead of 0 to {num_classes - 1}"
    if len(set(classes.tolist())) < len(classes):
        return "its prototypes have a class twice"
    for count in (int(counts.min()), int(counts.max())):
        if not 1 <= count <= _MOST:
            return f"one of its prototypes is the mean of {count} feature vectors"
    return None


def find_odd_prototypes(packed: Mapping[_Client, Mapping[str, Tensor]], known: int | None = None) -> dict[_Client, str]:
    """Whose prototypes have other numbers of features than most clients', and what is wrong with them, in words.

    No single client says how many features there are, also not the first one. Of equally frequent numbers the known one
    counts, or else the larger.

    Args:
        packed: What each client sent, in which :func:`find_bad_prototypes` has found nothing.
        known: Number of features of earlier prototypes, if there are any.

    Example:
        >>> means = {"a": torch.ones(2, 3), "b": torch.ones(2, 8), "c": torch.ones(1, 8)}
        >>> find_odd_prototypes({k: pack_prototypes(Prototypes(v, torch.ones(len(v)).int())) for k, v in means.items()})
        {'a': 'its prototypes have 3 features instead of 8'}

    """
    widths = {client: one["prototypes:means"].shape[1] for client, one in packed.items() if len(one.get(_NAMES[0], ()))}
    votes = Counter(widths.values())
    most = max(votes, key=lambda width: (votes[width], width == known, width), default=None)
    return {
        client: f"its prototypes have {width} features instead of {most}"
        for client, width in widths.items()
        if width != most
    }
