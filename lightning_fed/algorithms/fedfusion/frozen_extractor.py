"""FedFusion's global extractor, a frozen copy of a network's feature extractor."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from lightning_fed.features.layers import FeatureLayer
from lightning_fed.messages import State
from lightning_fed.model.entries import entry_names, tensors_by_path
from lightning_fed.numerics.precision import as_real

_INTERNAL = frozenset(vars(nn.Module()))


class FrozenExtractor:
    """A copy of a network up to one layer, in evaluation mode and without gradients.

    The copy is not a submodule, so ``parameters()`` and ``state_dict()`` exclude the copy.

    Args:
        network: The network to copy.
        layer: Location of the features: the input or the output of a layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> extractor = FrozenExtractor(net, FeatureLayer("1"))
        >>> extractor(torch.zeros(4, 2)).shape
        torch.Size([4, 3])
    """

    def __init__(self, network: nn.Module, layer: FeatureLayer) -> None:
        self.network = _copy_network(network).eval().requires_grad_(False)
        self.layer = layer
        self.entries = set(tensors_by_path(self.network))
        self.is_plain: bool | None = None
        tapped = self.network.get_submodule(layer.path)
        if layer.side == "input":
            tapped.register_forward_pre_hook(self._stop, with_kwargs=True)
        elif layer.path:
            tapped.register_forward_hook(self._stop, with_kwargs=True)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            features = self.network(*args, **kwargs)
        except _FeaturesReached as error:
            return error.features
        if self.layer != FeatureLayer(""):
            raise RuntimeError(
                f"Expected {type(self.network).__name__} to run {self.layer}, but this layer did not run: name another."
            )
        self.is_plain = is_plain(args, kwargs, features)
        return features

    def refer(self, source: nn.Module | Mapping[str, Tensor]) -> None:
        """Copies parameters and buffers from ``source`` into the frozen extractor."""
        if isinstance(source, nn.Module):
            self.follow(source)
        values = tensors_by_path(source) if isinstance(source, nn.Module) else source
        with torch.no_grad():
            for name, entry in tensors_by_path(self.network).items():
                if name not in self.entries or name not in values:
                    continue
                target, value = as_real(entry), as_real(values[name])
                if value.shape != target.shape:
                    raise ValueError(
                        f"Expected {name!r} of the extractor to have shape {tuple(target.shape)}, but got"
                        f" {tuple(value.shape)}."
                    )
                target.copy_(value)

    def state(self, source: nn.Module | None = None) -> State:
        """Returns copies of the extractor's tensors, by name. With ``source``, the values are from this network."""
        entries = tensors_by_path(self.network if source is None else source)
        return {name: value.detach().clone() for name, value in entries.items() if name in self.entries}

    def follow(self, network: nn.Module) -> None:
        source, copied = (next(module.parameters(), None) for module in (network, self.network))
        if source is None or copied is None or (source.device, source.dtype) == (copied.device, copied.dtype):
            return
        originals = tensors_by_path(network)
        with torch.inference_mode(False):  # inference tensors would be read-only
            self.network.to(source.device)
            for name, entry in tensors_by_path(self.network).items():
                entry.data = entry.data.to(originals[name].dtype)

    def prune(self, *args: Any, **kwargs: Any) -> tuple[Any, nn.Module | None]:
        """Frees the memory of layers that are not needed for the features.

        Runs the network with ``args`` and ``kwargs`` to find these layers. Returns the features, and the last executed
        layer with parameters.
        """
        started, finished = set[nn.Module](), dict[nn.Module, None]()

        def record_finished(module: nn.Module, args: Any, output: Any) -> None:
            finished[module] = None

        handles = [
            handle
            for module in self.network.modules()
            for handle in (
                module.register_forward_pre_hook(lambda module, args: started.add(module)),
                module.register_forward_hook(record_finished, prepend=True),
            )
        ]
        try:
            features = self(*args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()
        needed = set(_used_entries(self.network, started, set(finished)))
        unneeded = {name: entry for name, entry in tensors_by_path(self.network).items() if name not in needed}
        values = {name: entry.data for name, entry in unneeded.items()}
        for entry in unneeded.values():
            entry.data = entry.data.new_empty(0)
        try:
            self(*args, **kwargs)
            self.entries &= needed
        except Exception:  # a layer whose weights are used without calling the layer
            for name, entry in unneeded.items():
                entry.data = values[name]
        trained = (module for module in reversed(finished) if any(True for _ in module.parameters(recurse=False)))
        return features, next(trained, None)

    def _stop(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any = None) -> None:
        features = args[0] if self.layer.side == "input" else output
        self.is_plain = is_plain(args, kwargs, features)
        raise _FeaturesReached(features)


def is_plain(args: tuple[Any, ...], kwargs: Mapping[str, Any], features: Any) -> bool:
    """True if a layer was called with one argument and returned a single tensor."""
    return len(args) == 1 and not kwargs and isinstance(features, Tensor)


class _FeaturesReached(BaseException):
    """Stops a forward pass at the features. A network's ``except Exception`` does not catch a BaseException."""

    def __init__(self, features: Any) -> None:
        super().__init__()
        self.features = features


def _copy_network(network: nn.Module) -> nn.Module:
    shared = {}
    if isinstance(network, L.LightningModule):
        # Every object that is not a layer, such as the Trainer.
        shared = {id(value): value for name, value in vars(network).items() if name not in _INTERNAL}
    with torch.inference_mode(False):  # inference tensors do not support gradients
        return copy.deepcopy(network, shared)


def entries_of_network(module: nn.Module, network: nn.Module) -> dict[str, str]:
    """Maps tensor names in the submodule ``network`` to state dict names in ``module``."""
    names = entry_names(module)
    return {path: names[tensor] for path, tensor in tensors_by_path(network).items() if tensor in names}


def _used_entries(
    module: nn.Module, started: set[nn.Module], finished: set[nn.Module], prefix: str = ""
) -> Iterator[str]:
    if module in finished:
        yield from (f"{prefix}{name}" for name in tensors_by_path(module))
    # Some modules are never called: containers of layers, modules with methods other than forward, and modules whose
    # layers are called separately (activation checkpointing). Such a module is treated as started if a layer inside
    # started.
    elif module in started or any(layer in started for layer in module.modules()) or not _is_callable(module):
        direct = (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        yield from (f"{prefix}{name}" for pairs in direct for name, _ in pairs)
        for name, child in module.named_children():
            yield from _used_entries(child, started, finished, f"{prefix}{name}.")


def _is_callable(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward
