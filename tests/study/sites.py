"""Three to six sites with patients, and a module with every kind of score. Recipes name the classes by path."""

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics.classification import BinaryAUROC, BinaryMatthewsCorrCoef, MulticlassAccuracy

from lightning_fed import FederatedDataModule

SIZES = {"north": 20, "south": 16, "tiny": 4}  # test cases
MANY = {"north": 11, "south": 10, "tiny": 4, "east": 12, "west": 10, "coast": 10}
SECURED = [site for site in MANY if site != "tiny"]  # enough cases for an answer

RECIPE = """
model: tests.study.sites.Net
data: tests.study.sites.Sites
trainer:
  max_rounds: 3
  local_epochs: 2
  accelerator: cpu
  callbacks:
    - class_path: ModelCheckpoint
      init_args: {monitor: val_acc, mode: max}
    - class_path: SiteMatrix  # refuses personal entries; a comparison drops the matrix
      init_args: {metric: val_acc}
"""


class Cases(Dataset):
    """Dictionaries with inputs, label and patient; two cases per patient."""

    def __init__(self, site, split, count):
        generator = torch.Generator().manual_seed(1000 * list(MANY).index(site) + split)
        self.x = torch.randn(count, 5, generator=generator)
        turn = 1.0 if site == "south" else -0.5  # sites with different rules
        noise = torch.randn(count, generator=generator)
        self.y = (self.x[:, 0] + turn * self.x[:, 1] + noise > 0).long()

    def __len__(self):
        return len(self.y)

    def __getitem__(self, place):
        return {"x": self.x[place], "y": self.y[place], "patient": place // 2}


def cases(split, sizes=SIZES):
    counts = {"train": 24, "val": 10}
    return {site: Cases(site, len(split), counts.get(split, size)) for site, size in sizes.items()}


class Sites(FederatedDataModule):
    sizes = SIZES

    def __init__(self, has_test: bool = True):
        train, val, test = (cases(split, self.sizes) for split in ("train", "val", "test"))
        super().__init__(train, val=val, test=test if has_test else None, batch_size=8)


class ManySites(Sites):
    sizes = MANY


class Net(L.LightningModule):
    def __init__(self, lr: float = 0.5):
        super().__init__()
        self.lr = lr
        self.layer = nn.Linear(5, 2)
        self.acc, self.auc, self.mcc = MulticlassAccuracy(2, average="micro"), BinaryAUROC(), BinaryMatthewsCorrCoef()

    def training_step(self, batch):
        return F.cross_entropy(self.layer(batch["x"]), batch["y"])

    def validation_step(self, batch):
        self.evaluate(batch, "val")

    def test_step(self, batch):
        self.evaluate(batch, "test")

    def evaluate(self, batch, stage):
        logits, labels = self.layer(batch["x"]), batch["y"]
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels), batch_size=len(labels))
        for name, inputs in (("acc", logits), ("auc", logits.softmax(1)[:, 1]), ("mcc", logits.argmax(1))):
            metric = getattr(self, name)
            metric.update(inputs, labels)
            self.log(f"{stage}_{name}", metric)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
