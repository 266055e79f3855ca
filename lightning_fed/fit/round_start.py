"""State in which a round finds the model and its optimizers."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
import torch

from lightning_fed.client.local_model import LocalModel
from lightning_fed.client.local_optimizers import LocalOptimizers, copy_state
from lightning_fed.lightning.internals import loss_scaler, loss_scaler_key
from lightning_fed.messages import State
from lightning_fed.model.entries import tied_names


class RoundStart:
    """Global model, optimizers and schedulers as a round finds them: what visits start from, and checkpoints hold.

    Args:
        trainer: The Trainer.
        local: The module's entries; the module holds the global model.
        optimizer_state: Whether clients start with fresh optimizer state or with their own.
        known: Tensors that take the place of copies of entries with the same values.

    Attributes:
        state: The global model's shared entries.
        optimizers: The optimizers and schedulers.

    """

    def __init__(
        self,
        trainer: L.Trainer,
        local: LocalModel,
        optimizer_state: Literal["reset", "keep"],
        known: State | None = None,
    ) -> None:
        self._trainer, self._local = trainer, local
        # With manual optimization Lightning leaves the stepping, and so the interval, to the user.
        is_manual = not trainer.lightning_module.automatic_optimization
        configs = trainer.lr_scheduler_configs
        self._per_step = [index for index, config in enumerate(configs) if is_manual or config.interval == "step"]
        per_epoch = [index for index in range(len(configs)) if index not in self._per_step]
        self._epoch_schedulers = {index: copy_state(configs[index].scheduler.state_dict()) for index in per_epoch}
        self.optimizers = LocalOptimizers(
            trainer.optimizers,
            [configs[index].scheduler for index in self._per_step],
            loss_scaler(trainer),
            optimizer_state,
            [configs[index].scheduler for index in per_epoch if not configs[index].reduce_on_plateau],
        )
        self.state = local.global_state(known)

    def restore(self) -> None:
        """Makes the module the global model again, and its optimizers what they were."""
        self._local.load_global(self.state)
        self.optimizers.start_visit()

    def patch(self, checkpoint: dict[str, Any]) -> None:
        """Puts the start of the round into a checkpoint that is taken inside it, in place of a client's state."""
        state = {**self.state, **self._local.server_entries}
        # Beside an average, which takes its place in the checkpoint, `WeightAveraging` saves the model under this name.
        model = checkpoint.get("current_model_state", checkpoint["state_dict"])
        firsts = tied_names({name: value for name, value in model.items() if isinstance(value, torch.Tensor)})
        model |= {
            name: (torch.view_as_complex(state[first]) if model[name].is_complex() else state[first]).clone()
            for name, first in firsts.items()
            if first in state
        }
        if "optimizer_states" not in checkpoint:
            return
        checkpoint["optimizer_states"], schedulers, scaler = self.optimizers.checkpoint()
        if scaler:
            checkpoint[loss_scaler_key(self._trainer)] = scaler
        for index, scheduler in zip(self._per_step, schedulers, strict=True):
            checkpoint["lr_schedulers"][index] = scheduler
        for index, scheduler in self._epoch_schedulers.items():  # they have stepped when callbacks see the last batch
            checkpoint["lr_schedulers"][index] = copy_state(scheduler)
