"""Finds the classifier of a model, and the layer with the features before the classifier."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

_CLASSIFIERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class LogitsLayer(nn.Module):
    """Base class for custom classifier layers. The output's last axis has the logits."""

    num_classes: int


class FeatureLayer(NamedTuple):
    """Location of a model's features: the input or output of the layer named ``path``."""

    path: str
    side: Literal["input", "output"] = "output"

    def __str__(self) -> str:
        return f"the {self.side} of {repr(self.path) if self.path else 'the network'}"


def find_feature_layer(module: nn.Module, classifier: str | None = None) -> FeatureLayer:
    """Finds the layer with a model's features.

    In segmentation models, the features are the output of the encoder or backbone. In other models, the features are
    the input of ``classifier``, by default from :func:`find_classifier`. Without such a layer, ``ValueError`` is
    raised.

    Example:
        >>> find_feature_layer(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2)))
        FeatureLayer(path='3', side='input')
    """
    for name, layer in trained_layers(module):
        encoder = encoder_of(layer)
        if encoder is not None and (classifier is None or f"{classifier}.".startswith(f"{name}.".lstrip("."))):
            return FeatureLayer(f"{name}.{encoder}".lstrip("."))
    return FeatureLayer(require_classifier(module) if classifier is None else classifier, "input")


def encoder_of(layer: nn.Module) -> str | None:
    """Name of the encoder in a segmentation model, or ``None`` for other models."""
    parts = dict(layer.named_children())
    for encoder, followers in (("encoder", ("decoder", "segmentation_head")), ("backbone", ("classifier",))):
        if encoder in parts and any(follower in parts for follower in followers):
            return encoder
    return None


def require_classifier(module: nn.Module) -> str:
    """Returns the classifier's name, or raises ``ValueError`` if :func:`find_classifier` finds none."""
    classifier = find_classifier(module)
    if classifier is None:
        raise ValueError(
            f"Expected {type(module).__name__} to have an encoder, a backbone, a linear layer or a convolution, but"
            " found none: name the feature layer."
        )
    return classifier


def find_classifier(module: nn.Module, optimized: Collection[int] = ()) -> str | None:
    """Finds a model's classifier, the layer with the logits as output. Returns its name, or ``None``.

    By default, this is the last linear or convolutional layer. A model may also declare a classifier, such as timm's
    ``get_classifier()``. Frozen networks, such as a teacher, are ignored. ``optimized`` contains the ids of trained
    parameters, by default of all parameters with gradients.

    Example:
        >>> find_classifier(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)))
        '2'
    """
    layers = dict(trained_layers(module, optimized))
    names = {id(layer): name for name, layer in layers.items()}
    heads = [name for name, layer in layers.items() if isinstance(layer, LogitsLayer)]
    if heads:
        return heads[-1]
    for name, layer in layers.items():
        get_classifier = getattr(layer, "get_classifier", None)
        classifier = get_classifier() if callable(get_classifier) else None
        if isinstance(classifier, nn.Module) and any(True for _ in classifier.parameters()):
            return names[id(classifier)]
        if "segmentation_head" in dict(layer.named_children()):
            return f"{name}.segmentation_head".lstrip(".")
    names_of_classifiers = [name for name, layer in layers.items() if isinstance(layer, _CLASSIFIERS)]
    return names_of_classifiers[-1] if names_of_classifiers else None


def count_classes(module: nn.Module, optimized: Collection[int] = ()) -> int | None:
    """Number of the classifier's classes, or ``None`` without a classifier. One logit means two classes."""
    name = find_classifier(module, optimized)
    if name is None:
        return None
    classifier = module.get_submodule(name)
    if isinstance(classifier, LogitsLayer):
        return classifier.num_classes
    widths = [
        layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
        for _, layer in named_layers(classifier)
        if isinstance(layer, _CLASSIFIERS)
    ]
    return max(2, widths[-1]) if widths else None


def replace_layer(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    """Replaces the layer ``name`` in a module. Returns the module, or ``layer`` if ``name`` is empty."""
    if not name:
        return layer
    parent, _, last = name.rpartition(".")
    module.get_submodule(parent).register_module(last, layer)
    return module


class FeatureTap:
    """Forward hook that stores a layer's features, shape ``(N, d)`` or ``(N, d, *size)``.

    Later layers may change ``features`` in place. A function set as ``on_features`` gets the unchanged features.
    """

    def __init__(self, layer: FeatureLayer, channels_last: bool) -> None:
        self.layer = layer
        self.features: Tensor | None = None
        self.on_features: Callable[[Tensor], None] | None = None
        self._channels_last = channels_last

    def read(self, module: nn.Module, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any], output: Any) -> None:
        values = [*inputs, *named_inputs.values()] if self.layer.side == "input" else [output]
        features = next((value for value in map(_last_map, values) if value is not None), None)
        if features is None:
            kinds = ", ".join(type(value).__name__ for value in values)
            raise ValueError(
                f"Expected {self.layer} to be a tensor, but got {kinds or 'no tensor'}: name another feature layer."
            )
        features = features.detach()
        self.features = features.movedim(-1, 1) if self._channels_last and features.ndim > 2 else features
        if self.on_features is not None:
            self.on_features(self.features)


@contextmanager
def tap_features(module: nn.Module, layer: FeatureLayer) -> Iterator[FeatureTap]:
    """Context manager to read a layer's features in forward passes.

    Yields a :class:`FeatureTap`. For compiled models, also use :func:`without_compiled_code`.

    Args:
        module: Model, or a module with the model inside.
        layer: The layer, and whether to read the input or output. From a list of feature maps, the last is read.

    Raises:
        ValueError: If the layer does not exist.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> with tap_features(net, find_feature_layer(net)) as tap:
        ...     _ = net(torch.zeros(5, 2))
        >>> tap.features.shape
        torch.Size([5, 3])
    """
    layers = dict(module.named_modules())
    if layer.path not in layers:
        parent = layer.path
        while parent and parent not in layers:
            parent = parent.rpartition(".")[0]
        names = [f"{parent}.{name}".lstrip(".") for name, _ in layers[parent].named_children()]
        raise ValueError(
            f"Expected `layer` to be the name of a layer in {type(module).__name__}, but got {layer.path!r}:"
            f" {repr(parent) if parent else 'the module'} contains {names}."
        )
    tapped = layers[layer.path]
    tap = FeatureTap(layer, has_channels_last(tapped))
    hook = torch.compiler.disable(tap.read)  # type: ignore[no-untyped-call]
    handle = tapped.register_forward_hook(hook, with_kwargs=True)
    try:
        yield tap
    finally:
        handle.remove()


def has_channels_last(layer: nn.Module) -> bool:
    """True if a layer's input and output have channels on the last axis, as with linear layers."""
    return isinstance(layer, nn.Linear | LogitsLayer)


def without_compiled_code() -> AbstractContextManager[None]:
    """Context manager to run compiled models in eager mode, so that all hooks run. No effect before torch 2.6."""
    # Compiled code does not call hooks registered after compilation.
    set_stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    return nullcontext() if set_stance is None else set_stance("force_eager")


def named_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields all submodules with names, except metrics."""
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, Metric | MetricCollection):
            yield from named_layers(child, f"{prefix}.{name}".lstrip("."))


def trained_layers(module: nn.Module, optimized: Collection[int] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yields submodules with their names, except metrics and frozen networks.

    A frozen network has sublayers with parameters, and no trained parameter, such as the teacher in distillation. A
    frozen layer without sublayers is yielded. If no parameter is trained, no network counts as frozen. ``optimized``
    contains the ids of trained parameters, by default of all parameters with ``requires_grad``.
    """
    trained = set(optimized) or {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    dropped: list[str] = []
    for name, layer in named_layers(module):
        if any(name.startswith(f"{network}.") for network in dropped):
            continue
        is_network = any(True for child in layer.children() for _ in child.parameters())
        if name and trained and is_network and trained.isdisjoint(map(id, layer.parameters())):
            dropped.append(name)
        else:
            yield name, layer


def _last_map(value: Any) -> Tensor | None:
    if isinstance(value, Mapping):
        value = [value["out"]] if "out" in value else list(value.values())
    if isinstance(value, list | tuple) and value:
        # Some encoders return (maps, tokens).
        first = value[0]
        return _last_map(first if isinstance(first, list | tuple) else value[-1])
    return value if isinstance(value, Tensor) else None
