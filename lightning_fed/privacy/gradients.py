"""Per-example gradients with Opacus' layer rules, their clipped sum, and a numerical check.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1. https://arxiv.org/abs/1607.00133
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.console import root_logger_as_it_was
from lightning_fed.data.interleave import batch_tensors, rebuild_batch
from lightning_fed.data.population import batch_length, seeded_generators
from lightning_fed.lightning.internals import OverriddenMethod
from lightning_fed.lightning.isolated_pass import isolated_pass, loss_in
from lightning_fed.model.entries import BatchNorm

_TRIED = 8  # examples per check: enough for losses that mix some examples, and cheap compared with a visit


class ExampleGradients:
    """Per-example gradients from one backward pass through the mean loss.

    Hooks record each layer's inputs and output gradients. Opacus' layer rules compute example gradients from both, with
    ``torch.func`` as fallback. Module and layers are not changed. In-place operations are allowed, unlike with Opacus'
    hooks. ``values`` are gradients divided by the number of examples, by parameter: shape ``(examples, ...)``.
    """

    def __init__(self, module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
        self._samplers = _opacus("opacus.grad_sample").GradSampleModule.GRAD_SAMPLERS
        self._sampler_of_others = _opacus("opacus.grad_sample.functorch").ft_compute_per_sample_gradient
        self.values: dict[nn.Parameter, Tensor] = {}
        self._names = {layer: name for name, layer in module.named_modules()}
        self._layers = list(self._find_layers(module, set(parameters)))
        self._handles = [layer.register_forward_hook(self._watch) for layer in self._layers]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        for layer in self._layers:
            vars(layer).pop("ft_compute_sample_grad", None)  # cached by Opacus on layers without a rule
        self.values = {}

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

    def _watch(self, layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not isinstance(output, Tensor) or not inputs or not all(isinstance(value, Tensor) for value in inputs):
            raise MisconfigurationException(
                f"The layer {self._names[layer]!r} ({type(layer).__name__}) is not called with positional tensors, or "
                "does not return a tensor, so per-example gradients are unknown."
            )
        if output.requires_grad:
            # Inputs are detached now, because later operations may overwrite the output.
            activations = [value.detach() for value in inputs]
            output.register_hook(partial(self._add, layer, activations))  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _add(self, layer: nn.Module, activations: list[Tensor], output_gradient: Tensor) -> None:
        sampler = self._samplers.get(type(layer), self._sampler_of_others)
        if type(layer) is nn.Conv2d and layer.groups > 1:
            sampler = _grouped_convolution
        for parameter, values in sampler(layer, activations, output_gradient.detach()).items():
            if not parameter.requires_grad:
                continue
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:  # Opacus ignores `padding_idx`
                values[:, layer.padding_idx] = 0
            earlier = self.values.get(parameter)
            if earlier is not None and len(earlier) != len(values):
                raise MisconfigurationException(
                    f"The layer {self._names[layer]!r} receives {len(earlier)} and {len(values)} rows for one batch, "
                    "so per-example gradients are unknown."
                )
            self.values[parameter] = values if earlier is None else earlier + values


def clipped_sum(
    gradients: Mapping[nn.Parameter, Tensor], num_examples: int, max_norm: float
) -> dict[nn.Parameter, Tensor]:
    r"""Sum of per-example gradients, each clipped over all parameters.

    .. math:: \sum_i g_i \min\left(1, \frac{C}{\lVert g_i \rVert}\right)

    Non-finite gradients become 0. Gradients are divided by the number of examples. ``max_norm=inf`` disables clipping.
    """
    if not gradients:
        return {}
    parts = [values.flatten(1).to(parameter.dtype) for parameter, values in gradients.items()]
    norms = num_examples * torch.stack([part.norm(dim=1) for part in parts]).norm(dim=0)
    is_finite = norms.isfinite()
    factors = num_examples * torch.where(norms > max_norm, max_norm / norms, torch.ones_like(norms))
    factors = torch.where(is_finite, factors, torch.zeros_like(factors))
    sums = {}
    for parameter, part in zip(gradients, parts, strict=True):
        counted = part if bool(is_finite.all()) else torch.where(is_finite[:, None], part, torch.zeros_like(part))
        sums[parameter] = (factors.to(part.dtype) @ counted).view_as(parameter)
    return sums


# Faster than Opacus' rule, which computes all pairs of channels.
def _grouped_convolution(
    layer: nn.Conv2d, activations: list[Tensor], output_gradient: Tensor
) -> dict[nn.Parameter, Tensor]:
    unfolded = _opacus("opacus.utils.tensor_utils").unfold2d(
        activations[0].to(output_gradient.dtype),
        kernel_size=layer.kernel_size,
        padding=layer.padding,
        stride=layer.stride,
        dilation=layer.dilation,
    )
    count, groups = len(unfolded), layer.groups
    patches = unfolded.view(count, groups, -1, unfolded.shape[-1])
    signal = output_gradient.reshape(count, groups, -1, unfolded.shape[-1])
    weights = torch.einsum("ngoq,ngpq->ngop", signal, patches).reshape(count, *layer.weight.shape)
    samples = {cast(nn.Parameter, layer.weight): weights}
    if isinstance(layer.bias, nn.Parameter):
        samples[layer.bias] = output_gradient.sum((2, 3))
    return samples


def check_examples(trainer: L.Trainer, module: L.LightningModule, batch: Any, gradients: ExampleGradients) -> None:
    """Compares the gradients of two examples in a batch with the gradients of each single example.

    Up to eight examples of the batch are used. Gradients differ if the loss is not a mean over examples (Dice over a
    batch, contrastive losses, ignored pixels), or if a layer is used in an unsupported way. Dropout is disabled. If the
    step draws random numbers other than dropout, no comparison is possible. The module is restored.
    """
    count = min(batch_length(batch), _TRIED)
    if count < 2:
        raise MisconfigurationException(
            "`DPSGD` needs batches with one row per example in the first tensor, but got a single row for several "
            "examples, so the loss cannot be checked."
        )
    step: Any = module.training_step
    while isinstance(step, OverriddenMethod):
        step = step.original
    batch_index = [0] * (len(inspect.signature(step).parameters) > 1)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    modes = [(layer, layer.training) for layer in module.modules()]

    def flat(rows: slice, seed: int) -> Tensor:
        gradients.values = {}
        with seeded_generators(seed), trainer.precision_plugin.forward_context():
            output = step(_some_of(batch, rows), *batch_index)
        loss = loss_in(output)
        loss_gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(parameters, loss_gradients, strict=True)
        return _flat([torch.zeros_like(value) if gradient is None else gradient for value, gradient in pairs])

    with isolated_pass(module, gradients=True):
        for layer, mode in modes:
            layer.training = mode and not isinstance(layer, nn.modules.dropout._DropoutNd)  # noqa: SLF001
        flat(slice(0, count), 0)
        batch_gradients = gradients.values
        tolerance = 0.1 if "bf16" in trainer.precision else 0.02  # a different summation order flips some ReLUs
        for row in range(2):
            single = flat(slice(row, row + 1), 0)
            parts = ((value, batch_gradients.get(value)) for value in parameters)
            from_batch = count * _flat(
                [torch.zeros_like(value) if part is None else part[row] for value, part in parts]
            )
            if (from_batch - single).norm() <= tolerance * single.norm() + 1e-9:
                continue
            if not single.isfinite().all() and not from_batch.isfinite().all():
                continue  # the example's gradient is not finite in both passes
            if (flat(slice(row, row + 1), 1) - single).norm() > tolerance * single.norm():
                break  # the step draws random numbers
            raise MisconfigurationException(
                "The gradient of an example depends on other examples in the batch, but `DPSGD` needs a mean loss "
                "over independent examples, and layers with one row per example. For ignored pixels and region "
                "losses, average the losses of single images (`SegmentationTask(per_image=True)`)."
            )
    gradients.values = {}


def _some_of(batch: Any, rows: slice) -> Any:
    length = batch_length(batch)
    tensors = (value[rows] if value.ndim and len(value) == length else value for value in batch_tensors(batch))
    return rebuild_batch(batch, tensors)


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in tensors])


def find_unsupported(module: nn.Module) -> list[str]:
    """Names and types of layers refused by Opacus: layers that mix examples, or without example gradients."""
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
