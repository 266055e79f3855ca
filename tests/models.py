"""Small real models and data. Every function returns the same weights and examples in every call."""

from collections.abc import Callable, Mapping

import lightning as L
import segmentation_models_pytorch as smp
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 3

# --- Optimizers -------------------------------------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


# --- Modules ----------------------------------------------------------------------------------------------------------


class Module(L.LightningModule):
    """A network, a loss and an optimizer, as users write them.

    Args:
        net: The network.
        optimizer: Makes the optimizer from parameters.
        scheduler: Makes Lightning's scheduler configuration from the optimizer.
        loss: Loss for (output, target).
    """

    def __init__(self, net, optimizer: Callable = sgd, scheduler: Callable | None = None, loss=F.cross_entropy):
        super().__init__()
        self.net = net
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self.loss = loss

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = self.loss(self(inputs), targets)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        inputs, targets = batch
        outputs = self(inputs)
        self.log("val_loss", self.loss(outputs, targets))
        if not targets.is_floating_point():
            self.log("val_acc", (outputs.argmax(1) == targets).float().mean())

    def configure_optimizers(self):
        optimizer = self.make_optimizer(self.parameters())
        if self.make_scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.make_scheduler(optimizer)}


class ManualModule(Module):
    """Manual optimization: two gradient accumulations per step, and a scheduler step after every optimizer step."""

    def __init__(self, net, optimizer: Callable = momentum, scheduler: Callable | None = None):
        super().__init__(net, optimizer, scheduler)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            inputs, targets = part
            self.manual_backward(self.loss(self(inputs), targets) / 2)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)
        optimizer.step()
        if self.make_scheduler is not None:
            self.lr_schedulers().step()


class TwoOptimizers(L.LightningModule):
    """Two adversarial networks with separate optimizers: a minimal GAN."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        real = batch[0]
        make, judge = self.optimizers()
        noise = torch.randn(len(real), 4, device=self.device)
        self.toggle_optimizer(judge)
        scores = self.judge(real), self.judge(self.maker(noise).detach())
        loss = F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        judge.zero_grad()
        self.manual_backward(loss)
        judge.step()
        self.untoggle_optimizer(judge)
        self.toggle_optimizer(make)
        loss = F.softplus(-self.judge(self.maker(noise))).mean()
        make.zero_grad()
        self.manual_backward(loss)
        make.step()
        self.untoggle_optimizer(make)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.softplus(-self.judge(batch[0])).mean())

    def configure_optimizers(self):
        return [
            torch.optim.Adam(self.maker.parameters(), lr=1e-2, betas=(0.5, 0.9)),
            torch.optim.SGD(self.judge.parameters(), lr=1e-2, momentum=0.9),
        ]


class Quadratic(L.LightningModule):
    """0.5 * |w - x|^2: the optimum is the mean of the examples, reached in one step with rate 1."""

    def __init__(self, size=2, lr=1.0):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        return 0.5 * (self.w - batch[0]).square().sum(1).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 0.5 * (self.w - batch[0]).square().sum(1).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


# --- Networks ---------------------------------------------------------------------------------------------------------


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def dropout_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, CLASSES))


def norm_mlp():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.BatchNorm1d(8),
        nn.ReLU(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8, momentum=None), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


class BaseAndHead(nn.Module):
    """A shared base and a head that may be personal."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs):
        return self.head(self.base(inputs))


class Tied(nn.Module):
    """A language model with the embedding as output layer."""

    def __init__(self, tokens=7, size=5):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(tokens, size)
        self.mix = nn.Linear(size, size)
        self.output = nn.Linear(size, tokens)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        return self.output(torch.tanh(self.mix(self.embedding(tokens)).cumsum(1))).transpose(1, 2)


class Recurrent(nn.Module):
    """A language model with a two-layer LSTM and dropout."""

    def __init__(self, tokens=7, size=5):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(tokens, size)
        self.lstm = nn.LSTM(size, 6, num_layers=2, batch_first=True, dropout=0.3)
        self.output = nn.Linear(6, tokens)

    def forward(self, tokens):
        return self.output(self.lstm(self.embedding(tokens))[0]).transpose(1, 2)


def deeplab():
    torch.manual_seed(0)
    return smp.DeepLabV3Plus("mobilenet_v2", encoder_weights=None, classes=CLASSES, decoder_channels=16)


def unet():
    torch.manual_seed(0)
    return smp.Unet("resnet18", encoder_depth=3, encoder_weights=None, classes=CLASSES, decoder_channels=(16, 8, 8))


# --- Data: a tuple of tensors by client; sizes differ, some with a final batch of one example -------------------------

SIZES = {"ann": 65, "bob": 40, "cid": 97, "dan": 7, "eve": 33}
"""Examples per client. With batches of 32, `ann`, `cid` and `eve` have a single example left."""


def vectors(sizes: Mapping[str, int] = SIZES):
    """Gaussian vectors with different means by client, labelled by a fixed linear rule."""
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(6, CLASSES, generator=generator)
    clients = {}
    for place, (name, size) in enumerate(sizes.items()):
        inputs = torch.randn(size, 6, generator=generator) + 0.3 * place
        clients[name] = (inputs, (inputs @ rule).argmax(1))
    return clients


def images(sizes: Mapping[str, int] = SIZES):
    """Images of 1 x 8 x 8; the bright quarter is the class."""
    generator = torch.Generator().manual_seed(2)
    clients = {}
    for place, (name, size) in enumerate(sizes.items()):
        targets = torch.randint(CLASSES, (size,), generator=generator)
        inputs = torch.randn(size, 1, 8, 8, generator=generator) * (1 + place / 4)
        for row, target in enumerate(targets.tolist()):
            inputs[row, 0, 4 * (target // 2) :, 4 * (target % 2) :][:4, :4] += 1
        clients[name] = (inputs, targets)
    return clients


def sentences(sizes: Mapping[str, int] = SIZES):
    """Increasing sequences of 5 tokens (modulo 7) with the next tokens; step sizes differ between clients."""
    generator = torch.Generator().manual_seed(3)
    clients = {}
    for place, (name, size) in enumerate(sizes.items()):
        start = torch.randint(7, (size, 1), generator=generator)
        tokens = (start + torch.arange(6) * (1 + place % 3)) % 7
        clients[name] = (tokens[:, :-1], tokens[:, 1:])
    return clients


def scenes(sizes: Mapping[str, int]):
    """Images of 3 x 32 x 32 with a bright box, and the class of every pixel."""
    generator = torch.Generator().manual_seed(4)
    clients = {}
    for name, size in sizes.items():
        inputs = torch.randn(size, 3, 32, 32, generator=generator)
        targets = torch.zeros(size, 32, 32, dtype=torch.int64)
        for row in range(size):
            top, left = (int(place) for place in torch.randint(16, (2,), generator=generator))
            label = 1 + row % (CLASSES - 1)
            targets[row, top : top + 16, left : left + 16] = label
            inputs[row, label, top : top + 16, left : left + 16] += 2
        clients[name] = (inputs, targets)
    return clients


def as_datasets(clients: Mapping[str, tuple]):
    return {name: TensorDataset(*tensors) for name, tensors in clients.items()}


def pooled(clients: Mapping[str, tuple], batch_size=32, **options):
    """One loader over all examples, client by client, and the client's name for every example."""
    tensors = [torch.cat(parts) for parts in zip(*clients.values(), strict=True)]
    groups = [name for name, parts in clients.items() for _ in range(len(parts[0]))]
    return DataLoader(TensorDataset(*tensors), batch_size, **{"shuffle": True, **options}), groups


class PooledData(L.LightningDataModule):
    """All examples in one training loader, as in a project without clients."""

    def __init__(self, clients, **options):
        super().__init__()
        self.clients, self.options = clients, options

    def train_dataloader(self):
        return pooled(self.clients, **self.options)[0]


class ValidatedData(PooledData):
    """Adds validation and test data."""

    def __init__(self, clients, val, **options):
        super().__init__(clients, **options)
        self.val = val

    def val_dataloader(self):
        return DataLoader(TensorDataset(*self.val), 16)

    def test_dataloader(self):
        return DataLoader(TensorDataset(*self.val), 16)
