"""Finds classification losses in a training step by tracing the operations on class scores and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # without a public name

from lightning_fed.numerics.trees import tree_leaves

BatchPath: TypeAlias = tuple[Any, ...]
"""Keys and indices from a batch to one tensor."""

_CROSS_ENTROPIES = {"nll_loss_forward", "nll_loss2d_forward"}
_BINARY = {"binary_cross_entropy", "binary_cross_entropy_with_logits"}
_PROBABILITIES = {"_softmax", "_log_softmax", "sigmoid", "log_sigmoid_forward", "logsumexp", "exp"}
_SUMS = {"sum", "mean", "linalg_vector_norm", "dot"}
_VIEWS = {
    *("view", "_unsafe_view", "reshape", "permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "alias"),
    *("slice", "select", "split", "split_with_sizes", "unbind", "diagonal", "unfold", "as_strided", "detach"),
    *("index", "index_select", "_to_copy", "clone", "contiguous", "lift_fresh", "flip", "roll", "cat", "stack"),
}
_POOLS = {"avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "amax", "max"}
# Functions that create tensors from only the shape of an operand.
_SHAPES = {f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")}
_SHAPES |= {f"new_{kind}" for kind in ("empty", "empty_strided", "zeros", "ones", "full")}
_INDICES = {torch.int64, torch.int32, torch.int16, torch.uint8}
_PRODUCTS = {"mul", "neg", "div"}
_OPPOSITES: dict[Any, Any] = {"equal": "unequal", "unequal": "equal"}


@dataclass(frozen=True)
class _Scores:
    """Describes how a tensor of class scores was computed.

    The layer with path ``layer`` computed the scores from the batch tensors with indices ``inputs``. The training step
    masks all positions with a label in ``voids``, so the loss ignores these labels.
    """

    layer: str
    channels: int
    inputs: frozenset[int]
    is_probability: bool = False
    voids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class _Labels:
    """Describes how a tensor, such as one-hot vectors or a mask ``labels == 0``, was computed from labels.

    ``fills`` lists labels replaced before the loss, as pairs (old, new): ``labels.masked_fill(labels == 255, 0)`` gives
    (255, 0). The old label is ``None`` if several or unknown labels are replaced.
    """

    leaves: frozenset[int]
    kind: Literal["index", "one_hot", "equal", "unequal", "other"] = "index"
    is_exact: bool = True
    number: int | None = None
    fills: frozenset[tuple[int | None, int]] = frozenset()

    def renamed(self, num_classes: int) -> frozenset[tuple[int | None, int]]:
        classes = range(num_classes)
        return frozenset((label, fill) for label, fill in self.fills if fill in classes and label in (None, *classes))


@dataclass(frozen=True)
class _Origin:
    """Describes how a tensor was computed in a training step.

    The tensor depends on batch tensors with indices ``leaves``, and losses with indices ``losses``. ``product`` is set
    for p * y and p - y, with probabilities p and labels y: the index of the loss after a sum, such as a Dice loss.
    """

    leaves: frozenset[int] = frozenset()
    losses: frozenset[int] = frozenset()
    is_computed: bool = False
    scores: _Scores | None = None
    labels: _Labels | None = None
    product: int | None = None


@dataclass(frozen=True)
class ClassLoss:
    """Loss between labels and the class scores from a layer.

    ``kind`` is ``"binary"`` (one output), ``"multilabel"`` (several classes per example) or ``"multiclass"``.
    ``labels`` are the positions of the labels in the batch; empty if ``training_step`` computes the labels. ``voids``
    are the ignored labels.
    """

    layer: str
    channels: int
    kind: Literal["multiclass", "binary", "multilabel"]
    labels: frozenset[BatchPath]
    has_labels: bool
    voids: frozenset[int]

    @property
    def num_classes(self) -> int:
        return max(2, self.channels)


@dataclass
class ClassLosses:
    """Finds a training step's classification losses, and the layers with the class scores.

    The search finds cross-entropies, binary cross-entropies and negative log-likelihoods, also if computed by
    ``gather``. Dice and focal losses are recognized by a sum over p * y or p - y. Here p is a probability, and y is a
    label, 0 or 1. Between layer and loss only simple operations are allowed, such as softmax, masks and means.

    Example:
        >>> head, inputs, labels = nn.Linear(2, 3), torch.ones(4, 2), torch.tensor([0, 1, 2, 0])
        >>> losses = ClassLosses((inputs, labels))
        >>> with losses.following():
        ...     scores = head(inputs)
        ...     losses.take_output("head", head, scores)
        ...     loss = nn.functional.cross_entropy(scores, labels)
        >>> [(found.layer, found.num_classes, set(found.labels)) for found in losses.find_losses(loss)]
        [('head', 3, {(1,)})]
    """

    batch: Any
    _origins: dict[Any, _Origin] = field(default_factory=dict, init=False)
    _held: list[Any] = field(default_factory=list, init=False)  # prevents reuse of memory addresses
    _losses: list[ClassLoss] = field(default_factory=list, init=False)
    _fed: frozenset[int] = field(default=frozenset(), init=False)  # losses that feed a layer
    _paths: list[BatchPath] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        named = _named_leaves(self.batch)
        self._paths = [path for path, _ in named]
        for place, (_, tensor) in reversed([*enumerate(named)]):
            copies = frozenset(other for other, (_, value) in enumerate(named) if _is_equal(tensor, value))
            self._put(tensor, _Origin(copies, labels=_Labels(frozenset([place]))))

    def following(self) -> TorchDispatchMode:
        return _Following(self)

    def take_input(self, layer: nn.Module, inputs: Any) -> None:
        if any(True for _ in layer.parameters(recurse=False)):
            self._fed = self._fed.union(*(origin.losses for origin in self._all(inputs)))

    def take_output(self, name: str, layer: nn.Module, outputs: Any) -> None:
        widths = _widths(layer)
        if not widths and not any(True for _ in layer.parameters(recurse=False)):
            return
        for output in tree_leaves(outputs):
            if not isinstance(output, Tensor) or not output.ndim:
                continue
            origin = replace(self._get(output), is_computed=True, labels=None)
            sides = [output.shape[side] for side in (-1, min(1, output.ndim - 1))]
            channels = next((side for side in sides if side in widths), None)
            if channels is not None and origin.scores is None:
                origin = replace(origin, scores=_Scores(name, channels, origin.leaves))
            self._put(output, origin)

    def find_losses(self, loss: Any) -> list[ClassLoss]:
        """Returns the classification losses used to compute ``loss``, except losses used as a later layer's input."""
        places = self._get(loss).losses - self._fed if isinstance(loss, Tensor) else frozenset[int]()
        return [self._losses[place] for place in sorted(places)]

    # ------------------------------------------------------------------------------------------------------------------

    def take(self, name: str, is_pointwise: bool, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        name = name.removesuffix("_")
        operands = self._all((args, kwargs))
        if not outputs or name in _SHAPES or not any(origin != _Origin() for origin in operands):
            for result in outputs:  # overwritten by a constant
                self._origins.pop(_key(result), None)
            return
        origin = _Origin(
            frozenset().union(*(origin.leaves for origin in operands)),
            frozenset().union(*(origin.losses for origin in operands)),
            any(origin.is_computed for origin in operands),
        )
        pairs = [origin for origin in operands if origin != _Origin()]
        scores, labels = _scores_of(name, is_pointwise, pairs, _fill_of(name, args)), None
        if not origin.is_computed:
            labels = self._labels_of(name, is_pointwise, args, outputs[0])
        loss = self._loss_of(name, args)
        losses = origin.losses if loss is None else origin.losses | {loss}
        product = self._product_of(name, args) if loss is None else None
        if product is None and name in (*_PRODUCTS, *_SUMS, *_VIEWS):
            product = next((origin.product for origin in pairs if origin.product is not None), None)
        if product is not None and name in _SUMS:
            losses, product = losses | {product}, None
        origin = replace(origin, losses=losses, scores=scores if loss is None else None, labels=labels, product=product)
        for result in outputs:
            self._put(result, origin)

    def _loss_of(self, name: str, args: Sequence[Any]) -> int | None:
        if name in _CROSS_ENTROPIES:
            scores, void = self._get(args[0]).scores, int(args[4])
            axis = min(1, args[0].ndim - 1)
            if scores is None or args[0].shape[axis] != scores.channels:
                return None
            is_void = void != -100 or bool((args[1] == void).any())
            return self._add(scores, "multiclass", self._get(args[1]).labels, {void} if is_void else set())
        if name in _BINARY:
            return self._add_binary(args[0], args[1])
        if name in ("gather", "index"):
            scores = self._get(args[0]).scores
            indices = {args[1]: args[2]} if name == "gather" else dict(enumerate(args[1]))
            for axis, index in indices.items():
                labels = self._get(index).labels if isinstance(index, Tensor) else None
                is_class = labels is not None and labels.kind == "index" and index.dtype in _INDICES
                if scores is not None and scores.is_probability and is_class and args[0].shape[axis] == scores.channels:
                    return self._add(scores, "multiclass", labels)
        return None

    def _product_of(self, name: str, args: Sequence[Any]) -> int | None:
        if name not in ("mul", "sub") or not all(isinstance(value, Tensor) for value in args[:2]):
            return None
        for first, second in (args[:2], args[1::-1]):
            scores = self._get(first).scores
            if scores is not None and scores.is_probability:
                return self._add_binary(first, second)
        return None

    def _add_binary(self, input: Tensor, target: Tensor) -> int | None:
        scores, origin = self._get(input).scores, self._get(target)
        labels = origin.labels
        if scores is None or labels is None or labels.leaves & scores.inputs:
            return None
        if labels.kind != "one_hot" and not bool(((target == 0) | (target == 1)).all()):
            return None
        if labels.kind == "unequal" and (scores.channels > 1 or labels.number):
            return None  # a mask
        if scores.channels == 1:
            is_one = labels.kind == "index" or (labels.kind == "equal" and labels.number == 1)
            return self._add(scores, "binary", replace(labels, is_exact=labels.is_exact and is_one))
        return self._add(scores, "multiclass" if labels.kind in ("one_hot", "equal") else "multilabel", labels)

    def _add(self, scores: _Scores, kind: Any, labels: _Labels | None, voids: Iterable[int] = ()) -> int:
        labels = _Labels(frozenset(), is_exact=False) if labels is None else labels
        renamed = labels.renamed(max(2, scores.channels))
        filled = labels.fills - renamed
        all_voids = scores.voids.union(voids).difference(fill for _, fill in filled)
        all_voids |= {label for label, _ in filled if label is not None}
        paths = frozenset(self._paths[leaf] for leaf in labels.leaves)
        is_exact = labels.is_exact and not renamed
        self._losses.append(ClassLoss(scores.layer, scores.channels, kind, paths, is_exact, all_voids))
        return len(self._losses) - 1

    def _labels_of(self, name: str, is_pointwise: bool, args: Sequence[Any], output: Tensor) -> _Labels | None:
        operands = [origin.labels for origin in self._all(args)]
        known = [labels for labels in operands if labels is not None]
        if not known:
            return None
        leaves = frozenset[int]().union(*(labels.leaves for labels in known))
        first = self._get(args[0]).labels if isinstance(args[0], Tensor) else known[0]
        if name in ("index", "index_select") and first is None:
            is_row = output.ndim > 1 and bool(((output == 0) | (output == 1)).all() & (output.sum(-1) == 1).all())
            return replace(known[0], kind="one_hot" if is_row else "other", is_exact=self._is_identity(args))
        if name in ("scatter", "scatter_add") and first is None and len(known) == 1:
            return replace(known[0], kind="one_hot")
        if name in ("eq", "ne") and known[0].kind == "index":
            number = args[1]
            if isinstance(number, Tensor):
                number = int(number) if number.numel() == 1 else None
            if len(known) > 1 or not isinstance(number, int | float):
                return replace(known[0], kind="one_hot" if len(known) == 1 and name == "eq" else "other", leaves=leaves)
            return replace(known[0], kind="equal" if name == "eq" else "unequal", number=int(number))
        if name in ("bitwise_not", "logical_not"):
            return replace(known[0], kind=_OPPOSITES.get(known[0].kind, "other"))
        masks = [labels for labels in known if labels.kind in ({"unequal"} if name == "mul" else _OPPOSITES)]
        others = [labels for labels in known if labels.kind not in _OPPOSITES]
        if name == "index" and first is not None:
            is_exact = first.is_exact and not _has_moves(name, args, output)
            return replace(first, leaves=leaves, is_exact=is_exact)  # a selection
        fill = _fill_of(name, args)
        if fill is not None and others and (masks or name != "mul"):
            labels = next((one for one in others if one.kind in ("index", "one_hot")), others[0])
            numbers = {mask.number for mask in masks} or {None}
            return replace(labels, leaves=leaves, fills=labels.fills | {(number, fill) for number in numbers})
        if name in _VIEWS or "nearest" in name:
            is_exact = all(labels.is_exact for labels in known) and not _has_moves(name, args, output)
            return replace(known[0], leaves=leaves, is_exact=is_exact)
        if is_pointwise:
            is_one_hot = all(labels.kind == "one_hot" for labels in known)
            return replace(known[0], kind="one_hot" if is_one_hot else "other", is_exact=is_one_hot, leaves=leaves)
        return None

    @staticmethod
    def _is_identity(args: Sequence[Any]) -> bool:
        table, places = args[0], args[1]
        are_rows = len(places) == 1 and places[0] is not None if isinstance(places, list | tuple) else places == 0
        is_square = table.ndim == 2 and table.shape[0] == table.shape[1]
        return are_rows and is_square and bool((table == torch.eye(len(table), device=table.device)).all())

    def _all(self, tree: Any) -> list[_Origin]:
        return [self._get(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def _get(self, tensor: Tensor) -> _Origin:
        return self._origins.get(_key(tensor), _Origin())

    def _put(self, tensor: Tensor, origin: _Origin) -> None:
        key = _key(tensor)
        if key is not None:
            self._origins[key] = origin
            self._held.append(tensor.untyped_storage())


class _Following(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, losses: ClassLosses) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._losses = losses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.name().removeprefix("aten::").partition(".")[0]
        self._losses.take(name, torch.Tag.pointwise in func.tags, args, kwargs or {}, output)
        return output


def _has_moves(name: str, args: Sequence[Any], output: Tensor) -> bool:
    dims = args[0].ndim if isinstance(args[0], Tensor) else 1
    if name == "slice" and output.shape != args[0].shape:
        return bool(args[1] % dims) or bool(args[2])
    if name in ("flip", "roll"):
        axes = args[-1] if len(args) > (name == "roll") + 1 else ()
        return not axes or any(axis % dims for axis in axes)
    return name == "index" and any(index is not None and index.dtype != torch.bool for index in args[1][1:])


def _scores_of(name: str, is_pointwise: bool, operands: Sequence[_Origin], fill: int | None) -> _Scores | None:
    scores = [origin.scores for origin in operands if origin.scores is not None]
    is_mixed = any(origin.is_computed and origin.scores is None for origin in operands)
    if is_mixed or len({(part.layer, part.channels) for part in scores}) != 1:
        return None
    is_preserved = (
        is_pointwise
        or name in ("native_dropout", *_VIEWS, *_POOLS, *_PROBABILITIES, *_SUMS)
        or name.startswith("upsample")
    )
    if not is_preserved:
        return None
    voids = frozenset[int]().union(*(part.voids for part in scores))
    kinds = {"unequal"} if name in ("mul", "index") else {"equal", "unequal"}
    for labels in (origin.labels for origin in operands):
        if labels is not None and labels.kind in kinds and (name == "index" or fill is not None):
            voids |= frozenset([labels.number] if labels.number is not None else [])
    is_probability = name in _PROBABILITIES or any(part.is_probability for part in scores)
    return replace(scores[0], is_probability=is_probability, voids=voids)


def _fill_of(name: str, args: Sequence[Any]) -> int | None:
    if name == "mul":
        return 0
    if name not in ("masked_fill", "where"):
        return None
    for value in args[1:]:
        if isinstance(value, int | float) or (isinstance(value, Tensor) and not value.ndim):
            return int(value)
    return None


def _named_leaves(batch: Any, path: BatchPath = ()) -> list[tuple[BatchPath, Tensor]]:
    if isinstance(batch, Tensor):
        return [(path, batch)]
    if isinstance(batch, Mapping):
        items: Iterable[tuple[Any, Any]] = batch.items()
    elif isinstance(batch, list | tuple):
        items = enumerate(batch)
    elif dataclasses.is_dataclass(batch):
        items = vars(batch).items()
    else:
        return []
    return [leaf for key, value in items for leaf in _named_leaves(value, (*path, key))]


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other))


def _widths(layer: nn.Module) -> set[int]:
    for name in ("num_classes", "out_features", "out_channels"):
        width = getattr(layer, name, None)
        if isinstance(width, int) and isinstance(getattr(layer, "weight", None), Tensor):
            return {width}
    matrices = [weight.shape for weight in layer.parameters(recurse=False) if weight.ndim > 1]
    return {shape[side] for shape in matrices for side in (0, -1)}


def _key(tensor: Tensor) -> Any:
    try:
        pointer = tensor.data_ptr()
    except RuntimeError:  # inside torch.func
        return None
    return (pointer, tensor.shape, tensor.stride(), tensor.dtype) if pointer else None
