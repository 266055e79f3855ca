"""Class prototypes in messages: of the classes that a client has, and nothing of the others.

What travels up is ``prototypes:classes``, ``prototypes:means`` and ``prototypes:counts``, and the client's margin under
the name that :func:`lpm_name` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fed.functional.prototypes import Prototypes

_NAMES = ("prototypes:classes", "prototypes:means", "prototypes:counts")


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


def find_bad_prototypes(packed: Mapping[str, Tensor], width: int | None = None) -> str | None:
    """What is wrong with prototypes that somebody else packed, in words, or ``None``; nothing if there are none.

    Args:
        packed: What travelled: prototypes, margins and whatever else.
        width: Number of features that the means must have; ``None`` if any will do.

    Example:
        >>> packed = pack_prototypes(Prototypes(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 2])))
        >>> find_bad_prototypes(packed), find_bad_prototypes(packed, width=2)
        (None, 'its prototypes have 1 features instead of 2')

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
    if len(set(classes.tolist())) < len(classes):
        return "its prototypes have a class twice"
    if int(counts.min()) < 1:
        return f"one of its prototypes is the mean of {int(counts.min())} feature vectors"
    if width is not None and means.shape[1] != width:
        return f"its prototypes have {means.shape[1]} features instead of {width}"
    return None
