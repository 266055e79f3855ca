"""Finds each sample's class label or group (such as the writer), if possible without reading the samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import ConcatDataset, IterableDataset, Subset, TensorDataset

from lightning_fed.data.partition import MapDataset
from lightning_fed.data.population import seeded_generators
from lightning_fed.partitions.sample_assignment import IndexArray

_log = logging.getLogger(__name__)

_NAMES = ("targets", "labels", "label", "target", "y")  # names of attributes and columns
_KEYS = ("label", "labels", "target", "y", "mask")  # names of entries in a sample
_NUM_BINS = 10
_HINT = (
    "Pass `label_fn`, a function from a sample to its label (a number or a string). The partitions `IID` and "
    "`ByGroup` need no labels."
)
_MOST_BINS = 1 << 16  # larger class numbers are counted by sorting


class NoLabels(TypeError):
    """Raised if :func:`labels_of` finds no class labels or masks in a data set."""


def labels_of(
    dataset: MapDataset,
    label_fn: Callable[[Any], float | str] | None = None,
    *,
    ignore_index: int | None = 255,
    background: int | None = 0,
) -> IndexArray:
    """Finds one class label per sample, shape ``(N,)``.

    The first available source is used:

    1. ``label_fn(sample)`` for every sample.
    2. An attribute, or a table's column, named ``targets``, ``labels``, ``label``, ``target`` or ``y``.
    3. The labels in the parts of a ``Subset`` or ``ConcatDataset``; the second tensor in a ``TensorDataset``.
    4. Every sample: the second element of a tuple or list, or the value of ``label``, ``labels``, ``target``, ``y`` or
       ``mask``. Reading every sample can take long.

    The label of a mask is the foreground class with the most pixels. Masks contain integers, with shape
    ``(H, W)``, ``(1, H, W)`` or ``(H, W, 1)``. Real numbers are sorted into ten bins with equal sample counts. Strings
    are numbered in alphabetical order.

    Args:
        dataset: A data set with ``__len__`` and ``__getitem__``.
        label_fn: Function from a sample to a number or string.
        ignore_index: Mask value of pixels to skip, or ``None``.
        background: Background class in masks, or ``None``. Also the label of a mask without foreground.

    Raises:
        TypeError: If the data set cannot be read by index.
        NoLabels: If the targets are neither labels nor masks.
        ValueError: If a label is not finite, or a mask has a negative class other than ``ignore_index``.

    Example:
        >>> import torch
        >>> from torch.utils.data import Subset, TensorDataset
        >>> masks = torch.tensor([[[0, 0, 0, 3]], [[2, 1, 2, 255]], [[0, 0, 0, 0]]])
        >>> labels_of(Subset(TensorDataset(torch.rand(3, 1, 1, 4), masks), [1, 0])).tolist()
        [2, 3]
    """
    length = length_of(dataset)
    if label_fn is not None:
        return _as_classes(np.asarray(_apply(label_fn, dataset, range(length))))

    def label_of(target: Any) -> float:
        return _label_of_target(target, ignore_index, background)

    def find_labels(part: Any, indices: IndexArray) -> npt.NDArray[Any] | None:
        found = (_labels_of_targets(targets, indices, len(part), label_of) for targets in _possible_targets(part))
        return next((labels for labels in found if labels is not None), None)

    def read_labels(part: Any, indices: IndexArray) -> npt.NDArray[Any]:
        _log.info(
            "Reading %d samples of %s to find their labels, because the data set has no attribute `targets` or "
            "`labels`. Add such an attribute for faster splits.",
            indices.size,
            type(part).__name__,
        )
        labels: list[float] = []

        def read_label(sample: Any) -> float:
            try:
                return label_of(_find_target(sample, is_logged=not labels))
            except (TypeError, ValueError) as error:
                error.add_note(f"Raised for sample {indices[len(labels)]} of {type(part).__name__}.")
                raise

        with seeded_generators(0):
            for index in indices.tolist():
                labels.append(read_label(part[index]))
        return np.asarray(labels)

    return _as_classes(_collect(dataset, np.arange(length), find_labels, read_labels))


def groups_of(
    dataset: MapDataset, group: str | npt.ArrayLike | Callable[[Any], int | str] = "groups"
) -> IndexArray | npt.NDArray[np.str_]:
    """Finds the group of every sample, such as the writer or hospital, shape ``(N,)``.

    ``group`` contains the groups of all samples, names a data set attribute or table column with the groups, or is a
    function from a sample to the group.
    """
    length = length_of(dataset)
    if not isinstance(group, str):
        groups = _apply(group, dataset, range(length)) if callable(group) else group
        return _as_groups(groups, length, "`group`")

    def find_groups(part: Any, indices: IndexArray) -> npt.NDArray[Any] | None:
        values = _stored_values(part, group)
        return None if values is None else _as_groups(values, len(part), f"`{group}`")[indices]

    def refuse(part: Any, indices: IndexArray) -> npt.NDArray[Any]:
        raise ValueError(
            f"Expected the data set to have an attribute or column `{group}` with one group per sample, but "
            f"{type(part).__name__} has none: pass another name, the groups, or a function from a sample to its group."
        )

    return _collect(dataset, np.arange(length), find_groups, refuse)


def _apply(function: Callable[[Any], Any], dataset: Any, indices: Iterable[int]) -> list[Any]:
    with seeded_generators(0):  # random augmentation repeats
        return [_plain(function(dataset[index])) for index in indices]


def _collect(
    dataset: Any,
    indices: IndexArray,
    find: Callable[[Any, IndexArray], npt.NDArray[Any] | None],
    read: Callable[[Any, IndexArray], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    length_of(dataset)
    values = find(dataset, indices)
    if values is not None:
        return values
    if isinstance(dataset, Subset):
        inner = np.asarray(dataset.indices, dtype=np.int64)[indices]  # negative indices count from the end
        inner = np.where(inner < 0, inner + length_of(dataset.dataset), inner)
        return _collect(dataset.dataset, inner, find, read)
    if isinstance(dataset, ConcatDataset):
        ends = np.asarray(dataset.cumulative_sizes)
        part_of = np.searchsorted(ends, indices, side="right")
        positions = [np.flatnonzero(part_of == number) for number in range(ends.size)]
        parts = [
            _collect(part, indices[inside] - (end - length_of(part)), find, read)
            for part, inside, end in zip(dataset.datasets, positions, ends, strict=True)
            if inside.size
        ]
        return np.concatenate(parts)[np.argsort(np.concatenate(positions))] if parts else np.zeros(0, np.int64)
    return read(dataset, indices)


def length_of(dataset: Any) -> int:
    """Counts the samples in a data set. Refuses a data set without access by index."""
    is_iterable = isinstance(dataset, IterableDataset)  # inherits `__getitem__` from `Dataset`
    if is_iterable or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            f"Expected a data set with `__len__` and `__getitem__` (map-style), but got {type(dataset).__name__}: "
            "only map-style data sets can be split by sample."
        )
    return len(dataset)


def _possible_targets(dataset: Any) -> Iterator[Any]:
    for name in _NAMES:
        yield _stored_values(dataset, name)
    if type(dataset) is TensorDataset and len(dataset.tensors) > 1:  # a subclass may return another type
        yield dataset.tensors[1]


def _stored_values(dataset: Any, name: str) -> Any:
    values = getattr(dataset, name, None)
    names = getattr(dataset, "column_names", None)
    if values is None and isinstance(names, list | tuple) and name in names:
        values = (dataset.with_format(None) if hasattr(dataset, "with_format") else dataset)[name]
        return values if _as_array(values) is not None else list(values)
    return values


def _labels_of_targets(
    targets: Any, indices: IndexArray, length: int, label_of: Callable[[Any], float]
) -> npt.NDArray[Any] | None:
    array = _as_array(targets)
    targets = targets if array is None else array
    if not isinstance(targets, np.ndarray | list | tuple) or len(targets) != length:
        return None
    if isinstance(targets, list | tuple) and all(isinstance(target, int | float) for target in targets):
        targets = np.asarray(targets)
    if isinstance(targets, np.ndarray) and targets.ndim == 1 and targets.dtype.kind in "iubf":
        return targets[indices]
    try:
        return np.asarray([label_of(targets[index]) for index in indices.tolist()])
    except TypeError:
        return None


def _find_target(sample: Any, is_logged: bool) -> Any:
    if isinstance(sample, tuple | list) and len(sample) > 1:
        if is_logged:
            _log.info(
                "The label of a sample is the second of its %d elements (a %s); pass `label_fn` for another element.",
                len(sample),
                type(sample[1]).__name__,
            )
        return sample[1]
    entries = sample if isinstance(sample, Mapping) else {key: getattr(sample, key, None) for key in _KEYS}
    for key in _KEYS:
        if entries.get(key) is not None:
            if is_logged:
                _log.info("The entry %r of a sample is used as the label; pass `label_fn` to use another entry.", key)
            return entries[key]
    raise NoLabels(
        "Expected a sample to be a tuple or list with an input and a target, or to have one of the entries "
        f"{', '.join(map(repr, _KEYS))}, but got {_describe(sample)}. {_HINT}"
    )


def _label_of_target(target: Any, ignore_index: int | None, background: int | None) -> float:
    array = _as_array(target)
    if array is not None and array.dtype.kind in "iubf":
        if array.size == 1:
            number: float = array.item()
            return number
        if array.ndim == 3 and 1 in (array.shape[0], array.shape[-1]):
            array = array.squeeze(0 if array.shape[0] == 1 else -1)
        if array.ndim == 2:
            return _dominant_class(array, ignore_index, background)
    raise NoLabels(
        "Expected a target to be a number or a class mask of shape (H, W), (1, H, W) or (H, W, 1), but got "
        f"{_describe(target if array is None else array)}. {_HINT}"
    )


def _as_classes(values: npt.NDArray[Any]) -> IndexArray:
    """Converts labels to class numbers: strings in alphabetical order, real numbers by quantiles."""
    if values.dtype.kind not in "iubfU":
        raise NoLabels(f"Expected labels to be all numbers or all strings, but got {values[0]!r}. {_HINT}")
    if values.dtype.kind == "U":
        values = np.unique(values, return_inverse=True)[1]
    if not np.isfinite(values).all():
        raise ValueError(f"Expected labels to be finite, but got {values[~np.isfinite(values)][0]}. {_HINT}")
    labels = _as_integers(values)
    if labels is None:
        _log.info(
            "The targets are real numbers from %g to %g, so the labels are %d bins with equally many samples. Pass "
            "`label_fn` for other labels.",
            values.min(),
            values.max(),
            _NUM_BINS,
        )
        edges = np.quantile(values, np.linspace(0, 1, _NUM_BINS + 1)[1:-1])
        labels = np.searchsorted(edges, values, side="right").astype(np.int64)
    if labels.size > 1 and (labels == labels[0]).all():
        _log.warning(
            "All %d samples have the label %d, so clients cannot differ by label. If the masks contain only 0 and "
            "255, the foreground is treated as void: pass `ignore_index=None`. For other labels pass `label_fn`.",
            labels.size,
            labels[0],
        )
    if (labels < 0).any():
        _log.warning(
            "%d of %d samples have a negative label, which is treated as a class. If the label means `unlabelled`, "
            "exclude these samples with a `Subset`, or pass `label_fn`.",
            (labels < 0).sum(),
            labels.size,
        )
    return labels


def _dominant_class(mask: npt.NDArray[Any], ignore_index: int | None, background: int | None) -> int:
    pixels = _as_integers(mask.ravel())
    if pixels is None:
        raise NoLabels(f"Expected a mask of integer classes, but got {mask.dtype} with non-integer values. {_HINT}")
    if pixels.min() >= 0 and pixels.max() < _MOST_BINS:
        counts = np.bincount(pixels)
        classes = np.arange(counts.size)
    else:
        classes, counts = np.unique(pixels, return_counts=True)
    excluded = [value for value in (ignore_index, background) if value is not None]
    counts[np.isin(classes, excluded)] = 0
    if not counts.any():
        return excluded[-1]  # background, else void: the mask has no other pixels
    if classes[counts > 0].min() < 0:
        raise ValueError(
            f"Expected the classes in a mask to be at least 0, except `ignore_index` ({ignore_index}), but got "
            f"{classes.min()}."
        )
    return int(classes[counts.argmax()])


def _as_array(value: Any) -> npt.NDArray[Any] | None:
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, int | float) or hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return np.asarray(value)
    return None


def _as_integers(values: npt.NDArray[Any]) -> IndexArray | None:
    with np.errstate(invalid="ignore"):  # NaN and infinity compare unequal below
        integers = values.astype(np.int64)
    return integers if values.dtype.kind != "f" or bool((integers == values).all()) else None


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor | np.generic | np.ndarray) else value


def _as_groups(values: Any, length: int, source: str) -> npt.NDArray[Any]:
    array = _as_array(values)
    items = [_plain(item) for item in (values if array is None else array.tolist())]
    if len(items) != length:
        raise ValueError(f"Expected {source} to have one group per sample ({length}), but got {len(items)}.")
    for kind, dtype in ((str, np.str_), (int, np.int64)):
        if all(isinstance(item, kind) for item in items):
            return np.asarray(items, dtype=dtype)
    kinds = sorted({type(item).__name__ for item in items})
    raise TypeError(f"Expected {source} to be all integers or all strings, but got {', '.join(kinds)}.")


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    name = type(value).__name__
    if shape is not None:
        return f"{name} of shape {tuple(shape)} and type {getattr(value, 'dtype', '?')}"
    return f"{name} of length {len(value)}" if hasattr(value, "__len__") else name
