"""FedFusion on the clients (Algorithm 1): fuses the features of client model and global model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_fed.algorithms.fedfusion.equations import smooth_weight
from lightning_fed.algorithms.fedfusion.extractors import Extractor, find_extractor, find_extractor_in_fit
from lightning_fed.algorithms.fedfusion.feature_cache import FeatureCache
from lightning_fed.algorithms.fedfusion.frozen_extractor import entries_of_network
from lightning_fed.algorithms.fedfusion.layers import FusionLayer
from lightning_fed.algorithms.fedfusion.model_surgery import find_fusion, fuse
from lightning_fed.algorithms.fedfusion.operators import ConvInit, OperatorName, build_operator
from lightning_fed.algorithms.fedma.aggregator import FedMA
from lightning_fed.argument_checks import check_option, check_share
from lightning_fed.callbacks.example_input import forward_inputs, training_batch
from lightning_fed.callbacks.federation import federation_of, find_federation, move_behind_federation
from lightning_fed.callbacks.training_trace import (
    TrainingTrace,
    has_forward,
    optimized_parameters,
    trace_training,
)
from lightning_fed.data.population import seeded_generators
from lightning_fed.errors import OptionError
from lightning_fed.features.layers import FeatureLayer
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import callbacks_of, is_fitting
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.model.entries import tensors_by_path
from lightning_fed.numerics.seeds import derive_seed
from lightning_fed.server.schedule import default_seed

_OPERATOR_STREAM = 1001  # random stream separate from the schedule's streams


class FeatureFusion(FederatedCallback):
    r"""Fuses the features of client model and global model before the classifier.

    The model becomes :math:`C(F(E_l(x), E_g(x)))` for data :math:`x`, with the classifier :math:`C` and the fusion
    operator :math:`F`. The feature extractor :math:`E_l` is trained. :math:`E_g` is a frozen copy of the received
    global model's extractor. Clients send :math:`E_l`, :math:`F` and :math:`C`.

    ``setup`` adds :math:`F` to the module as the submodule ``feature_fusion``, see :func:`~lightning_fed.modules.fuse`.
    After the fit :func:`~lightning_fed.modules.unwrap` removes the fusion. To keep :math:`F` on the clients, set the
    federation's ``personal=["feature_fusion.*"]``. Reference: Yao et al., ICIP 2019, Algorithm 1.

    Args:
        at: Name of the layer with the features as output, or ``"auto"``, see
            :func:`~lightning_fed.modules.find_extractor`.
        operator: ``"conv"`` (about 2 n^2 parameters for n channels), ``"multi"`` (n parameters), ``"single"`` (1
            parameter), or ``"none"`` for federated averaging.
        levels: Positions or keys of the tensors to fuse, if the layer returns several tensors. Each tensor has a
            separate operator. ``"all"`` fuses all tensors except the input data.
        channels: Number of channels, or a list for several tensors; ``"infer"`` runs the network to find the number.
        network: Name of the module called with the data; ``"auto"`` searches for the module.
        ema: Share :math:`\mu` of the previous weights in the moving average for "multi" and "single", see
            :func:`~lightning_fed.algorithms.fedfusion.smooth_weight`.
        eval_reference: Model for :math:`E_g` in evaluation. ``"previous"`` is the previous global model, as in the
            authors' program. ``"current"`` is the evaluated model, as in deployment. Both extractors then return equal
            features, so "multi" and "single" have no effect.
        cache_global_features: Whether to cache the features :math:`E_g(x)` of a client's examples in local training
            with several epochs. The cache needs memory, and does not help if examples are augmented.
        conv_init: Initialisation for "conv", see :class:`~lightning_fed.modules.ConvFusion`.
        conv_bias: Whether to add a bias to "conv".
        channel_axis: Position of the channel axis; by default inferred from the model.

    Raises:
        ValueError: If an option is invalid; in ``setup``, if the features or the channels cannot be found.
        MisconfigurationException: In ``setup``, if the module already has a different fusion, or the rule is FedMA. In
            ``fit``, if the optimizers cannot train the operator, no batch reaches the layer, or the checkpoint has no
            fusion.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[FeatureFusion(operator="conv")], logger=False)

    Note:
        Values are logged for each fused tensor, ``<level>``. With "multi" and "single": ``fedfusion/<level>/lambda``
        (mean weight) and ``fedfusion/<level>/largest_lambda`` (largest absolute weight). With "conv":
        ``fedfusion/<level>/global_share`` (sum of squared weights for global features, divided by the sum for all).
    """

    can_recalibrate_remotely = False

    def __init__(
        self,
        at: str = "auto",
        operator: OperatorName = "conv",
        levels: Sequence[int | str] | Literal["all"] = "all",
        channels: int | Sequence[int] | Literal["infer"] = "infer",
        network: str = "auto",
        ema: float = 0.9,
        eval_reference: Literal["previous", "current"] = "previous",
        cache_global_features: bool = False,
        conv_init: ConvInit = "default",
        conv_bias: bool = True,
        channel_axis: int | None = None,
    ) -> None:
        with torch.device("meta"):  # draws nothing
            build_operator(operator, 1, conv_init=conv_init)  # raises an error for invalid options
        check_option("eval_reference", eval_reference, ("previous", "current"))
        check_share("ema", ema)
        self.at = at
        self.operator = operator
        self.levels = levels
        self.channels = channels
        self.network = network
        self.ema = ema
        self.eval_reference = eval_reference
        self.cache_global_features = cache_global_features
        self.conv_init = conv_init
        self.conv_bias = conv_bias
        self.channel_axis = channel_axis
        self._fusion: FusionLayer | None = None
        self._reference: State = {}  # extractor of the previous global model
        self._round_reference: State = {}  # extractor of the round's initial global model
        self._stage: Literal["rest", "training", "aggregated"] = "rest"
        self._is_untrained = False
        self._weights: State = {}  # weights for "multi" and "single" at the start of the round
        self._reset_cache()

    @property
    def fusion(self) -> FusionLayer:
        """The fusion layer, which ``setup`` adds to the module as submodule ``feature_fusion``."""
        if self._fusion is None:
            raise RuntimeError(
                "Expected `setup` to add the fusion layer first, but `setup` has not run yet: start a fit."
            )
        return self._fusion

    # Lightning's hooks

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            if isinstance(find_federation(trainer).server.rule, FedMA):
                raise MisconfigurationException(
                    "Expected an aggregator without neuron matching, but got FedMA: fused channels cannot be matched."
                    " Use 'fedavg', for instance."
                )
            callbacks = callbacks_of(trainer)
            if callbacks.index(self) > callbacks.index(find_federation(trainer)):
                # Afterwards, other callbacks see a visit with its extractor. Lightning iterates over the callbacks, so
                # moving this callback towards the front skips no callback.
                move_behind_federation(self, trainer)
        is_fused = find_fusion(pl_module) is not None
        with seeded_generators(derive_seed(_federation_seed(trainer), _OPERATOR_STREAM)):
            try:
                self._fusion = self._fuse(trainer, pl_module)
            except OptionError:
                if stage != "fit" or self.channels != "infer" or pl_module.example_input_array is not None:
                    raise
                self._fusion = self._fuse_by_batch(trainer, pl_module)
        self._is_untrained = stage != "fit" and not is_fused and (self.operator, self.conv_init) == ("conv", "default")
        has_lasting_state = stage != "fit" or trainer.current_epoch > 0
        self._reference = self._fusion.frozen.state() if has_lasting_state and self._fusion.is_referring else {}
        self._stage, self._round_reference, self._weights = "rest", {}, {}
        self._fusion.has_run = False
        self._reset_cache()
        self._use_global_reference()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        optimized = optimized_parameters(trainer)
        entries = self.fusion.frozen.entries
        extractor_parameters = {
            id(p) for path, p in tensors_by_path(self.fusion.network).items() if path in entries and p.requires_grad
        }
        if self.operator != "none" and extractor_parameters and optimized.isdisjoint(extractor_parameters):
            raise MisconfigurationException(
                "Expected an optimizer to train the feature extractor, the layers up to "
                f"{Extractor(_name_of(self.fusion.network, pl_module), self.fusion.layer)}, but no optimizer has a "
                "parameter of these layers: set `at` to a layer in a trained network."
            )
        _add_parameters(list(self.fusion.parameters()), trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._is_untrained:
            rank_zero_warn(
                "The module had no fusion, so its new convolution has random weights and the results are meaningless."
                " Evaluate the module without `FeatureFusion`, or load a checkpoint from a fit with `FeatureFusion`."
            )

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.fusion.cache is not None and self._batch > self._per_epoch:
            self._late_hits += self.fusion.cache.hits - self._hits

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._fusion is not None:
            self._use_global_reference()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        names = [f"{_name_of(self.fusion, pl_module)}.{name}" for name in self.fusion.state_dict()]
        has_fusion = any(name in checkpoint["state_dict"] for name in names)
        self._is_untrained = self._is_untrained and not has_fusion
        if is_fitting(trainer) and names and not has_fusion:
            raise MisconfigurationException(
                "Expected a checkpoint of a fit with fusion, but got one without fusion, so its optimizer state lacks "
                "the fusion operator's parameters: begin a new fit with the checkpoint's weights, "
                "module.load_state_dict(torch.load(path)['state_dict'])."
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.checkpoint_callbacks:
            rank_zero_info(f"Load a checkpoint into a new module: {self._loading_code(pl_module)}")

    def _loading_code(self, module: L.LightningModule) -> str:
        fusion = self.fusion
        end, path = fusion.layer.side, Extractor(_name_of(fusion.network, module), fusion.layer).path
        at = repr(path) if end == "output" else f"lightning_fed.modules.FeatureLayer({path!r}, {end!r})"
        options = {name: value for name, value in fusion.arguments.items() if value != _default_of(name)}
        if fusion.channels and "levels" not in options:
            options["channels"] = fusion.channels if len(fusion.channels) > 1 else fusion.channels[0]
        keywords = "".join(f", {name}={value!r}" for name, value in options.items())
        network = _name_of(fusion.network, module)
        return (
            f"lightning_fed.modules.fuse(module, {fusion.operator!r}, at={at}, network={network!r}{keywords});"
            ' module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])'
        )

    def state_dict(self) -> dict[str, Any]:
        return {"reference": dict(self._reference)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._reference = dict(state_dict["reference"]) if self.eval_reference == "previous" else {}
        if self._fusion is not None:
            self._use_global_reference()

    # A round

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._stage = "training"
        self._round_reference = self.fusion.frozen.state(self.fusion.network) if self._uses_previous(trainer) else {}
        prefix = f"{_name_of(self.fusion, module)}.operators"
        self._weights = {
            f"{prefix}.{name}.weight": operator.weight.detach().clone()
            for name, operator in self.fusion.mixing_operators().items()
        }

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self.fusion.refer()
        self._batch = self._late_hits = 0
        federation = find_federation(trainer)
        num_batches = federation.visit.num_batches
        self._per_epoch = federation.population.batches_per_epoch(client) or num_batches
        is_repeated = num_batches > self._per_epoch
        self.fusion.cache = FeatureCache() if self._caches and is_repeated else None

    def on_client_batch(self, trainer: L.Trainer, module: L.LightningModule, client: Client, batch: Any) -> Any:
        self._batch += 1
        cache = self.fusion.cache
        if cache is not None:
            cache.is_filling, self._hits = self._batch <= self._per_epoch, cache.hits
        return batch

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        if self.operator != "none" and not self.fusion.has_run:
            raise MisconfigurationException(
                f"Expected {type(module).__name__} to run the network {type(self.fusion.network).__name__} up to "
                f"{self.fusion.layer}, where `FeatureFusion` fuses features, but no batch reached this layer: name "
                "another layer in `at`."
            )
        cache = self.fusion.cache
        if cache is not None and self._batch >= 2 * self._per_epoch and not self._late_hits:
            self._caches = False
            network = type(self.fusion.network).__name__
            rank_zero_warn(
                "`cache_global_features` is disabled: in a second pass over the data, no input equals an input from the"
                " first pass, probably because of augmentation."
                if cache.misses
                else f"`cache_global_features` has no effect: the inputs of {network} are not a single tensor."
            )

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        self.fusion.cache = None
        self._use_global_reference()

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        for name, weight in self._weights.items():
            if name in state:
                state[name] = smooth_weight(state[name], weight, self.ema)
        self._stage = "aggregated"
        self._use_global_reference()

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        if is_new:
            self._reference = self._round_reference
        self._stage, self._round_reference = "rest", {}
        self._use_global_reference()
        summaries = self.fusion.summaries().items()
        values = {f"fedfusion/{name}/{key}": value for name, summary in summaries for key, value in summary.items()}
        if values:
            find_federation(trainer).round_log.put(trainer, trainer.current_epoch, values)

    def on_model_loaded(self, trainer: L.Trainer, module: L.LightningModule, client: Client | None) -> None:
        if client is not None and self._stage == "training":
            self.fusion.refer()
            return
        self._use_global_reference()
        if client is not None and self.fusion.is_referring:
            policies, entries = find_federation(trainer).policies, self.fusion.frozen.state(self.fusion.network)
            names = entries_of_network(module, self.fusion.network)
            personal = {
                path: value for path, value in entries.items() if policies.get(names.get(path, "")) == "personal"
            }
            self.fusion.refer(personal)

    def _fuse(self, trainer: L.Trainer, module: L.LightningModule, trace: TrainingTrace | None = None) -> FusionLayer:
        fusion = find_fusion(module)
        if fusion is not None:
            extractor = Extractor(_name_of(fusion.network, module), fusion.layer)
            if fusion.operator != self.operator or self.at not in ("auto", extractor.path):
                raise MisconfigurationException(
                    f"Expected a module without fusion, or with {self.operator!r} at {self.at!r}, but the module has "
                    f"{fusion.operator!r} at {extractor}: remove the fusion with `lightning_fed.modules.unwrap`."
                )
            for name, value in fusion.arguments.items():
                expected = getattr(self, name)
                if expected not in (_default_of(name), value):
                    raise MisconfigurationException(
                        f"Expected a module without fusion, or with {name}={expected!r}, but the fusion has"
                        f" {name}={value!r}: remove the fusion with `lightning_fed.modules.unwrap`."
                    )
            return fusion
        try:
            if is_fitting(trainer):
                extractor = find_extractor_in_fit(trainer, module, self.at, self.network, "at")
            else:
                extractor = find_extractor(module, self.at, self.network)
            fusion = fuse(
                module,
                self.operator,
                FeatureLayer(extractor.path, extractor.layer.side),
                self.channels,
                self.levels,
                extractor.network,
                example=None if trace is None else trace.calls.get(extractor.network),
                conv_init=self.conv_init,
                conv_bias=self.conv_bias,
                channel_axis=self.channel_axis,
            )
        except (ValueError, MisconfigurationException) as error:
            has_layers = any(True for _ in module.parameters())
            if has_layers and isinstance(error, MisconfigurationException):
                raise
            raise OptionError(
                f"`FeatureFusion` failed: {error}{'' if has_layers else ' Create layers in `__init__`, not `setup`.'}"
            ) from error
        count = sum(parameter.numel() for parameter in fusion.parameters())
        rank_zero_info(f"FeatureFusion: {self.operator!r} with {count} parameters fuses {extractor}.")
        return fusion

    def _fuse_by_batch(self, trainer: L.Trainer, module: L.LightningModule) -> FusionLayer:
        trace = trace_training(trainer, module)
        if trace is not None or not has_forward(module):
            return self._fuse(trainer, module, trace)
        try:
            example = forward_inputs(module, training_batch(find_federation(trainer)))
        except (ValueError, MisconfigurationException):
            return self._fuse(trainer, module)  # raises an error with a remedy
        module.example_input_array = example
        try:
            return self._fuse(trainer, module)
        finally:
            module.example_input_array = None

    def _use_global_reference(self) -> None:
        reference = self._round_reference if self._stage == "aggregated" else self._reference
        if reference:
            self.fusion.refer(reference)
        else:
            self.fusion.release()

    def _uses_previous(self, trainer: L.Trainer) -> bool:
        return self.eval_reference == "previous" and not find_federation(trainer).server.rule.has_clusters

    def _reset_cache(self) -> None:
        self._caches = self.cache_global_features and self.operator != "none"
        self._batch = self._per_epoch = 0  # batches so far in the visit, and batches per epoch
        self._hits = self._late_hits = 0  # cached samples before the batch, and after the first epoch


def _default_of(name: str) -> Any:
    return inspect.signature(FeatureFusion).parameters[name].default


def _federation_seed(trainer: L.Trainer) -> int:
    federation = federation_of(trainer)
    return default_seed() if federation is None else federation.seed


def _name_of(layer: nn.Module, module: nn.Module) -> str:
    names: list[str] = [name for name, submodule in module.named_modules() if submodule is layer]
    return names[0]


def _add_parameters(parameters: list[nn.Parameter], trainer: L.Trainer) -> None:
    trained = optimized_parameters(trainer)
    missing = [parameter for parameter in parameters if parameter.requires_grad and id(parameter) not in trained]
    if not missing:
        return
    if not trainer.optimizers or trainer.optimizers[0].state:
        raise MisconfigurationException(
            "Expected `configure_optimizers` to train the parameters of `feature_fusion`: pass self.parameters() to "
            "the optimizer."
        )
    trainer.optimizers[0].param_groups[0]["params"] += missing
    rank_zero_info("FeatureFusion: added the operator's parameters to the first optimizer.")
