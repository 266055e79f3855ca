"""Federations of the literature that differ from federated averaging in what clients hold and send."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.algorithms.fedavgm import FedAvgM
from lightning_fed.algorithms.fedaws.callback import SpreadOut, Variant
from lightning_fed.algorithms.fedfusion.callback import FeatureFusion
from lightning_fed.algorithms.fedfusion.operators import ConvInit, OperatorName, Range
from lightning_fed.algorithms.fedrep import HeadThenBody
from lightning_fed.algorithms.fedss.callback import ClientClasses, SampledSoftmax
from lightning_fed.algorithms.fedss.losses import LogQ, Objective, QSupport
from lightning_fed.callbacks.federation import Federation
from lightning_fed.model.entries import Selector, live_entries
from lightning_fed.model.features import find_classifier
from lightning_fed.numerics.row_sums import RowWeighting


def FedPer(head: Selector | Sequence[Selector] = "auto", **options: Any) -> Federation:
    """Federated averaging of a base, with a personal head per client.

    All layers train together; only the base is sent and averaged, weighted by the clients' examples.

    Args:
        head: The personal entries: a name pattern (``"head.*"``), a module type, or several. ``"auto"`` is the layer
            that makes the logits (:func:`~lightning_fed.modules.find_classifier`), which is named in the log.
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`.

    Raises:
        ValueError: If ``personal`` is among the options; in ``fit``, if a selector matches nothing.

    Example:
        >>> FedPer("head.*", clients_per_round=10).personal
        ('head.*',)

    References:
        Arivazhagan et al., "Federated Learning with Personalization Layers", 2019. https://arxiv.org/abs/1912.00818

    """
    _check_free("FedPer", "personal", "which is its `head`", options)
    return Federation(personal=_selectors(head), **options)


def FedRep(
    head: Selector | Sequence[Selector] = "auto", head_epochs: int = 10, body_epochs: int = 1, **options: Any
) -> Federation:
    """A shared representation and a personal head per client, which train one after the other.

    A visit has ``head_epochs`` epochs in which the head trains and the body does not, then ``body_epochs`` the other
    way round (:class:`~lightning_fed.callbacks.HeadThenBody`). Only the body is sent and averaged, weighted by the
    clients' examples.

    After the last round the authors let every client train its head once more, on the final body. That is one more
    round, with all clients and ``body_epochs=0``, resumed from the last checkpoint.

    Args:
        head: The personal entries: a name pattern (``"head.*"``), a module type, or several. ``"auto"`` is the layer
            that makes the logits (:func:`~lightning_fed.modules.find_classifier`), which is named in the log.
        head_epochs: Epochs of a visit that train the head.
        body_epochs: Epochs of a visit that train the body; 0 leaves the body as it is.
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`.

    Raises:
        ValueError: If ``head_epochs`` is below 1 or ``body_epochs`` below 0, or ``personal``, ``local_epochs`` or
            ``local_steps`` is among the options; in ``fit``, if a selector matches nothing.

    Example:
        >>> FedRep("head.*", head_epochs=10, body_epochs=5).schedule.local_epochs
        15

    References:
        Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021.
        https://arxiv.org/abs/2102.07078

    """
    if body_epochs < 0:
        raise ValueError(f"Expected `body_epochs` to be at least 0, but got {body_epochs}.")
    _check_free("FedRep", "personal", "which is its `head`", options)
    for name in ("local_epochs", "local_steps"):
        if options.get(name) is not None:  # the command line passes what it was not given
            _check_free("FedRep", name, "which `head_epochs` and `body_epochs` give", options)
    phases = HeadThenBody(head_epochs)
    federation = Federation(personal=_selectors(head), local_epochs=head_epochs + body_epochs, **options)
    federation.client_callbacks.append(phases)
    return federation


def FedBN(**options: Any) -> Federation:
    """Federated averaging of everything but the BatchNorm layers, which stay with their clients.

    Layers are told by their type, so that normalisation layers of any name are found.

    Args:
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`.

    Raises:
        ValueError: If ``batch_norm`` is among the options; in ``fit``, if the model has no BatchNorm.

    Example:
        >>> FedBN().batch_norm
        'personal'

    References:
        Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
        https://arxiv.org/abs/2102.07623

    """
    _check_free("FedBN", "batch_norm", "which is 'personal' there", options)
    return Federation(batch_norm="personal", **options)


def FedFusion(
    operator: OperatorName = "conv",
    at: str = "auto",
    levels: Sequence[int | str] | Literal["all"] = "all",
    ema: float = 0.9,
    eval_reference: Literal["previous", "current"] = "previous",
    cache_global_features: bool = False,
    conv_init: ConvInit = "default",
    conv_bias: bool = True,
    clamp: Range | None = None,
    **options: Any,
) -> Federation:
    """Federated averaging of clients that fuse their features with those of the global model.

    With :class:`~lightning_fed.callbacks.FeatureFusion`, whose arguments these are; it has a few more.

    Args:
        operator: ``"conv"``, ``"multi"``, ``"single"``, or ``"none"``, which is federated averaging.
        at: Where the features are: name of a layer, or ``"auto"``.
        levels: Which of several features (an encoder's maps) are fused.
        ema: Share of the former weights in the new ones of "multi" and "single".
        eval_reference: Whether the global model is evaluated with the features of the one before it, or with its own.
        cache_global_features: Whether the global features of a client's examples are kept during its visit.
        conv_init: How "conv" starts.
        conv_bias: Whether "conv" has a bias.
        clamp: Range in which the weights of "multi" and "single" stay.
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`, ``aggregator`` among them.

    Raises:
        ValueError: If an option is unknown or out of its range.

    Example:
        >>> FedFusion("multi", clients_per_round=10).client_callbacks[0].operator
        'multi'

    References:
        Yao et al., "Towards Faster and Better Federated Learning: A Feature Fusion Approach", ICIP 2019.

    """
    federation = Federation(**options)
    federation.client_callbacks.append(
        FeatureFusion(
            at=at,
            operator=operator,
            levels=levels,
            ema=ema,
            eval_reference=eval_reference,
            cache_global_features=cache_global_features,
            conv_init=conv_init,
            conv_bias=conv_bias,
            clamp=clamp,
        )
    )
    return federation


def FedSS(
    num_negatives: int,
    objective: Objective = "fedss",
    resample: Literal["round", "batch"] = "round",
    server_momentum: float = 0.9,
    server_lr: float = 1.0,
    lazy_rows: bool = False,
    row_weighting: RowWeighting = "global",
    head: str = "auto",
    target: int | str | Callable[[Any], Tensor] | None = None,
    classes: ClientClasses | None = None,
    log_q: LogQ = "negatives",
    q_support: QSupport = "complement",
    **options: Any,
) -> Federation:
    """Sampled softmax: clients hold, train and send a few rows of a head with very many classes.

    :class:`~lightning_fed.callbacks.SampledSoftmax` for a model whose last layer is a
    :class:`~lightning_fed.modules.SampledSoftmaxHead`, and averaging with momentum on the server
    (:class:`~lightning_fed.algorithms.FedAvgM` of :class:`~lightning_fed.algorithms.FedAvg`).

    Args:
        num_negatives: Classes that a client draws beside its own.
        objective: The client's loss.
        resample: Whether they are drawn once for a round or for every batch of it.
        server_momentum: Momentum on the server.
        server_lr: Learning rate on the server.
        lazy_rows: Whether rows that nobody held in a round are left alone; otherwise momentum still moves them.
        row_weighting: Whose weights a row's changes are divided by: those of all clients of the round, or of the
            clients that hold the row (``"per_row"``).
        head: Name of the head; ``"auto"`` finds the only one.
        target: Where a batch has its labels, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        classes: The clients' own classes; ``None`` looks for them in the data.
        log_q: Which logits are corrected.
        q_support: What the drawn classes count as drawn from.
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`.

    Raises:
        ValueError: If an option is unknown or out of its range, or ``aggregator`` is among the options: use the
            callback with the aggregator instead.

    Example:
        >>> FedSS(num_negatives=40, clients_per_round=32).client_callbacks[0].num_negatives
        40

    References:
        "Efficient image representation learning with federated sampled softmax", submission to ICLR 2022.

    """
    _check_free("FedSS", "aggregator", "which averages with `server_momentum`", options)
    federation = Federation(_momentum(server_lr, server_momentum, lazy_rows, row_weighting), **options)
    federation.client_callbacks.append(
        SampledSoftmax(num_negatives, objective, resample, head, target, classes, log_q, q_support)
    )
    return federation


def FedAwS(
    strength: float = 10.0,
    variant: Variant = "top_k",
    k: int = 10,
    margin: float = 0.9,
    server_momentum: float = 0.0,
    server_lr: float = 1.0,
    lazy_rows: bool = False,
    row_weighting: RowWeighting = "global",
    lr: float | None = None,
    comparison: int | None = None,
    normalize: bool = True,
    head: str = "auto",
    target: int | str | Callable[[Any], Tensor] | None = None,
    classes: ClientClasses | None = None,
    **options: Any,
) -> Federation:
    """Clients that know their own classes only, and a server that keeps the class vectors apart.

    Clients train with the softmax among their own classes
    (:class:`~lightning_fed.callbacks.SampledSoftmax` with ``objective="posonly"``), and the server takes a step of
    :class:`~lightning_fed.callbacks.SpreadOut` after every round.

    Args:
        strength: Strength of the step.
        variant: Whether the nearest classes are pushed away, or all that are nearer than a margin.
        k: Number of nearest classes.
        margin: The margin.
        server_momentum: Momentum on the server, which the authors do not have; in the FedSS paper's comparison all
            methods have 0.9.
        server_lr: Learning rate on the server, of averaging.
        lazy_rows: Whether rows that nobody held in a round are left alone by averaging; otherwise momentum still moves
            them.
        row_weighting: Whose weights a row's changes are divided by: those of all clients of the round, or of the
            clients that hold the row (``"per_row"``).
        lr: Learning rate of the step; ``None`` for the head's in the clients' training.
        comparison: Number of classes, drawn in every round, among which the nearest are looked for; ``None`` for all.
        normalize: Whether class vectors keep their lengths in the step.
        head: Name of the head; ``"auto"`` finds the only one.
        target: Where a batch has its labels, see :class:`~lightning_fed.callbacks.SampledSoftmax`.
        classes: The clients' own classes; ``None`` looks for them in the data.
        options: Further arguments of :class:`~lightning_fed.callbacks.Federation`.

    Raises:
        ValueError: If an option is unknown or out of its range, or ``aggregator`` is among the options: use the
            callbacks with the aggregator instead.

    Example:
        >>> FedAwS(strength=1.0).client_callbacks[1].strength
        1.0

    References:
        Yu et al., "Federated Learning with Only Positive Labels", ICML 2020. Its clients have one class each and
        another loss for it; the softmax among their own is how the FedSS paper uses it.

    """
    _check_free("FedAwS", "aggregator", "which averages with `server_momentum`", options)
    federation = Federation(_momentum(server_lr, server_momentum, lazy_rows, row_weighting), **options)
    entry = "auto" if head == "auto" else f"{head}.weight"
    federation.client_callbacks += [
        SampledSoftmax(0, "posonly", head=head, target=target, classes=classes),
        SpreadOut(variant, k, strength, margin, lr, comparison, normalize, entry),
    ]
    return federation


def _momentum(lr: float, momentum: float, lazy_rows: bool, row_weighting: RowWeighting) -> FedAvgM:
    return FedAvgM(lr, momentum, aggregator=FedAvg(row_weighting), lazy_rows=lazy_rows)


def _selectors(head: Selector | Sequence[Selector]) -> Sequence[Selector]:
    if head == "auto":
        return [_classifier]
    return head if isinstance(head, Sequence) and not isinstance(head, str) else [head]


def _classifier(module: nn.Module) -> list[str]:
    """Entries of the layer that makes the logits."""
    name = find_classifier(module)
    if name is None:
        raise ValueError(
            f"Expected {type(module).__name__} to have a linear layer or a convolution that makes the logits: name the"
            " entries of the head."
        )
    rank_zero_info(f"The head that stays with every client is {name!r}.")
    return [entry for entry in live_entries(module) if entry.startswith(f"{name}.")]


def _check_free(preset: str, name: str, reason: str, options: Mapping[str, Any]) -> None:
    if name in options:
        raise ValueError(
            f"Expected `{preset}` without `{name}`, {reason}, but got {name}={options[name]!r}:"
            f" use `Federation({name}={options[name]!r})` instead of the preset."
        )
