"""Overrides for the module's batch hooks: Lightning's loop, or the fused loop, drives the visits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L

from lightning_fed.console import round_number
from lightning_fed.data.population import PlannedVisit
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.fit.synchronisation import process_group_of
from lightning_fed.lightning.internals import OverriddenMethod, ends_after_batch, exchange_last_batch, is_overridden
from lightning_fed.rounds.batch_loop import BatchLoop
from lightning_fed.rounds.round import Round

_log = logging.getLogger(__name__)


class BatchHooks:
    """Overrides for the module's batch hooks. ``close_round`` closes a round; returns whether there is a new model.

    Attributes:
        round: The last round; ``None`` before the first one.
        batch_loop: Trains fused visits; ``None`` in Lightning's loop.
        has_batch_start: Whether the module implements ``on_train_batch_start``.
    """

    def __init__(self, fit: FederatedFit, close_round: Callable[[Round], bool]) -> None:
        self.round: Round | None = None
        self.batch_loop: BatchLoop | None = None
        self.has_batch_start = self._has_batch_end = False
        self._fit, self._close_round = fit, close_round
        self._is_skipped = False  # after the module has ended the visit
        self._waiting: list[Callable[[], object]] = []  # delayed callbacks

    def attach(self, module: L.LightningModule) -> list[OverriddenMethod]:
        self.has_batch_start = _is_implemented(module, "on_train_batch_start")
        self._has_batch_end = _is_implemented(module, "on_train_batch_end")
        self._backward = OverriddenMethod(module, "backward", self._on_backward)
        self._batch_end = OverriddenMethod(module, "on_train_batch_end", self._on_train_batch_end)
        self._step = OverriddenMethod(module, "training_step", self._training_step)
        overridden = [self._backward, self._batch_end, self._step]
        if self.has_batch_start:
            self._batch_start = OverriddenMethod(module, "on_train_batch_start", self._on_train_batch_start)
            overridden.append(self._batch_start)
        return overridden

    @property
    def open_round(self) -> Round | None:
        """The current round; ``None`` between rounds."""
        return None if self.round is None or self.round.is_over else self.round

    def start_batch(self) -> None:
        """Starts the next visits before the first batch."""
        round = self.open_round
        if round is not None and round.loader.group and round.driver.group is not round.loader.group:
            round.driver.start(round.loader.group)

    def delay(self, callback: L.Callback) -> OverriddenMethod:
        """Delays a checkpoint callback's ``on_train_batch_end`` for a round's last batch until after the round."""

        def wait(*args: Any) -> None:
            round = self.open_round
            if round is not None and (round.loader.is_over or self._is_cut(round)):
                self._waiting.append(lambda: method.original(*args))
            else:
                method.original(*args)

        method = OverriddenMethod(callback, "on_train_batch_end", wait)
        return method

    def run_delayed(self) -> None:
        """Runs the delayed callbacks, after the round."""
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def _on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        round = self.open_round
        planned = None if round is None else round.loader.current
        self._is_skipped = planned is not None and planned.is_over
        if self._is_skipped:
            return None
        with self._counting_in_visit(batch_idx) as local_idx:
            response = self._batch_start.original(batch, local_idx)
        if response != -1 or round is None or planned is None:
            return response
        round.driver.end_early(planned, planned.num_batches - round.loader.batches_left - 1)
        if planned is round.loader.visits[-1] and process_group_of(self._fit.trainer).size == 1:
            self._close_round(round)
            return -1
        self._is_skipped = True
        return None  # other clients' batches follow

    def _training_step(self, *args: Any, **kwargs: Any) -> Any:
        round = self.open_round
        if self._is_skipped:
            self._fit.ignore_warning("`training_step` returned `None`")
            return None
        if round is None or not round.driver.group:  # between visits
            return self._step.original(*args, **kwargs)
        with self._counting_in_visit(0) as local_idx:
            if len(args) > 1:  # the batch, and the index if the step takes one
                args = (args[0], local_idx, *args[2:])
            return round.driver.train_step(self._step.original, args, kwargs)

    def _on_backward(self, *args: Any, **kwargs: Any) -> None:
        round = self.open_round
        if round is None or not round.driver.group:
            self._backward.original(*args, **kwargs)
        else:
            round.driver.backward(self._backward.original, args, kwargs)

    def _on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends a batch, and trains the round's other batches in fused visits. Lightning calls this hook last."""
        self._end_batch(outputs, batch, batch_idx)
        batch_loop = self.batch_loop
        if batch_loop is None or batch_loop.is_over:
            return
        batch_loop.prepare()
        del outputs, batch
        while not (batch_loop.is_over or self._is_stream_over):
            batch_loop.end_batch()
            self._end_batch(*batch_loop.train())

    @property
    def _is_stream_over(self) -> bool:
        # Lightning does not know the length of a stream of batches.
        planned = None if self.round is None else self.round.loader.current
        return planned is not None and planned.is_stream and self.round is not None and self.round.loader.is_over

    def _end_batch(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ends a batch, the visit after its last batch, and the round after its last visit."""
        round = self.round
        planned = None if round is None else round.loader.current
        is_skipped = batch is None or self._is_skipped or (planned is not None and planned.fault is not None)
        self._is_skipped = False
        if self._has_batch_end and not is_skipped:
            with self._counting_in_visit(batch_idx) as local_idx:
                self._batch_end.original(outputs, batch, local_idx)
        if round is None or round.is_over:
            return
        is_cut = self._is_cut(round)
        round.driver.end_batch()
        if is_cut and planned is not None:
            self._cut(round, planned)
        elif round.loader.is_over:
            self._close_round(round)

    def _is_cut(self, round: Round) -> bool:
        # Several processes do not know each other's batches. Simultaneous visits end without an update.
        if process_group_of(self._fit.trainer).size > 1 or round.driver.trains_at_once:
            return False
        loader = round.loader
        return loader.current is not None and not loader.is_over and ends_after_batch(self._fit.trainer)

    def _cut(self, round: Round, planned: PlannedVisit) -> None:
        """Ends the round early because the fit ends; aggregates the clients' updates so far."""
        loader = round.loader
        if loader.batches_left and not planned.is_over:
            round.driver.end_early(planned, planned.num_batches - loader.batches_left)
        has_aggregate = self._close_round(round)
        _log.warning(
            "Round %d was cut short: the fit ends in visit %d of %d, %s.",
            round_number(self._fit.server.report.round),
            loader.visits.index(planned) + 1,
            len(loader.visits),
            "with what was trained so far" if has_aggregate else "and the global model stays as it was",
        )

    @contextmanager
    def _counting_in_visit(self, batch_idx: int) -> Iterator[int]:
        """Context in which the module counts batches like in a separate fit, also in ``trainer.is_last_batch``.

        Yields the index in the local epoch (the first client's, if several train at once), or between visits
        ``batch_idx``.
        """
        position = None if self.round is None else self.round.loader.epoch_position
        if position is None:
            yield batch_idx
            return
        is_last = exchange_last_batch(self._fit.trainer, position.is_last)
        try:
            yield position.number
        finally:
            exchange_last_batch(self._fit.trainer, is_last)


def _is_implemented(module: L.LightningModule, hook: str) -> bool:
    # Also true for a wrapper around Lightning's empty hook.
    return is_overridden(hook, module) or hook in vars(module)
