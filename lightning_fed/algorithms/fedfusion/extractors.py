"""Finds a network's feature layer, and reads or replaces the layer's features."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.callbacks.training_trace import find_class_task
from lightning_fed.features.layers import FeatureLayer, encoder_of, require_classifier, trained_layers
from lightning_fed.numerics.trees import like_sequence

_EXTRACTOR_NAMES = ("features", "encoder", "backbone", "feature_extractor", "extractor", "body", "base")
_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool2d)
_TIMM_POOLS = ("SelectAdaptivePool2d", "FastAdaptiveAvgPool")
_SIDES = (64, 32, 28, 96, 128, 224, 256, 384, 512)  # pixels


class Extractor(NamedTuple):
    """Feature extractor, the part of a network up to one layer.

    Attributes:
        network: Name of the submodule called with the inputs, as in ``named_modules``.
        layer: Location of the features: the input or the output of a layer in the network.
    """

    network: str
    layer: FeatureLayer

    @property
    def path(self) -> str:
        """Name of the feature layer, as in the model's ``named_modules``."""
        return ".".join(filter(None, (self.network, self.layer.path)))

    def __str__(self) -> str:
        return f"the {self.layer.side} of {self.path!r}"


def find_extractor(
    module: nn.Module,
    at: str | FeatureLayer = "auto",
    network: str = "auto",
    classifier: str | None = None,
) -> Extractor:
    """Finds the layer with a model's features as output or input.

    With ``at="auto"`` the first existing layer in this list is used, except in frozen networks such as a teacher:

    1. In segmentation models: the ``encoder`` or ``backbone``.
    2. A module named ``features``, ``encoder``, ``backbone``, ``extractor``, ``body`` or ``base``, if this is the
       first of several modules with parameters (VGG, DenseNet, MobileNet).
    3. The input to the last global pooling before the classifier, or without such a pooling the input to the last
       ``nn.Flatten`` (ResNet).
    4. The classifier's input (vision transformers).

    Args:
        module: The model, or a module around the model.
        at: Name of the layer with the features as output, a ``FeatureLayer`` for an input or output, or ``"auto"``.
        network: Name of the submodule that receives the images or other data; ``""`` for ``module``, and ``"auto"`` to
            search for the submodule.
        classifier: Name of the layer that returns the logits; by default found with
            :func:`~lightning_fed.modules.find_classifier`.

    Raises:
        ValueError: If the layer does not exist, or is outside the network. With ``"auto"``, if the model has several
            classifiers.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
        >>> str(find_extractor(net))
        "the input of '2'"
    """
    layers = dict(module.named_modules())
    if at == "auto":
        candidates = dict(trained_layers(module))
        layer = _find_extractor_module(candidates, classifier) or _find_classifier_input(module, candidates, classifier)
    else:
        layer = at if isinstance(at, FeatureLayer) else FeatureLayer(at)
    for name in (layer.path, *([] if network == "auto" else [network])):
        if name not in layers:
            raise ValueError(
                f"Expected the name of a layer of {type(module).__name__}, but got {name!r}:"
                f" {_children_of_nearest(layers, name)}."
            )
    root = _find_called_module(module, layer) if network == "auto" else network
    if layer.path != root and root and not layer.path.startswith(f"{root}."):
        raise ValueError(f"Expected `network` to hold the layer {layer.path!r}, but got {root!r}.")
    if layer == FeatureLayer(root, "input"):
        raise ValueError(f"Expected features of a layer, but {layer} is the network's input: name a later layer.")
    return Extractor(root, layer._replace(path=layer.path[len(root) :].lstrip(".")))


def named_features(features: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields all floating-point tensors in a layer's output, named by position, such as "0" or "1_0"."""
    if isinstance(features, Tensor):
        if features.is_floating_point():
            yield name or "0", features
    elif isinstance(features, Mapping | list | tuple):
        pairs = features.items() if isinstance(features, Mapping) else enumerate(features)
        for key, value in pairs:
            yield from named_features(value, f"{name}_{key}".lstrip("_"))


def replace_features(features: Any, new: Mapping[str, Tensor], name: str = "") -> Any:
    """Returns a copy of a layer's output with new tensors, named as in :func:`named_features`."""
    if isinstance(features, Tensor):
        return new.get(name or "0", features)
    if isinstance(features, MutableMapping):
        changed = copy.copy(features)
        for key, value in features.items():
            changed[key] = replace_features(value, new, f"{name}_{key}".lstrip("_"))
        return changed
    if isinstance(features, list | tuple):
        values = [replace_features(value, new, f"{name}_{key}".lstrip("_")) for key, value in enumerate(features)]
        return like_sequence(features, values)
    return features


def example_inputs(network: nn.Module) -> Iterator[Tensor]:
    """Yields guessed inputs for a network, suitable for the first layer with parameters."""
    for layer in network.modules():
        weight = next(layer.parameters(recurse=False), None)
        if weight is None:
            continue
        shapes: Sequence[tuple[int, ...]] = ()
        if isinstance(layer, nn.Embedding):
            yield torch.zeros(2, 8, dtype=torch.int64, device=weight.device)
        elif isinstance(layer, nn.Linear):
            shapes = [(layer.in_features,)]
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            shapes = [(layer.in_channels, *[side] * (weight.ndim - 2)) for side in _SIDES]
        for shape in shapes:
            count = 2 * torch.Size(shape).numel()
            yield torch.linspace(-1, 1, count, device=weight.device).to(weight.dtype).reshape(2, *shape)
        if shapes:
            return


def find_extractor_in_fit(
    trainer: L.Trainer, module: L.LightningModule, at: str | FeatureLayer, network: str, option: str
) -> Extractor:
    """Calls :func:`find_extractor` with the classifier found in a trial training step.

    Without a classifier, the extractor is a layer with a name such as ``encoder``. ``option`` is the argument's name in
    error messages.
    """
    if at != "auto":
        return find_extractor(module, at, network)
    try:
        classifier = find_class_task(trainer, module, f"name the feature layer in `{option}`").layer
    except MisconfigurationException:
        layer = _find_extractor_module(dict(trained_layers(module)), None)
        if layer is None:
            raise
        return find_extractor(module, layer, network)
    return find_extractor(module, at, network, classifier)


def _find_extractor_module(layers: Mapping[str, nn.Module], classifier: str | None) -> FeatureLayer | None:
    for name, layer in layers.items():
        if classifier is not None and not f"{classifier}.".startswith(f"{name}." if name else ""):
            continue
        trained = [part for part, child in layer.named_children() if any(True for _ in child.parameters())]
        first = trained[0] if len(trained) > 1 and trained[0] in _EXTRACTOR_NAMES else None
        extractor = encoder_of(layer) or first
        path = f"{name}.{extractor}".lstrip(".")
        if extractor is not None and (classifier is None or not f"{classifier}.".startswith(f"{path}.")):
            return FeatureLayer(path)
    return None


def _find_classifier_input(module: nn.Module, layers: Mapping[str, nn.Module], classifier: str | None) -> FeatureLayer:
    head = require_classifier(module) if classifier is None else classifier
    for layer in layers.values():
        get_classifier: Any = getattr(layer, "get_classifier", None)
        heads = get_classifier() if callable(get_classifier) else None
        if isinstance(heads, tuple | list | nn.ModuleList) and len(heads) > 1:
            raise ValueError(
                f"Expected {type(layer).__name__} to have one layer that computes the logits, but the module has "
                f"{len(heads)}: name the feature layer."
            )
    names = list(layers)
    before = names[: names.index(head)]
    parents = ["", *(name for name in before if name and head.startswith(f"{name}."))]
    siblings = [name for name in before if name and name.rpartition(".")[0] in parents and name not in parents]
    first = next((name for name in before if any(True for _ in layers[name].parameters(recurse=False))), head)
    siblings = [name for name in siblings if before.index(name) > names.index(first)]
    pools = [
        name for name in siblings if isinstance(layers[name], _POOLS) or type(layers[name]).__name__ in _TIMM_POOLS
    ]
    flattens = [name for name in siblings if isinstance(layers[name], nn.Flatten)]
    return FeatureLayer([head, *flattens[-1:], *pools[-1:]][-1], "input")


def _find_called_module(module: nn.Module, layer: FeatureLayer) -> str:
    if not isinstance(module, L.LightningModule):
        return "" if layer.side == "input" or layer.path.rpartition(".")[2] not in _EXTRACTOR_NAMES else layer.path
    if layer.side == "output" and ("." not in layer.path or layer.path.rpartition(".")[2] in _EXTRACTOR_NAMES):
        return layer.path
    first, _, rest = layer.path.partition(".")
    if not rest:
        return ""
    return f"{first}._orig_mod" if rest.startswith("_orig_mod.") else first  # wrapped by `torch.compile`


def _children_of_nearest(layers: Mapping[str, nn.Module], name: str) -> str:
    while name and name not in layers:
        name = name.rpartition(".")[0]
    children = [f"{name}.{child}".lstrip(".") for child, _ in layers[name].named_children()]
    return f"{repr(name) if name else 'it'} has {children}"
