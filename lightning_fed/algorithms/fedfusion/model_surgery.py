"""Adds FedFusion to a model in place, and removes the fusion again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn

from lightning_fed.algorithms.fedfusion.extractors import Extractor, find_extractor
from lightning_fed.algorithms.fedfusion.layers import Example, FusedExtractor, FusionLayer
from lightning_fed.algorithms.fedfusion.operators import ConvFusion, OperatorName
from lightning_fed.features.isolated_pass import evaluating
from lightning_fed.features.layers import FeatureLayer, replace_layer
from lightning_fed.lightning.internals import is_compiled, is_overridden
from lightning_fed.messages import State

FUSION = "feature_fusion"
"""Name of the submodule that :func:`fuse` adds to a model."""


def fuse(
    module: nn.Module,
    operator: OperatorName = "conv",
    at: str | FeatureLayer = "auto",
    channels: int | Sequence[int] | Literal["infer"] = "infer",
    levels: Sequence[int | str] | Literal["all"] = "all",
    network: str = "auto",
    *,
    example: Example | None = None,
    **options: Any,
) -> FusionLayer:
    """Adds feature fusion to a model in place, and returns the new layer ``module.feature_fusion``.

    The new submodule contains the operators' parameters. All other modules keep their names, so checkpoints without
    fusion can be loaded. Call :meth:`FusionLayer.refer` to set the global model. Until then, the model's features are
    used as local features and as global features.

    Args:
        module: The model.
        operator: ``"conv"``, ``"multi"``, ``"single"`` or ``"none"``.
        at: Name of the layer with the features as output, see :func:`~lightning_fed.modules.find_extractor`.
        channels: Number of channels, or a list for several tensors; ``"infer"`` runs the network to find the number.
        levels: Tensors to fuse, if the layer returns several, see :class:`~lightning_fed.modules.FusionLayer`.
        network: Name of the module called with the data, see :func:`~lightning_fed.modules.find_extractor`.
        example: Positional and keyword arguments for running the network, if the module has no ``example_input_array``.
        options: Further arguments for :class:`~lightning_fed.modules.FusionLayer`.

    Raises:
        ValueError: If an option is invalid, the layer or the channels cannot be found, or the model already has fusion.

    Example:
        >>> from lightning_fed.tasks import ClassificationTask
        >>> task = ClassificationTask("mcmahan_cnn", num_classes=10)
        >>> fuse(task, "conv").operators["0"].weight.shape
        torch.Size([64, 128])
    """
    if hasattr(module, FUSION) or find_fusion(module) is not None:
        raise ValueError(f"Expected {type(module).__name__} without `{FUSION}`, but the module has one: use `unwrap`.")
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        raise ValueError(
            f"Expected no container of layers, but got {type(module).__name__}: wrap it in another kind of module."
        )
    extractor = find_extractor(module, at, network)
    root = module.get_submodule(extractor.network)
    if channels == "infer" and operator != "none":
        example = _example(module, root) or example
    layer = FusionLayer(root, extractor.layer, operator, channels, levels, example=example, **options)
    module.add_module(FUSION, layer)
    layer.watch_loading(module)
    _forget_compiled_code(module)
    return layer


def find_fusion(module: nn.Module) -> FusionLayer | None:
    """Returns a model's fusion layer, or ``None`` for a model without fusion.

    Raises:
        ValueError: If the model has several fusion layers.

    Example:
        >>> find_fusion(nn.Linear(2, 1)) is None
        True
    """
    fusions = [layer for layer in module.modules() if isinstance(layer, FusionLayer)]
    if len(fusions) > 1:
        raise ValueError(f"Expected {type(module).__name__} to have one fusion layer, but got {len(fusions)}.")
    return fusions[0] if fusions else None


def unwrap(module: nn.Module) -> nn.Module:
    """Removes the fusion from a model, in place. Afterwards the model does not depend on this package.

    The model then uses local features also as global features, as with ``eval_reference="current"``:

    - "multi", "single" and "none": the operator is removed, because mixing equal features has no effect.
    - "conv": a 1x1 convolution replaces the operator, or for vectors and tokens a linear layer. The fused layer becomes
      ``nn.Sequential(layer, convolution)``, or for fusion at the layer's input ``nn.Sequential(convolution, layer)``.
      This changes the layer's parameter names.

    A :class:`~lightning_fed.modules.FusedExtractor` is replaced by the trained extractor.

    Raises:
        ValueError: If no fusion exists. For "conv" also if the layer has several inputs or outputs, or has not run.

    Example:
        >>> from lightning_fed.tasks import ClassificationTask
        >>> task = ClassificationTask("mcmahan_cnn", num_classes=10)
        >>> names, _ = list(task.state_dict()), fuse(task, "multi")
        >>> list(unwrap(task).state_dict()) == names
        True
    """
    fusion = find_fusion(module)
    if fusion is None:
        raise ValueError(f"Expected {type(module).__name__} to have a fusion layer, but found none.")
    names = {id(layer): name for name, layer in module.named_modules(remove_duplicate=False)}
    owner_name = names[id(fusion)].rpartition(".")[0]
    owner = module.get_submodule(owner_name)
    extractor = Extractor(names[id(fusion.network)], fusion.layer)
    convolution = _pointwise(fusion, extractor) if fusion.operator == "conv" else None
    fusion.detach()
    _forget_compiled_code(module)
    if isinstance(owner, FusedExtractor):
        local = owner.local if convolution is None else nn.Sequential(owner.local, convolution)
        return replace_layer(module, owner_name, local)
    delattr(owner, FUSION)
    if convolution is not None:
        layer = module.get_submodule(extractor.path)
        layers = (convolution, layer) if extractor.layer.side == "input" else (layer, convolution)
        module = replace_layer(module, extractor.path, nn.Sequential(*layers))
    return module


def plain_state(state: Mapping[str, Tensor]) -> State:
    """Removes the fusion's parameters from a state dict.

    Raises:
        ValueError: If the fusion is a convolution. Load the state into a model with fusion and call :func:`unwrap`.

    Example:
        >>> list(plain_state({"net.weight": torch.zeros(1), "feature_fusion.operators.0.weight": torch.zeros(())}))
        ['net.weight']
    """
    inside = [name for name in state if name.startswith(f"{FUSION}.")]
    convolutions = [name for name in inside if state[name].ndim > 1]
    if convolutions:
        raise ValueError(
            f"Expected a state without 'conv' fusion, but got the convolution {convolutions[0]!r}, without which the"
            " model's outputs change: load the state into a model with fusion, and use `unwrap(model).state_dict()`."
        )
    return {name: value for name, value in state.items() if name not in inside}


def _example(module: nn.Module, network: nn.Module) -> Example | None:
    example = getattr(module, "example_input_array", None) if isinstance(module, L.LightningModule) else None
    if example is None or not is_overridden("forward", module):
        return None
    calls: list[Example] = []
    handle = network.register_forward_pre_hook(
        lambda network, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    weight = next(network.parameters(), None)
    if weight is not None:
        example = move_data_to_device(example, weight.device)
    try:
        with evaluating(module):
            if isinstance(example, Mapping):
                module(**example)
            else:
                module(*(example if isinstance(example, list | tuple) else (example,)))
    finally:
        handle.remove()
    return calls[0] if calls else None


def _forget_compiled_code(module: nn.Module) -> None:
    if is_compiled(module):
        torch.compiler.reset()  # code from before the hooks would not call the hooks


def _pointwise(fusion: FusionLayer, extractor: Extractor) -> nn.Module:
    operators = [operator for operator in fusion.operators.values() if isinstance(operator, ConvFusion)]
    ndims = list(fusion.ndims.values())
    if not ndims:
        raise ValueError(
            f"Expected the number of feature axes to be known, but {extractor} has not run yet: run the model once."
        )
    if not fusion.is_plain:
        raise ValueError(
            "Expected the fused layer to have one input and one feature tensor, so that a convolution can replace the "
            f"fusion, but at {extractor} the layer has other inputs or outputs: keep fusion, or use operator='multi'."
        )
    ndim, (operator,) = ndims[0], operators
    channels = len(operator.weight)
    axis = operator.channel_axis if operator.channel_axis is not None else (-1 if ndim == 3 else 1)
    is_last = ndim == 2 or axis in (-1, ndim - 1)
    has_bias = operator.bias is not None
    kinds = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    convolution: Any = (  # on `meta`: initialisation would consume random numbers
        nn.Linear(channels, channels, has_bias, device="meta")
        if is_last
        else kinds[ndim](channels, channels, 1, bias=has_bias, device="meta")
    )
    with torch.no_grad():
        summed = operator.weight[:, :channels] + operator.weight[:, channels:]
        convolution.to(summed.dtype).to_empty(device=summed.device)
        convolution.weight.copy_(summed.reshape(convolution.weight.shape))
        if has_bias:
            convolution.bias.copy_(operator.bias)
    return convolution.train(fusion.training)  # type: ignore[no-any-return]
