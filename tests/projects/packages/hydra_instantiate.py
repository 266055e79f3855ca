"""Objects composed and instantiated by hydra, as in lightning-hydra-template."""

import tempfile
from pathlib import Path

import hydra
import lightning as L
from hydra import compose, initialize_config_dir

TRAINER = """
_target_: lightning.pytorch.Trainer
max_epochs: 3
"""

CONFIG = """
defaults: [trainer, _self_]
seed: 1
data: {_target_: tests.projects.scripts.hydra_template.DigitsDataModule, batch_size: 16}
model:
  _target_: tests.projects.scripts.hydra_template.DigitsModule
  net: {_target_: tests.projects.scripts.hydra_template.DenseNet, sizes: [16, 32, 4]}
  optimizer: {_target_: torch.optim.Adam, _partial_: true, lr: 0.01}
  scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, _partial_: true, patience: 10}
"""


def main(callbacks, **options):
    folder = Path(tempfile.mkdtemp())
    (folder / "train.yaml").write_text(CONFIG)
    (folder / "trainer.yaml").write_text("# @package trainer\n" + TRAINER)
    with initialize_config_dir(str(folder), version_base="1.3"):
        cfg = compose("train")
    L.seed_everything(cfg.seed)
    datamodule = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    trainer = hydra.utils.instantiate(cfg.trainer, callbacks=callbacks, **options)
    trainer.fit(model=model, datamodule=datamodule)
    return trainer
