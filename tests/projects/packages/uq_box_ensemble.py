"""Regression with mean and variance with lightning-uq-box, on toy data from the package."""

from functools import partial

import lightning.pytorch as pl
import torch
from lightning_uq_box.datamodules import ToyHeteroscedasticDatamodule
from lightning_uq_box.models import MLP
from lightning_uq_box.uq_methods import MVERegression


def main(callbacks, **options):
    pl.seed_everything(0)
    datamodule = ToyHeteroscedasticDatamodule(batch_size=32)
    network = MLP(n_hidden=[32, 32], n_outputs=2, activation_fn=torch.nn.Tanh())
    model = MVERegression(network, optimizer=partial(torch.optim.Adam, lr=0.01), burnin_epochs=2)
    trainer = pl.Trainer(max_epochs=6, callbacks=callbacks, **options)
    trainer.fit(model, datamodule)
    return trainer
