"""Per-example gradients: norms, weighted sums, the clipped sum, and a comparison with gradients of single examples.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1. https://arxiv.org/abs/1607.00133
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, TypeAlias, cast

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn import grad as nn_grad

from lightning_fed.data.batch_structure import batch_tensors, rebuild_batch
from lightning_fed.data.population import batch_length, seeded_generators
from lightning_fed.features.isolated_pass import isolated_pass, loss_in
from lightning_fed.lightning.internals import OverriddenMethod
from lightning_fed.model.entries import BatchNorm
from lightning_fed.privacy.root_logger import root_logger_as_it_was

_TRIED = 8  # examples per check
_CONVOLUTIONS: dict[type, Any] = {
    nn.Conv1d: nn_grad.conv1d_weight,
    nn.Conv2d: nn_grad.conv2d_weight,
    nn.Conv3d: nn_grad.conv3d_weight,
}
_Rows: TypeAlias = slice | Tensor


class Gradients(NamedTuple):
    """Gradients of one parameter, separate for each example in a batch.

    ``samples`` contains the gradients, shape ``(examples, ...)``, or ``None`` if not computed. ``norms`` contains the
    norms, shape ``(examples,)``. ``weigh(rows, factors)`` returns a weighted sum over the examples with indices
    ``rows``.
    """

    norms: Tensor
    weigh: Callable[[_Rows, Tensor], Tensor]
    samples: Tensor | None = None


class ExampleGradients:
    """Computes norms and weighted sums of per-example gradients in one backward pass.

    ``values`` maps each parameter to :class:`Gradients`. The loss is the mean over n examples, so each gradient
    contains the factor 1/n.

    Hooks record each layer's inputs and output gradients. Layers without a direct formula use Opacus' rules or
    ``torch.func``. The module is not changed.

    References:
        Li et al., ICLR 2022, section 4 (https://arxiv.org/abs/2110.05679); Bu et al., ICML 2023, Algorithm 1
        (https://arxiv.org/abs/2210.00038).
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self._samplers = _opacus("opacus.grad_sample").GradSampleModule.GRAD_SAMPLERS
        self._sampler_of_others = _opacus("opacus.grad_sample.functorch").ft_compute_per_sample_gradient
        self.values: dict[nn.Parameter, Gradients] = {}
        self.is_recording = True
        self.anchor = torch.zeros((), requires_grad=True)  # a leaf for outputs without trained inputs
        self._calls: Counter[nn.Parameter] = Counter()  # tied layers share a parameter
        self._frozen: list[nn.Parameter] = []
        self._names = {layer: name for name, layer in module.named_modules()}
        self._layers = list(self._find_layers(module, set(parameters)))
        self._handles = [layer.register_forward_pre_hook(self._freeze) for layer in self._layers]
        self._handles += [layer.register_forward_hook(self._watch, always_call=True) for layer in self._layers]

    def clear(self) -> None:
        self.values = {}
        self._calls.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            vars(layer).pop("ft_compute_sample_grad", None)  # cached by Opacus on layers without a rule
        self.clear()

    def _find_layers(self, layer: nn.Module, trained: set[nn.Parameter]) -> Iterator[nn.Module]:
        if any(parameter in trained for parameter in layer.parameters(recurse=False)):
            if not self._names[layer]:
                names = [name for name, value in layer.named_parameters(recurse=False) if value in trained]
                raise MisconfigurationException(
                    f"{type(layer).__name__} has parameters outside any layer ({names[0]!r}), so per-example "
                    "gradients are unknown: move the parameters into a layer (an `nn.Module`)."
                )
            if any(True for _ in layer.buffers(recurse=False)):
                raise MisconfigurationException(
                    f"The layer {self._names[layer]!r} ({type(layer).__name__}) has buffers that depend on examples "
                    "without noise: replace the layer (`lightning_fed.modules.to_group_norm` replaces BatchNorm)."
                )
            yield layer
            if type(layer) not in self._samplers:  # layers without a rule are differentiated as a whole
                _opacus("opacus.grad_sample.functorch").prepare_layer(layer)  # copies the layer, so before the hooks
                return
        for child in dict.fromkeys(layer.children()):
            yield from self._find_layers(child, trained)

    def _freeze(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self.is_recording and torch.is_grad_enabled() and type(layer) in self._samplers:
            self._frozen = [
                parameter
                for name, parameter in layer.named_parameters(recurse=False)
                if name in ("weight", "bias") and parameter.requires_grad
            ]
            for parameter in self._frozen:
                parameter.requires_grad_(False)

    def _watch(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        frozen, self._frozen = self._frozen, []
        for parameter in frozen:  # also after an error in the layer
            parameter.requires_grad_(True)
        if output is None or not (self.is_recording and torch.is_grad_enabled()):
            return None
        if not isinstance(output, Tensor) or not inputs or not all(isinstance(value, Tensor) for value in inputs):
            raise MisconfigurationException(
                f"The layer {self._names[layer]!r} ({type(layer).__name__}) is not called with positional tensors, or "
                "does not return a tensor, so per-example gradients are unknown: change the call, or freeze the layer."
            )
        if type(layer) is nn.Linear and output.ndim > 2:
            output = output.clone()  # a view would lose the hook in an in-place operation
        if frozen and not output.requires_grad:
            output.add_(self.anchor)
        if output.requires_grad:
            # Inputs are detached now, because later operations may overwrite the output.
            activations = [value.detach() for value in inputs]
            self._calls.update(layer.parameters(recurse=False))
            output.register_hook(partial(self._add, layer, activations))
        return output

    @torch.no_grad()
    def _add(self, layer: nn.Module, activations: list[Tensor], output_gradient: Tensor) -> None:
        # With several calls the norm of the sum needs per-example gradients.
        is_only = all(self._calls[parameter] == 1 for parameter in layer.parameters(recurse=False))
        found = _rule(layer, activations[0], output_gradient.detach(), is_only)
        if found is None:
            sampler = self._samplers.get(type(layer), self._sampler_of_others)
            samples = sampler(layer, activations, output_gradient.detach())
            found = {parameter: of_samples(values.to(parameter.dtype)) for parameter, values in samples.items()}
        for parameter, gradients in found.items():
            if not parameter.requires_grad:
                continue
            earlier = self.values.get(parameter)
            if earlier is not None:
                if len(earlier.norms) != len(gradients.norms):
                    raise MisconfigurationException(
                        f"The layer {self._names[layer]!r} is called with {len(earlier.norms)} and with "
                        f"{len(gradients.norms)} rows in one batch, so per-example gradients are unknown: call the "
                        "layer with one row per example."
                    )
                gradients = of_samples(cast(Tensor, earlier.samples) + cast(Tensor, gradients.samples))
            self.values[parameter] = gradients


def of_samples(samples: Tensor) -> Gradients:
    """Converts a tensor of per-example gradients, shape ``(examples, ...)``, to :class:`Gradients`."""

    def weigh(rows: _Rows, factors: Tensor) -> Tensor:
        return (factors @ samples[rows].flatten(1)).view(samples.shape[1:])

    return Gradients(samples.flatten(1).norm(dim=1), weigh, samples)


def _rule(layer: nn.Module, inputs: Tensor, signal: Tensor, is_only: bool) -> dict[nn.Parameter, Gradients] | None:
    kind, weight, bias = type(layer), cast(Any, getattr(layer, "weight", None)), getattr(layer, "bias", None)
    is_convolution = kind in _CONVOLUTIONS and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if not is_convolution and kind not in (nn.Embedding, nn.Linear):
        return None
    signal = signal.to(weight.dtype)
    if kind is nn.Embedding:
        return {weight: _embedding(layer, inputs, signal, is_only)}
    rule = _convolution if is_convolution else _linear
    signals = signal.flatten(2).mT if is_convolution else signal.reshape(len(signal), -1, signal.shape[-1])
    found = {} if bias is None else {bias: of_samples(signals.sum(1))}
    if weight.requires_grad:
        # The norm of a product takes one multiplication per pair of positions, the product one per entry.
        has_short_norm = is_only and signals.shape[1] * (weight[0].numel() + len(weight)) < weight.numel()
        found[weight] = rule(layer, inputs.to(weight.dtype), signal, signals, has_short_norm)
    return found


def _linear(layer: Any, inputs: Tensor, signal: Tensor, signals: Tensor, has_short_norm: bool) -> Gradients:
    values = inputs.reshape(len(inputs), -1, inputs.shape[-1])

    def weigh(rows: _Rows, factors: Tensor) -> Tensor:
        scaled = factors[:, None, None] * signals[rows]
        return scaled.flatten(0, 1).mT @ values[rows].flatten(0, 1)

    return Gradients(_product_norms(signals, values), weigh) if has_short_norm else of_samples(signals.mT @ values)


def _convolution(layer: Any, inputs: Tensor, signal: Tensor, signals: Tensor, has_short_norm: bool) -> Gradients:
    shape, count = layer.weight.shape, len(inputs)
    product = partial(_CONVOLUTIONS[type(layer)], stride=layer.stride, padding=layer.padding, dilation=layer.dilation)

    def weigh(rows: _Rows, factors: Tensor) -> Tensor:
        scaled = signal[rows] * factors.view(-1, *[1] * (signal.ndim - 1))
        return product(inputs[rows], shape, scaled, groups=layer.groups)  # type: ignore[no-any-return]

    is_linear = {*layer.kernel_size, *layer.stride} == {1} and not any(layer.padding)  # at each position
    if layer.groups == 1 and type(layer) is nn.Conv2d and (has_short_norm or is_linear):
        options = layer.kernel_size, layer.dilation, layer.padding, layer.stride
        patches = (inputs.flatten(2) if is_linear else F.unfold(inputs, *options)).mT  # type: ignore[arg-type]
        if has_short_norm:
            return Gradients(_product_norms(signals, patches), weigh)
        return of_samples((signals.mT @ patches).view(count, *shape))
    # one convolution with the examples as groups
    merged = (inputs.flatten(0, 1)[None], (count * shape[0], *shape[1:]), signal.flatten(0, 1)[None])
    return of_samples(product(*merged, groups=count * layer.groups).view(count, *shape))


def _product_norms(signals: Tensor, values: Tensor) -> Tensor:
    return ((signals @ signals.mT) * (values @ values.mT)).sum((1, 2)).clamp(min=0).sqrt()


def _embedding(layer: Any, inputs: Tensor, signal: Tensor, is_only: bool) -> Gradients:
    shape, ids = layer.weight.shape, inputs.reshape(len(inputs), -1)
    signals = signal.reshape(*ids.shape, -1)
    if layer.padding_idx is not None:
        signals = signals.masked_fill((ids == layer.padding_idx)[..., None], 0)
    starts = shape[0] * torch.arange(len(ids), device=ids.device)
    places = ids + starts[:, None]
    if not is_only:
        return of_samples(_add_rows(signals, places, len(ids) * shape[0]).view(len(ids), *shape))
    used, numbers = places.unique(return_inverse=True)
    squares = _add_rows(signals, numbers, len(used)).square().sum(1)
    norms = _add_rows(squares, used // shape[0], len(ids)).sqrt()
    return Gradients(
        norms, lambda rows, factors: _add_rows(factors[:, None, None] * signals[rows], ids[rows], shape[0])
    )


def _add_rows(values: Tensor, places: Tensor, count: int) -> Tensor:
    flat = values.flatten(0, places.ndim - 1)
    return flat.new_zeros(count, *flat.shape[1:]).index_add_(0, places.flatten(), flat)


def clipped_sum(
    gradients: Mapping[nn.Parameter, Gradients], num_examples: int, max_norm: float
) -> dict[nn.Parameter, Tensor]:
    r"""Sum of per-example gradients, each clipped over all parameters.

    .. math:: \sum_i g_i \min\left(1, \frac{C}{\lVert g_i \rVert}\right)

    Here :math:`g_i` is the gradient of example i, and :math:`C` is ``max_norm``; ``inf`` disables clipping. Gradients
    of the mean loss are first multiplied by ``num_examples``. Non-finite gradients are replaced by 0.
    """
    if not gradients:
        return {}
    norms = num_examples * torch.stack([part.norms for part in gradients.values()]).norm(dim=0)
    factors = num_examples * torch.where(norms > max_norm, max_norm / norms, torch.ones_like(norms))
    is_finite = norms.isfinite()
    rows = slice(None) if bool(is_finite.all()) else is_finite.nonzero()[:, 0]
    return {parameter: part.weigh(rows, factors[rows].to(parameter.dtype)) for parameter, part in gradients.items()}


def check_examples(trainer: L.Trainer, module: L.LightningModule, batch: Any, gradients: ExampleGradients) -> None:
    """Raises an error if an example has different gradients in a batch and alone.

    The gradients differ if the loss is not a mean over examples, or if a layer is used in an unsupported way. The first
    two examples are tested, without dropout. If the gradients depend on random numbers, no error is raised.
    """
    count = min(batch_length(batch), _TRIED)
    if count < 2:
        raise MisconfigurationException(
            "`DPSGD` needs batches with one row per example in the first tensor, but the first tensor has a single row "
            "for several examples, so the check for a mean loss over examples is impossible: put a tensor with one row "
            "per example first."
        )
    step: Any = module.training_step
    while isinstance(step, OverriddenMethod):
        step = step.original
    batch_index = [0] * (len(inspect.signature(step).parameters) > 1)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    norm = nn.utils.get_total_norm
    tolerance = 0.1 if "bf16" in trainer.precision else 0.02  # a different summation order flips some ReLUs

    def differentiate(rows: slice, seed: int) -> list[Tensor]:
        with seeded_generators(seed), trainer.precision_plugin.forward_context():
            output = step(_some_of(batch, rows), *batch_index)
        leaves = [*parameters, gradients.anchor]
        return list(torch.autograd.grad(loss_in(output), leaves, materialize_grads=True))[:-1]

    def has_dependence() -> bool:
        gradients.is_recording = True
        differentiate(slice(0, count), 0)
        recorded, gradients.is_recording = gradients.values, False
        gradients.clear()
        for rows in slice(0, 1), slice(1, 2):
            single = differentiate(rows, 0)
            parts = map(recorded.get, parameters)
            from_batch = [
                torch.zeros_like(value) if part is None else part.weigh(rows, torch.full_like(part.norms[rows], count))
                for value, part in zip(single, parts, strict=True)
            ]
            size = norm(single)
            if norm(map(torch.sub, from_batch, single)) <= tolerance * size + 1e-9:
                continue
            if not size.isfinite() and not norm(from_batch).isfinite():
                continue  # the example's gradient is not finite in both passes
            return not norm(map(torch.sub, differentiate(rows, 1), single)) > tolerance * size  # no random numbers
        return False

    def has_dependence_elsewhere(seed: int) -> bool:
        # rounding can turn ReLUs on or off (with DeepLabV3+ in 5 of 104 checks), so other weights are tried
        with torch.no_grad(), seeded_generators(seed):
            for parameter in parameters:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        return has_dependence()

    with isolated_pass(module, gradients=True, is_training=True):
        for layer in module.modules():
            layer.training &= not isinstance(layer, nn.modules.dropout._DropoutNd)  # noqa: SLF001
        if has_dependence() and all(map(has_dependence_elsewhere, range(4))):
            raise MisconfigurationException(
                "The gradient of an example depends on other examples in the batch, but `DPSGD` needs a mean "
                "over the losses of single examples, and layer inputs with one row per example. With ignored pixels "
                "or a region loss (Dice), average the losses of single images (`SegmentationTask(per_image=True)`)."
            )
    gradients.is_recording = True


def _some_of(batch: Any, rows: slice) -> Any:
    length = batch_length(batch)
    tensors = (value[rows] if value.ndim and len(value) == length else value for value in batch_tensors(batch))
    return rebuild_batch(batch, tensors)


def find_unsupported(module: nn.Module) -> list[str]:
    """Lists names and types of layers that mix examples or are not supported by Opacus."""
    validators = _opacus("opacus.validators").ModuleValidator.VALIDATORS
    return [
        f"{name!r} ({type(layer).__name__})"
        for name, layer in module.named_modules()
        if isinstance(layer, BatchNorm)
        or (
            any(parameter.requires_grad for parameter in layer.parameters())
            and type(layer) in validators
            and validators[type(layer)](layer)
        )
    ]


def _opacus(name: str) -> Any:
    try:
        with root_logger_as_it_was():
            return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "`DPSGD` needs the package `opacus`: pip install 'lightning-fed[privacy]'", name=error.name
        ) from error
