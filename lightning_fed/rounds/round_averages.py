"""Applies Lightning's weight averaging to global models: once per round instead of once per step."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch.callbacks as lightning_callbacks
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import OverriddenMethod, callbacks_of

_log = logging.getLogger(__name__)

WEIGHT_AVERAGING: Any = getattr(lightning_callbacks, "WeightAveraging", ())
"""Class of the callbacks; an empty tuple before Lightning 2.6."""


class RoundAverages:
    """Limits ``WeightAveraging`` callbacks to one update per round until :meth:`restore`, except in a plain fit.

    In round r, ``should_update(step_idx=r)`` is called once with the new global model, before validation, and
    ``should_update(epoch_idx=r)`` after validation, unless the average already includes the round.

    Raises:
        MisconfigurationException: If the models of this fit cannot be averaged.
    """

    def __init__(self, fit: FederatedFit) -> None:
        self._fit = fit
        self._is_round_over = False
        self._callbacks = [callback for callback in callbacks_of(fit.trainer) if isinstance(callback, WEIGHT_AVERAGING)]
        for callback in self._callbacks:
            name = f"`{type(callback).__name__}`"
            if fit.server.rule.resizes:
                raise MisconfigurationException(
                    f"{name} does not work with {type(fit.server.rule).__name__}, which changes the shapes of entries "
                    "between rounds: remove the callback."
                )
            if not fit.has_server:
                raise MisconfigurationException(
                    f"{name} averages global models, which only the server has: pass the callback to the server's "
                    "Trainer."
                )
        self._overridden = [self._override(callback) for callback in self._callbacks]

    def _override(self, callback: Any) -> OverriddenMethod:
        def should_update(step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
            if self._fit.is_plain:
                return bool(method.original(step_idx=step_idx, epoch_idx=epoch_idx))
            if epoch_idx is None:  # a step of a client
                return False
            is_due = bool(method.original(step_idx=epoch_idx))
            return is_due if self._is_round_over else not is_due and bool(method.original(epoch_idx=epoch_idx))

        method = OverriddenMethod(callback, "should_update", should_update)
        return method

    def check_entries(self) -> None:
        """Refuses a module with entries or shapes that differ from the copy in a ``WeightAveraging`` callback."""
        for callback in self._callbacks:
            checkpoint = {"state_dict": self._fit.module.state_dict()}
            callback.on_save_checkpoint(self._fit.trainer, self._fit.module, checkpoint)
            average, current = (
                {name: value.shape for name, value in checkpoint[key].items() if hasattr(value, "shape")}
                for key in ("state_dict", "current_model_state")
            )
            if average != current:
                raise MisconfigurationException(
                    f"Expected `{type(callback).__name__}` after `Federation` in the Trainer's `callbacks`, because "
                    "the method changes the module, but it comes before `Federation`."
                )

    def end_round(self) -> None:
        """Updates the averages with the new global model in the module, after a round."""
        if self._fit.is_plain:
            return
        self._is_round_over = True
        for callback in self._callbacks:
            if self._fit.trainer.is_global_zero and self._fit.record_warning(type(callback).__name__):
                _log.info(
                    "`%s` averages global models instead of client models: the average has one step per round, and"
                    " the decay applies per round.",
                    type(callback).__name__,
                )
            callback.on_train_epoch_end(self._fit.trainer, self._fit.module)
        self._is_round_over = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the module contains the average over rounds, as in validation."""
        for callback in self._callbacks:
            callback.on_validation_epoch_start(self._fit.trainer, self._fit.module)
        try:
            yield
        finally:
            for callback in self._callbacks:
                callback.on_validation_epoch_end(self._fit.trainer, self._fit.module)

    def restore(self) -> None:
        for method in self._overridden:
            method.restore()
