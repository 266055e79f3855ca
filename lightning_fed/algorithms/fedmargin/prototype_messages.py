"""Class prototypes (feature means by class) as extra tensors in a client's update.

A client sends ``prototypes:classes``, ``prototypes:means`` and ``prototypes:counts``. The local prototype margin (LPM),
sent as :func:`lpm_key`, compares prototypes before and after training. The server checks all values before use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from lightning_fed.algorithms.fedmargin.prototypes import Prototypes

_Client = TypeVar("_Client")

# Extras that contain prototypes.
PROTOTYPE_KEYS = ("prototypes:classes", "prototypes:means", "prototypes:counts")

_OUTLYING = 100.0
_LPM = "prototypes:lpm:"
_LPM_WITHOUT_SIGN = f"{_LPM}semantic:"  # a distance, never negative; all other margins are signed
_MAX_COUNT = 2**48  # maximum count per client, so that sums over thousands of clients fit int64


def pack_prototypes(prototypes: Prototypes) -> dict[str, Tensor]:
    """Converts the prototypes of all present classes to extra tensors for an update.

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
    """Reads the prototypes in an update's extra tensors; ``None`` if missing.

    Raises:
        ValueError: If the shapes are inconsistent, or a class is outside the allowed range.

    Example:
        >>> unpack_prototypes(pack_prototypes(Prototypes(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 2]))), 2).counts
        tensor([0, 2])
    """
    if "prototypes:classes" not in packed:
        return None
    classes, means, counts = (packed[f"prototypes:{name}"].cpu() for name in ("classes", "means", "counts"))
    if len(classes) and not 0 <= int(classes.min()) <= int(classes.max()) < num_classes:
        raise ValueError(f"Expected classes in 0 to {num_classes - 1}, but got {classes.tolist()}.")
    full = Prototypes(
        torch.zeros(num_classes, means.shape[1], dtype=means.dtype), torch.zeros(num_classes, dtype=torch.int64)
    )
    full.means[classes], full.counts[classes] = means, counts
    return full


def lpm_key(margin: str, class_reduction: str) -> str:
    """Key of a client's local prototype margin (LPM) in ``update.extras``.

    Example:
        >>> lpm_key("semantic", "mean")
        'prototypes:lpm:semantic:mean'
    """
    return f"{_LPM}{margin}:{class_reduction}"


def find_invalid_prototypes(packed: Mapping[str, Tensor], num_classes: int | None = None) -> str | None:
    """Describes invalid prototypes in an update's extra tensors; ``None`` if valid or missing.

    Example:
        >>> packed = pack_prototypes(Prototypes(torch.tensor([[0.0], [3.0]]), torch.tensor([0, 2])))
        >>> find_invalid_prototypes(packed), find_invalid_prototypes(packed, num_classes=1)
        (None, "the client's prototypes include class 1 instead of only 0 to 0")
    """
    margins = [value for name, value in packed.items() if name.startswith(_LPM)]
    if any(value.numel() != 1 or not value.is_floating_point() for value in margins):
        return "the client's prototype margin is not a floating-point scalar"
    if any(bool(value < 0) for name, value in packed.items() if name.startswith(_LPM_WITHOUT_SIGN)):
        return "the client's prototype margin is a negative distance"
    missing = [name for name in PROTOTYPE_KEYS if name not in packed]
    if missing:
        return None if len(missing) == len(PROTOTYPE_KEYS) else f"the client's prototypes lack {missing[0]!r}"
    classes, means, counts = (packed[name] for name in PROTOTYPE_KEYS)
    has_shapes = means.ndim == 2 and classes.shape == counts.shape == means.shape[:1]
    if not has_shapes or not classes.dtype == counts.dtype == torch.int64 or not means.is_floating_point():
        forms = ", ".join(f"{packed[name].dtype} of shape {tuple(packed[name].shape)}" for name in PROTOTYPE_KEYS)
        return f"the client's prototypes have invalid classes, means and counts: {forms}"
    if not len(classes):
        return None
    if int(classes.min()) < 0:
        return f"the client's prototypes include the invalid class {int(classes.min())}"
    if num_classes is not None and int(classes.max()) >= num_classes:
        return f"the client's prototypes include class {int(classes.max())} instead of only 0 to {num_classes - 1}"
    if len(set(classes.tolist())) < len(classes):
        return "the client's prototypes contain a class twice"
    for count in (int(counts.min()), int(counts.max())):
        if not 1 <= count <= _MAX_COUNT:
            return f"one of its prototypes is the mean of {count} feature vectors"
    return None


def find_outlying_prototypes(packed: Mapping[_Client, Mapping[str, Tensor]]) -> dict[_Client, str]:
    """Finds clients with an unusually large margin or prototype, and describes each fault.

    The limit is 100 times the clients' median, for at least three clients.

    Example:
        >>> margins = {"a": 1.0, "b": 1.5, "c": 1e30}
        >>> find_outlying_prototypes({k: {"prototypes:lpm:semantic:mean": torch.tensor(v)} for k, v in margins.items()})
        {'c': "the client's prototype margin is 1e+30, but the median is 1.5"}
    """
    margins = {
        client: max(abs(float(value)) for name, value in extras.items() if name.startswith(_LPM))
        for client, extras in packed.items()
        if any(name.startswith(_LPM) for name in extras)
    }
    lengths = {
        client: float(extras["prototypes:means"].double().norm(dim=1).max())
        for client, extras in packed.items()
        if len(extras.get("prototypes:classes", ()))
    }
    faults: dict[_Client, str] = {}
    median_length = _median(lengths)
    names = {name for extras in packed.values() for name in extras if name.startswith(_LPM)}
    # Margins with a sign, such as "gain", may have a median near 0: the limit is then at least the median length.
    has_signs = not all(name.startswith(_LPM_WITHOUT_SIGN) for name in names)
    for description, sizes, least in (
        ("prototype margin is", margins, median_length if has_signs else 0.0),
        ("longest prototype has the length", lengths, 0.0),
    ):
        median = _median(sizes)
        for client, size in sizes.items():
            if median and size > _OUTLYING * max(median, least):
                faults[client] = f"the client's {description} {size:.3g}, but the median is {median:.3g}"
    return faults


def find_mismatched_prototypes(
    packed: Mapping[_Client, Mapping[str, Tensor]], known: int | None = None
) -> dict[_Client, str]:
    """Finds clients whose prototypes have another length than most, and describes each fault.

    ``known`` is the length in earlier rounds.

    Example:
        >>> means = {"a": torch.ones(2, 3), "b": torch.ones(2, 8), "c": torch.ones(1, 8)}
        >>> prototypes = {client: Prototypes(mean, torch.ones(len(mean)).int()) for client, mean in means.items()}
        >>> find_mismatched_prototypes({client: pack_prototypes(value) for client, value in prototypes.items()})
        {'a': "the client's prototypes have 3 features instead of 8"}
    """
    widths = {
        client: extras["prototypes:means"].shape[1]
        for client, extras in packed.items()
        if len(extras.get("prototypes:classes", ()))
    }
    votes = Counter(widths.values())  # a tie is decided by the known length, then by the largest
    majority = max(votes, key=lambda width: (votes[width], width == known, width), default=None)
    return {
        client: f"the client's prototypes have {width} features instead of {majority}"
        for client, width in widths.items()
        if width != majority
    }


def _median(sizes: Mapping[_Client, float]) -> float:
    # the lower median if at least three values exist
    return sorted(sizes.values())[(len(sizes) - 1) // 2] if len(sizes) > 2 else 0.0
