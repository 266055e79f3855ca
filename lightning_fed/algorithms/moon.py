"""MOON: pulls features towards features of the global model, and away from features of the client's last model.

Li, He & Song, "Model-Contrastive Federated Learning", CVPR 2021, equations 3 and 4. https://arxiv.org/abs/2103.16257
"""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from lightning_fed.algorithms.client_pass import refuse_rows
from lightning_fed.algorithms.fedfusion.extractors import find_extractor_in_fit, named_features
from lightning_fed.algorithms.fedfusion.frozen_extractor import FrozenExtractor, entries_of_network
from lightning_fed.argument_checks import check_nonnegative, check_positive
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.features.layers import FeatureLayer, has_channels_last
from lightning_fed.federated_callback import FederatedCallback, RevertingCallback
from lightning_fed.lightning.internals import is_compiled, loss_scale
from lightning_fed.messages import Broadcast, Client, ClientUpdate, with_prefix, without_prefix
from lightning_fed.method import Method, register
from lightning_fed.model.entries import copy_state
from lightning_fed.numerics.precision import at_least_float32
from lightning_fed.rule import Aggregator

_PREFIX = "previous:"


class ContrastiveTerm(RevertingCallback, FederatedCallback):
    r"""Adds the gradient of MOON's contrastive loss in local training.

    .. math:: \ell = - \mu \log \frac{e^{\cos(z, z_g) / \tau}}{e^{\cos(z, z_g) / \tau} + e^{\cos(z, z_p) / \tau}}

    Here :math:`z` are an example's features from the current model, :math:`z_g` from the received global model, and
    :math:`z_p` from the client's last model. A client's first round has no contrastive loss. Feature maps and tokens
    are averaged over positions. ``training_step`` and the logged loss do not change. Reference: Li et al., CVPR 2021,
    equations 3 and 4.

    Args:
        mu: Strength :math:`\mu`, at least 0; 0 disables the term.
        temperature: Temperature :math:`\tau`, positive.
        layer: Name of the layer with the features as output. By default, the features are the classifier's input.
        network: Name of the module called with the data, by default found automatically.

    Raises:
        MisconfigurationException: In ``fit``, if the network is compiled or does not run the layer, no classifier is
            found, or clients receive only parts of a parameter.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[ContrastiveTerm(mu=5.0)], logger=False)
    """

    def __init__(self, mu: float = 1.0, temperature: float = 0.5, layer: str = "auto", network: str = "auto") -> None:
        self.mu = check_nonnegative("mu", mu)
        self.temperature = check_positive("temperature", temperature)
        self.layer = layer
        self.network = network
        self._name = ""  # name of the network
        self._layer = FeatureLayer("")
        self._channels_last = False
        self._extractors: list[FrozenExtractor] = []  # extractors of the global model and of the client's last model
        self._handles: list[RemovableHandle] = []  # set during a visit with the term
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._has_run = False

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self.mu:
            return
        extractor = find_extractor_in_fit(trainer, pl_module, self.layer, self.network, "layer")
        self._name, self._layer = extractor.network, extractor.layer
        network = pl_module.get_submodule(self._name)
        if is_compiled(pl_module):
            raise MisconfigurationException(
                "MOON reads features with hooks, but compiled code calls no hooks: train without `torch.compile`."
            )
        self._extractors = [FrozenExtractor(network, self._layer) for _ in range(2)]
        self._channels_last = has_channels_last(network.get_submodule(self._layer.path))

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        if not self.mu:
            return
        refuse_rows(broadcast, "MOON")
        last = without_prefix(find_federation(trainer).client_memory, _PREFIX)
        if not last:
            return
        network = module.get_submodule(self._name)
        for extractor in self._extractors:
            extractor.refer(network)
        self._extractors[1].refer(last)  # the stored model has no personal entries
        self._has_run = False
        tapped = network.get_submodule(self._layer.path)
        self._handles = [
            network.register_forward_pre_hook(self._record_inputs, with_kwargs=True),
            tapped.register_forward_pre_hook(partial(self._add_to_input, trainer), with_kwargs=True)
            if self._layer.side == "input"
            else tapped.register_forward_hook(partial(self._add_to_output, trainer)),
        ]

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        if not self.mu:
            return
        if self._handles and not self._has_run:
            raise MisconfigurationException(
                f"Expected {type(module).__name__} to run its {self._name or 'forward'!r} up to {self._layer}, where "
                "MOON compares features, but this layer ran in no batch: name another layer in `layer`."
            )
        names = entries_of_network(module, module.get_submodule(self._name)).items()
        network_state = {path: update.state[name] for path, name in names if name in update.state}
        find_federation(trainer).client_memory.update(with_prefix(copy_state(network_state), _PREFIX))

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._inputs = [], None

    def revert(self) -> None:
        self._extractors = []

    def _record_inputs(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self._inputs = args, kwargs

    def _add_to_input(
        self, trainer: L.Trainer, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._add(trainer, [*args, *kwargs.values()])

    def _add_to_output(self, trainer: L.Trainer, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._add(trainer, output)

    def _add(self, trainer: L.Trainer, features: Any) -> None:
        maps = [value for _, value in named_features(features)]
        if self._inputs is None or not maps or not maps[-1].requires_grad:
            return
        args, kwargs = self._inputs
        self._inputs, self._has_run = None, True
        references = (named_features(extractor(*args, **kwargs)) for extractor in self._extractors)
        term = self._gradient(trainer, maps[-1], *([value for _, value in features][-1] for features in references))
        maps[-1].register_hook(lambda gradient: gradient + term.to(gradient.dtype))  # type: ignore[no-untyped-call]

    def _gradient(self, trainer: L.Trainer, features: Tensor, of_global: Tensor, of_last: Tensor) -> Tensor:
        scale = loss_scale(trainer)
        if trainer.lightning_module.automatic_optimization:
            scale /= trainer.accumulate_grad_batches
        with torch.enable_grad(), torch.autocast(features.device.type, enabled=False):
            leaf = at_least_float32(features.detach()).requires_grad_()
            now, sent, before = (_pooled(values, self._channels_last) for values in (leaf, of_global, of_last))
            loss = contrastive_loss(now, sent, before, self.temperature)
            (gradient,) = torch.autograd.grad(loss, leaf)
        return self.mu * scale * gradient


def contrastive_loss(features: Tensor, of_global: Tensor, of_last: Tensor, temperature: float = 0.5) -> Tensor:
    r"""MOON's contrastive loss, averaged over N examples.

    .. math:: -\frac{1}{N} \sum \log \frac{e^{\cos(z, z_g) / \tau}}{e^{\cos(z, z_g) / \tau} + e^{\cos(z, z_p) / \tau}}

    Features :math:`z` are from the current model, :math:`z_g` from the global model, and :math:`z_p` from the client's
    last model. :math:`\tau` is the temperature.
    """
    towards = F.cosine_similarity(features, of_global, dim=1)
    away = F.cosine_similarity(features, of_last, dim=1)
    return F.softplus((away - towards) / temperature).mean()


def _pooled(features: Tensor, channels_last: bool) -> Tensor:
    features = at_least_float32(features)
    if features.ndim == 2:
        return features
    return features.flatten(1, -2).mean(1) if channels_last else features.flatten(2).mean(2)


@register
class MOON(Method):
    r"""Adds a contrastive loss on features to local training (MOON, model-contrastive federated learning).

    :class:`~lightning_fed.callbacks.ContrastiveTerm` explains the loss. The authors compare the output of a projection
    head before the classifier. For this variant, add a projection head to the model and pass its name as ``layer``.
    With ``mu=0`` the method equals ``aggregator`` bit for bit. Reference: Li et al., CVPR 2021, Algorithm 1.

    - Sends: 1 model down, 1 up.
    - Keeps: 1 model per client.
    - Costs: per batch, two additional forward passes up to the features; two more models in memory.
    - For: image data, and clients with different label distributions that participate often.

    Args:
        mu: Strength of the loss. The authors try 0.1, 1, 5 and 10.
        temperature: Temperature in the loss.
        layer: Name of the layer with the features as output. By default, the features are the classifier's input.
        aggregator: The base method, by name or as an object.

    Raises:
        ValueError: If ``mu`` or ``temperature`` is invalid.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(MOON(mu=5.0)).method.callbacks[0].mu
        5.0
    """

    def __init__(
        self,
        mu: float = 1.0,
        temperature: float = 0.5,
        layer: str = "auto",
        aggregator: str | Method | Aggregator = "fedavg",
    ) -> None:
        super().__init__(aggregator, [ContrastiveTerm(mu, temperature, layer)])
