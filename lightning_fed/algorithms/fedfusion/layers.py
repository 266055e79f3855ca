"""Layers that add FedFusion to a network (section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fed.algorithms.fedfusion.equations import channel_axis_of
from lightning_fed.algorithms.fedfusion.extractors import example_inputs, named_features, replace_features
from lightning_fed.algorithms.fedfusion.feature_cache import FeatureCache
from lightning_fed.algorithms.fedfusion.frozen_extractor import FrozenExtractor, is_plain
from lightning_fed.algorithms.fedfusion.operators import (
    ConvInit,
    FusionOperator,
    MixingOperator,
    OperatorName,
    build_operator,
)
from lightning_fed.features.layers import FeatureLayer

Example: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class FusionLayer(nn.Module):
    """Fuses a network's features with a frozen extractor's features.

    Hooks on the network run the frozen extractor on the same inputs, and fuse the features with trainable operators.
    The network's layers keep their names. ``FusionLayer`` has no ``forward``: only the hooks use the operators.

    Args:
        network: The module called with the data.
        layer: Location of the features: the input or the output of a layer. The path ``""`` is the network itself.
        operator: ``"conv"``, ``"multi"``, ``"single"`` or ``"none"``.
        channels: Number of channels, or a list for several tensors; ``"infer"`` runs the network to find the number.
        levels: Positions or keys of the tensors to fuse, if the layer returns several tensors; ``"all"`` fuses all
            tensors except the input data.
        conv_init: Initialisation for "conv", see :class:`~lightning_fed.modules.ConvFusion`.
        conv_bias: Whether to add a bias to "conv".
        channel_axis: Position of the channel axis; by default inferred from the model.
        example: Positional and keyword arguments for the network; by default guessed from the first layer.

    Raises:
        ValueError: If an option is invalid, the channels cannot be found, or a tensor in ``levels`` does not exist.
    """

    operators: nn.ModuleDict

    def __init__(
        self,
        network: nn.Module,
        layer: FeatureLayer,
        operator: OperatorName = "conv",
        channels: int | Sequence[int] | Literal["infer"] = "infer",
        levels: Sequence[int | str] | Literal["all"] = "all",
        *,
        conv_init: ConvInit = "default",
        conv_bias: bool = True,
        channel_axis: int | None = None,
        example: Example | None = None,
    ) -> None:
        super().__init__()
        self.arguments = {"levels": levels, "conv_bias": conv_bias, "channel_axis": channel_axis}
        self.operator = operator
        self.layer = layer
        self.cache: FeatureCache | None = None
        self.has_run = False
        self._network = (network,)  # a tuple, to avoid registration as a submodule
        has_fusion = operator != "none"
        self.frozen = (
            FrozenExtractor(network, layer) if has_fusion else FrozenExtractor(nn.Identity(), FeatureLayer(""))
        )
        self._is_referring = False
        self._reference: dict[str, Tensor] | None = None
        self.ndims: dict[str, int] = {}
        self.is_plain: bool | None = None
        sizes = self._find_channels(channels, levels, channel_axis, example) if has_fusion else {}
        self.channels = [count for count, _ in sizes.values()]
        self.operators = nn.ModuleDict(
            {
                name: build_operator(operator, count, conv_init=conv_init, conv_bias=conv_bias, channel_axis=axis)
                for name, (count, axis) in sizes.items()
            }
        )
        weight = next(network.parameters(), None)
        if weight is not None and weight.is_floating_point():
            self.operators.to(weight.device, weight.dtype)
        self._handles: list[RemovableHandle] = []
        if not has_fusion:
            return
        tapped = network.get_submodule(layer.path)
        self._handles.append(network.register_forward_pre_hook(self._before_network, with_kwargs=True))
        if layer.side == "input":
            self._handles.append(tapped.register_forward_pre_hook(self._before_layer, with_kwargs=True))
        else:
            self._handles.append(tapped.register_forward_hook(self._after_layer, prepend=True, with_kwargs=True))

    @property
    def network(self) -> nn.Module:
        return self._network[0]

    @property
    def is_referring(self) -> bool:
        """True while features are fused with the frozen extractor's features."""
        return self._is_referring

    def mixing_operators(self) -> dict[str, MixingOperator]:
        """Returns the operators that average local and global features, ``"multi"`` or ``"single"``, by feature."""
        return {name: operator for name, operator in self.operators.items() if isinstance(operator, MixingOperator)}

    def summaries(self) -> dict[str, dict[str, float]]:
        """Returns values to log for each fused feature, such as the mean fusion weight."""
        operators = self.operators.items()
        return {name: operator.summary() for name, operator in operators if isinstance(operator, FusionOperator)}

    def refer(self, source: nn.Module | Mapping[str, Tensor] | None = None) -> None:
        """Enables fusion with a frozen copy of ``source``, by default of ``network`` with the current weights."""
        if self.operator != "none":
            self.frozen.refer(self.network if source is None else source)
            self._is_referring, self._reference = True, None

    def release(self) -> None:
        """Disables the frozen extractor, so local features replace the global features."""
        self._is_referring, self._reference = False, None

    def watch_loading(self, owner: nn.Module) -> None:
        """Allows the parent module ``owner`` to load states without fusion operators."""
        self._handles.append(owner.register_load_state_dict_post_hook(self._keep_operators))  # type: ignore[no-untyped-call]

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # Hooks

    def _before_network(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_referring:
            return
        if any(value.grad_fn is not None for _, value in named_features([args, kwargs])):
            raise RuntimeError(
                f"Expected {type(network).__name__}, the network with fused features, to receive a batch's data, but"
                " the inputs are outputs of other layers: pass the enclosing module's name as `network`."
            )
        self.frozen.follow(network)
        if self.cache is None or len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            self._reference = self._reference_features(*args, **kwargs)
        else:
            self._reference = self.cache.get(args[0], self._reference_features)

    def _before_layer(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (self._fuse_features(args[0], args, kwargs), *args[1:]), kwargs

    def _after_layer(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        return self._fuse_features(output, args, kwargs)

    def _reference_features(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        features = dict(named_features(self.frozen(*args, **kwargs)))
        return {name: features[name] for name in self.operators}

    def _fuse_features(self, features: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        local = dict(named_features(features))
        if not self.has_run:
            self.has_run, self.is_plain = True, is_plain(args, kwargs, features)
            self.ndims = {name: local[name].ndim for name in self.operators}
        if self._is_referring:
            reference, self._reference = self._reference, None
            if reference is None:
                raise RuntimeError(
                    f"Expected {self.layer} to be computed once per {type(self.network).__name__} call, but the layer"
                    " ran twice in a call or outside one: set `at` to another layer, or `network` to the called module."
                )
        else:
            reference = {name: local[name].detach() for name in self.operators}
        return replace_features(
            features, {name: operator(local[name], reference[name]) for name, operator in self.operators.items()}
        )

    def _keep_operators(self, owner: nn.Module, incompatible: Any) -> None:
        operator_names = tuple(f".{name}" for name in self.state_dict())
        missing = [name for name in incompatible.missing_keys if name.endswith(operator_names)]
        if len(missing) == len(operator_names):
            incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name not in missing]

    # Channels

    def _find_channels(
        self,
        channels: int | Sequence[int] | Literal["infer"],
        levels: Sequence[int | str] | Literal["all"],
        channel_axis: int | None,
        example: Example | None,
    ) -> dict[str, tuple[int, int | None]]:
        if channels != "infer":
            counts = [channels] if isinstance(channels, int) else list(channels)
            names = [str(level) for level in (range(len(counts)) if levels == "all" else levels)]
            if len(names) != len(counts):
                raise ValueError(
                    f"Expected one number in `channels` for each of {len(names)} levels, but got {counts}."
                )
            with suppress(ValueError):  # otherwise the copy contains the whole network
                self._run(example)
            return {name: (count, channel_axis) for name, count in zip(names, counts, strict=True)}
        inputs, features, last = self._run(example)
        sizes: dict[str, tuple[int, int | None]] = {}
        for name, value in _select_levels(dict(named_features(features)), levels, inputs).items():
            axis = _last_axis(value, last) if channel_axis is None else channel_axis
            sizes[name] = (value.shape[channel_axis_of(value, axis)], axis)
            self.ndims[name] = value.ndim
        self.is_plain = self.frozen.is_plain
        return sizes

    def _run(self, example: Example | None) -> tuple[Any, Any, nn.Module | None]:
        """Runs the network on an example, or on guessed inputs if ``example`` is ``None``.

        Returns the network's input, the features, and the last executed layer with parameters.
        """
        error: Exception | None = None
        guesses: Iterator[Example] = (((guess,), {}) for guess in example_inputs(self.network))
        for args, kwargs in guesses if example is None else [example]:
            try:
                return (args, kwargs), *self.frozen.prune(*args, **kwargs)
            except Exception as fault:
                error = error or fault
        raise ValueError(
            f"Expected to infer the channels of {self.layer} by running {type(self.network).__name__}, but "
            f"{'no example input can be derived from the first layer' if error is None else f'this raised {error!r}'}: "
            "set the module's `example_input_array`, or `channels`."
        ) from error


def _last_axis(features: Tensor, last: nn.Module | None) -> int | None:
    if features.ndim < 4 or not isinstance(last, nn.Linear | nn.LayerNorm):
        return None
    width = last.out_features if isinstance(last, nn.Linear) else last.normalized_shape[-1]
    # Channels are the last axis, as in Swin transformers.
    return -1 if features.shape[1] != width == features.shape[-1] else None


def _select_levels(
    features: dict[str, Tensor], levels: Sequence[int | str] | Literal["all"], inputs: Any
) -> dict[str, Tensor]:
    data = [value for _, value in named_features(inputs)]
    if levels == "all":
        computed = {
            name: value
            for name, value in features.items()
            if value.numel() and not any(value.shape == item.shape and torch.equal(value, item) for item in data)
        }
        if computed:
            return computed
    names, selected = list(features), {}
    for level in () if levels == "all" else levels:
        name = names[level] if isinstance(level, int) and -len(names) <= level < len(names) else str(level)
        if name in features:
            selected[name] = features[name]
    if not selected or len(selected) != len(levels):
        shapes = {name: tuple(value.shape) for name, value in features.items()}
        raise ValueError(f"Expected `levels` to be among the extractor's features, {shapes}, but got {levels!r}.")
    return selected


class FusedExtractor(nn.Module):
    """A feature extractor with fusion.

    The layer fuses the features of a trained extractor and of a frozen copy. Until :meth:`refer` is called, the trained
    extractor's features replace the copy's. In a federation :class:`~lightning_fed.callbacks.FeatureFusion` copies the
    received global model.

    Args:
        local: The trained extractor.
        operator: Name of the fusion operator, such as ``"conv"``.
        channels: Number of channels, or a list for several tensors; ``"infer"`` runs the extractor to find the number.
        options: Further arguments for :class:`~lightning_fed.modules.FusionLayer`.

    Raises:
        ValueError: If an option is invalid, or the channels cannot be found.

    Example:
        >>> extractor = FusedExtractor(nn.Conv2d(1, 8, 3), "multi")
        >>> extractor.refer()  # the global model as it was sent
        >>> extractor(torch.zeros(2, 1, 6, 6)).shape, len(extractor.state_dict())
        (torch.Size([2, 8, 4, 4]), 3)
    """

    def __init__(
        self,
        local: nn.Module,
        operator: OperatorName = "conv",
        channels: int | Sequence[int] | Literal["infer"] = "infer",
        **options: Any,
    ) -> None:
        super().__init__()
        self.local = local
        self.feature_fusion = FusionLayer(local, FeatureLayer(""), operator, channels, **options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.local(*args, **kwargs)

    def refer(self, source: nn.Module | Mapping[str, Tensor] | None = None) -> None:
        """Copies ``source``, by default ``local`` with the current weights, to the frozen extractor."""
        self.feature_fusion.refer(source)

    def release(self) -> None:
        """Disables the frozen extractor, so local features replace the global features."""
        self.feature_fusion.release()
