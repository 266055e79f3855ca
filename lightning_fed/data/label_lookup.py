"""Labels and natural groups of the samples of a data set, without running its transforms where possible.

Partitions need one class per sample. Classification sets mostly keep theirs in an attribute; in a segmentation set, the
class of an image is taken to be its dominant foreground class.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.data.population import seeded_generators

_log = logging.getLogger(__name__)

MapDataset = Dataset[Any] | Sequence[Any]
"""A data set with ``__len__`` and ``__getitem__``."""

IndexArray = npt.NDArray[np.int64]

_NAMES = ("targets", "labels", "label", "target", "y")  # of attributes and columns
_KEYS = ("label", "labels", "target", "y", "mask")  # of a sample
_NUM_BINS = 10
_HINT = (
    "Pass `label_fn`, a function of a sample that gives its label, a number or a text. The partitions `IID` and"
    " `ByGroup` need no labels."
)
_MOST_BINS = 1 << 16  # larger class numbers are counted by sorting


class NoLabels(TypeError):
    """A data set has no labels where they are looked for."""


def labels_of(
    dataset: MapDataset,
    label_fn: Callable[[Any], float | str] | None = None,
    *,
    ignore_index: int | None = 255,
    background: int | None = 0,
) -> IndexArray:
    """One class label per sample.

    The first of these that the data set offers:

    1. ``label_fn(sample)`` of every sample, if given.
    2. An attribute, or a column of a table (``datasets.Dataset``), that is called ``targets``, ``labels``, ``label``,
       ``target`` or ``y`` and has one entry per sample.
    3. The labels of what a ``Subset`` or ``ConcatDataset`` is made of.
    4. The second tensor of a ``TensorDataset``.
    5. Every sample is read (a line is logged, because it can take long): element 1 of a tuple or list, otherwise the
       entry or attribute ``label``, ``labels``, ``target``, ``y`` or ``mask``. Random augmentations see the same fixed
       seed each time, and the global generators are left as they were.

    A target is a number, or a mask of integers, shape ``(H, W)``, ``(1, H, W)`` or ``(H, W, 1)``. A mask's label is its
    dominant foreground class: the class with most pixels, apart from ``ignore_index`` and ``background``, the smaller
    one of two equals. Numbers with fractions are put into ten bins of equally many samples, which is logged. Texts of
    ``label_fn`` are numbered in the order of the alphabet.

    Args:
        dataset: A data set with ``__len__`` and ``__getitem__``.
        label_fn: Function of a sample, as the data set returns it, that gives its label: a number or a text.
        ignore_index: Value of void pixels in a mask; ``None`` for none (a binary mask stored as 0 and 255, say).
        background: Background class of masks, the label of a mask without foreground; ``None`` where every class counts
            (then a mask of void pixels only has the label ``ignore_index``).

    Returns:
        Labels, shape ``(N,)``.

    Raises:
        TypeError: If the data set cannot be read by index.
        NoLabels: If its targets are neither labels nor masks.
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
        with seeded_generators(0):  # random augmentations repeat
            values = np.asarray([_plain(label_fn(dataset[index])) for index in range(length)])
        return _warned_of(_as_classes(values))

    def label_of(target: Any) -> float:
        return _label_of_target(target, ignore_index, background)

    def known(part: Any, indices: IndexArray) -> npt.NDArray[Any] | None:
        labels = (_labels_of_targets(targets, indices, len(part), label_of) for targets in _possible_targets(part))
        return next((found for found in labels if found is not None), None)

    def read(part: Any, indices: IndexArray) -> npt.NDArray[Any]:
        _log.info(
            "Reading %d samples of %s to find their labels, because it has no labels as `targets` or `labels`. Should"
            " this take long, give it such an attribute.",
            indices.size,
            type(part).__name__,
        )
        with seeded_generators(0):
            labels: list[float] = []
            for index in indices.tolist():
                sample = part[index]
                if not labels:
                    _describe_place(sample)
                labels.append(_label_of_sample(part, index, sample, label_of))
            return np.asarray(labels)

    return _warned_of(_as_classes(_collect(dataset, np.arange(length), known, read)))


def _warned_of(labels: IndexArray) -> IndexArray:
    """The labels, after a line in the log if these may not be classes."""
    if labels.size > 1 and (labels == labels[0]).all():
        _log.warning(
            "All %d samples have the label %d, by which clients cannot differ. In masks of 0 and 255 the foreground"
            " counts as void: pass `ignore_index=None`. Other labels come from `label_fn`.",
            labels.size,
            labels[0],
        )
    if (labels < 0).any():
        _log.warning(
            "%d of %d samples have a label below 0, which counts as a class. If it means `unlabelled`, take these"
            " samples out with a `Subset`, or pass `label_fn`.",
            (labels < 0).sum(),
            labels.size,
        )
    return labels


def groups_of(
    dataset: MapDataset, group: str | npt.ArrayLike | Callable[[Any], int | str] = "groups"
) -> IndexArray | npt.NDArray[np.str_]:
    """The group of every sample: its writer, speaker, video or hospital.

    Args:
        dataset: A data set with ``__len__`` and ``__getitem__``.
        group: Name of an attribute, or of a column of a table, with one group per sample (found through ``Subset`` and
            ``ConcatDataset``; equal names in two parts are one group), or the groups themselves, or a function of a
            sample that gives its group (reads every sample).

    Returns:
        Groups, shape ``(N,)``, integers or strings.

    Raises:
        TypeError: If the data set cannot be read by index, or the groups are neither all integers nor all strings.
        ValueError: If the data set has no such attribute, or the number of groups is not that of the samples.

    Example:
        >>> import torch
        >>> from torch.utils.data import Subset, TensorDataset
        >>> dataset = TensorDataset(torch.rand(3, 2))
        >>> dataset.groups = ["ann", "bob", "ann"]
        >>> groups_of(Subset(dataset, [1, 2])).tolist()
        ['bob', 'ann']

    """
    length = length_of(dataset)
    if callable(group):
        with seeded_generators(0):
            return _as_groups([group(dataset[index]) for index in range(length)], length, "`group`")
    if not isinstance(group, str):
        return _as_groups(group, length, "`group`")

    def known(part: Any, indices: IndexArray) -> npt.NDArray[Any] | None:
        values = _stored_values(part, group)
        return None if values is None else _as_groups(values, len(part), f"`{group}`")[indices]

    def read(part: Any, indices: IndexArray) -> npt.NDArray[Any]:
        raise ValueError(
            f"Expected the data set to have an attribute or column `{group}` with one group per sample, but"
            f" {type(part).__name__} has none. Name another one, or pass the groups or a function of a sample."
        )

    return _collect(dataset, np.arange(length), known, read)


def _collect(
    dataset: Any,
    indices: IndexArray,
    known: Callable[[Any, IndexArray], npt.NDArray[Any] | None],
    read: Callable[[Any, IndexArray], npt.NDArray[Any]],
) -> npt.NDArray[Any]:
    """Values of the samples at ``indices``: those ``known`` to the data set or to its parts, otherwise ``read``."""
    length_of(dataset)
    values = known(dataset, indices)
    if values is not None:
        return values
    if isinstance(dataset, Subset):
        inner = np.asarray(dataset.indices, dtype=np.int64)[indices]  # negative ones count from the end
        inner = np.where(inner < 0, inner + length_of(dataset.dataset), inner)
        return _collect(dataset.dataset, inner, known, read)
    if isinstance(dataset, ConcatDataset):
        ends = np.asarray(dataset.cumulative_sizes)
        part_of = np.searchsorted(ends, indices, side="right")
        positions = [np.flatnonzero(part_of == number) for number in range(ends.size)]
        parts = [
            _collect(part, indices[inside] - (end - length_of(part)), known, read)
            for part, inside, end in zip(dataset.datasets, positions, ends, strict=True)
            if inside.size
        ]
        return np.concatenate(parts)[np.argsort(np.concatenate(positions))] if parts else np.zeros(0, np.int64)
    return read(dataset, indices)


def length_of(dataset: Any) -> int:
    """Number of samples.

    Args:
        dataset: A data set with ``__len__`` and ``__getitem__``.

    Raises:
        TypeError: If the data set cannot be read by index.

    Example:
        >>> length_of(["a", "b"])
        2

    """
    is_iterable = isinstance(dataset, IterableDataset)  # has `__getitem__` too, from `Dataset`
    if is_iterable or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(
            "Expected a data set with `__len__` and `__getitem__` (map-style), but got"
            f" {type(dataset).__name__}. Only such a data set can be split by sample."
        )
    return len(dataset)


def _possible_targets(dataset: Any) -> Iterator[Any]:
    """Yields the attributes, columns and tensors that may hold the targets of all samples."""
    for name in _NAMES:
        yield _stored_values(dataset, name)
    if type(dataset) is TensorDataset and len(dataset.tensors) > 1:  # not a subclass, which may return something else
        yield dataset.tensors[1]


def _stored_values(dataset: Any, name: str) -> Any:
    """The attribute or column of this name; ``None`` if there is neither."""
    values = getattr(dataset, name, None)
    return _column(dataset, name) if values is None else values


def _column(dataset: Any, name: str) -> Any:
    """A column of a table such as ``datasets.Dataset``, as it is stored; ``None`` if there is none."""
    names = getattr(dataset, "column_names", None)
    if not isinstance(names, list | tuple) or name not in names:
        return None
    values = (dataset.with_format(None) if hasattr(dataset, "with_format") else dataset)[name]
    return values if _as_array(values) is not None else list(values)


def _labels_of_targets(
    targets: Any, indices: IndexArray, length: int, label_of: Callable[[Any], float]
) -> npt.NDArray[Any] | None:
    """Labels from the targets of all samples, or ``None`` if these are not one label or mask per sample."""
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


def _label_of_sample(dataset: Any, index: int, sample: Any, label_of: Callable[[Any], float]) -> float:
    try:
        return label_of(_target_of(sample))
    except (TypeError, ValueError) as error:
        error.add_note(f"This is about sample {index} of {type(dataset).__name__}.")
        raise


def _target_of(sample: Any) -> Any:
    place = _place_of_target(sample)
    if place is None:
        raise NoLabels(
            "Expected a sample to be a tuple or list of at least an input and a target, or to have one of"
            f" {', '.join(map(repr, _KEYS))}, but got {_described(sample)}. {_HINT}"
        )
    return sample[place] if isinstance(place, int) or isinstance(sample, Mapping) else getattr(sample, place)


def _place_of_target(sample: Any) -> int | str | None:
    """Index, key or attribute of a sample's target."""
    if isinstance(sample, tuple | list) and len(sample) > 1:
        return 1
    entries = sample if isinstance(sample, Mapping) else {key: getattr(sample, key, None) for key in _KEYS}
    return next((key for key in _KEYS if entries.get(key) is not None), None)


def _describe_place(sample: Any) -> None:
    """Logs where in a sample the label is looked for."""
    place = _place_of_target(sample)
    if isinstance(place, int):
        _log.info(
            "The label of a sample is the second of its %d elements (a %s); `label_fn` takes another one.",
            len(sample),
            type(sample[place]).__name__,
        )
    elif place is not None:
        _log.info("The label of a sample is its %r; `label_fn` takes another one.", place)


def _label_of_target(target: Any, ignore_index: int | None, background: int | None) -> float:
    """The label itself, or a mask's dominant foreground class."""
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
        "Expected a target to be a number or a mask of classes of shape (H, W), (1, H, W) or (H, W, 1), but got"
        f" {_described(target if array is None else array)}. {_HINT}"
    )


def _as_classes(values: npt.NDArray[Any]) -> IndexArray:
    """Labels as they are; texts by their order; numbers with fractions by bins of equally many samples."""
    if values.dtype.kind == "U":
        return np.unique(values, return_inverse=True)[1].astype(np.int64)
    if values.dtype.kind not in "iubf":
        raise NoLabels(f"Expected labels to be numbers, or all of them texts, but got {values[0]!r}. {_HINT}")
    if not np.isfinite(values).all():
        raise ValueError(f"Expected labels to be finite, but got {values[~np.isfinite(values)][0]}. {_HINT}")
    labels = _as_labels(values)
    if labels is not None:
        return labels
    _log.info(
        "The targets are numbers with fractions, from %g to %g: their labels are %d bins of equally many samples."
        " Another division can be passed as `label_fn`.",
        values.min(),
        values.max(),
        _NUM_BINS,
    )
    edges = np.quantile(values, np.linspace(0, 1, _NUM_BINS + 1)[1:-1])
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def _dominant_class(mask: npt.NDArray[Any], ignore_index: int | None, background: int | None) -> int:
    pixels = _as_labels(mask.ravel())
    if pixels is None:
        raise NoLabels(
            f"Expected a mask of classes (whole numbers), but got one of {mask.dtype} with fractions. {_HINT}"
        )
    if pixels.min() >= 0 and pixels.max() < _MOST_BINS:
        counts = np.bincount(pixels)
        classes = np.arange(counts.size)
    else:
        classes, counts = np.unique(pixels, return_counts=True)
    excluded = [value for value in (ignore_index, background) if value is not None]
    counts[np.isin(classes, excluded)] = 0
    if not counts.any():
        return excluded[-1]  # background, or else void: the mask has no other pixels
    if classes[counts > 0].min() < 0:
        raise ValueError(
            f"Expected the classes of a mask to be at least 0, apart from `ignore_index` ({ignore_index}), but got"
            f" {classes.min()}."
        )
    return int(classes[counts.argmax()])


def _as_array(value: Any) -> npt.NDArray[Any] | None:
    """Numbers, tensors, arrays, images and data frames' columns as an array; ``None`` for everything else."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    if isinstance(value, int | float) or hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return np.asarray(value)
    return None


def _as_labels(values: npt.NDArray[Any]) -> IndexArray | None:
    """The values as integers, or ``None`` if they are not whole numbers."""
    if values.dtype.kind not in "iubf":
        return None
    with np.errstate(invalid="ignore"):  # NaN and infinity compare unequal below
        integers = values.astype(np.int64)
    return integers if values.dtype.kind != "f" or bool((integers == values).all()) else None


def _plain(value: Any) -> Any:
    """A tensor of one number, or a number of NumPy, as a number."""
    return value.item() if isinstance(value, Tensor | np.generic | np.ndarray) else value


def _as_groups(values: Any, length: int, source: str) -> npt.NDArray[Any]:
    """Groups as an array of integers or of strings."""
    array = _as_array(values)
    items = list(values) if array is None else array.tolist()
    items = [_plain(item) for item in items]
    if len(items) != length:
        raise ValueError(f"Expected {source} to have one group for each of {length} samples, but got {len(items)}.")
    if all(isinstance(item, str) for item in items):
        return np.asarray(items, dtype=np.str_)
    if all(isinstance(item, int) for item in items):
        return np.asarray(items, dtype=np.int64)
    kinds = sorted({type(item).__name__ for item in items})
    raise TypeError(f"Expected {source} to be all integers or all strings, but got {', '.join(kinds)}.")


def _described(value: Any) -> str:
    """Type and shape of a value, for an error."""
    shape = getattr(value, "shape", None)
    name = type(value).__name__
    if shape is not None:
        return f"{name} of shape {tuple(shape)} and type {getattr(value, 'dtype', '?')}"
    return f"{name} of length {len(value)}" if hasattr(value, "__len__") else name
