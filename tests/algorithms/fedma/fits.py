"""Small networks, clients and recording callbacks shared by the tests of FedMA."""

import itertools

import lightning as L
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import FederatedCallback

WIDTHS, CLASSES = (4, 7, 6, 3), 3


def mlp(widths=WIDTHS, seed=1):
    torch.manual_seed(seed)
    layers = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def examples(client, count, inputs=4, labels=CLASSES):
    generator = torch.Generator().manual_seed(100 + client)
    y = torch.randint(0, labels, (count,), generator=generator)
    return torch.randn(count, inputs, generator=generator) + y[:, None] * torch.linspace(-1, 1, inputs), y


def parts(counts=(9, 14, 6), labels=(3, 2, 3)):
    return {
        f"c{c}": examples(c, count, labels=num_labels)
        for c, (count, num_labels) in enumerate(zip(counts, labels, strict=True))
    }


def data_of(clients_data, batch_size=64):
    return FederatedDataModule(
        {client: TensorDataset(*part) for client, part in clients_data.items()}, batch_size=batch_size
    )


def layers_of(net):
    return [
        [layer.weight.detach().clone(), layer.bias.detach().clone()] for layer in net if isinstance(layer, nn.Linear)
    ]


def fit(trainer, module, data, *more, **arguments):
    trainer.fit(module, *more, **({"datamodule": data} if isinstance(data, L.LightningDataModule) else {}), **arguments)
    return trainer


def logged(logger, name):
    return [value for _, value in logger.curve(name)]


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Visitors(FederatedCallback):
    """Records clients and start models of every round."""

    def __init__(self):
        self.rounds, self.widths = {}, {}

    def on_client_start(self, trainer, module, client, broadcast):
        self.rounds.setdefault(trainer.current_epoch, []).append(client)
        self.widths[trainer.current_epoch, client] = [len(bias) for _, bias in layers_of(module.net)]


def many(count=8):
    return {f"c{c}": examples(c, 8 + c) for c in range(count)}


def norm_net():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)
    )


class Reader(nn.Module):
    """Sequence classifier: an embedding, an LSTM, the last step."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.rnn, self.decoder = nn.Embedding(9, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 9)

    def forward(self, tokens):
        return self.decoder(self.rnn(self.embedding(tokens))[0][:, -1])


def texts(client, count=24):
    generator = torch.Generator().manual_seed(client)
    tokens = torch.randint(0, 9, (count, 7), generator=generator)
    return tokens, (tokens[:, -1] + 1) % 9


class Residual(nn.Module):
    """Two residual stages with tied channels, BatchNorm and a depthwise convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)

        def block(a, b):
            return nn.Sequential(
                nn.Conv2d(a, a, 3, padding=1, groups=a),
                nn.Conv2d(a, b, 1),
                nn.BatchNorm2d(b),
                nn.ReLU(),
                nn.Conv2d(b, b, 3, padding=1, bias=False),
                nn.BatchNorm2d(b),
            )

        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.first, self.second, self.side = block(4, 4), block(4, 6), nn.Conv2d(4, 6, 1)
        self.head = nn.Linear(6, 3)

    def forward(self, images):
        features = self.stem(images)
        features = (features + self.first(features)).relu()
        features = (self.side(features) + self.second(features)).relu()
        return self.head(features.mean((2, 3)))


def pictures(client, count=24):
    generator = torch.Generator().manual_seed(client)
    targets = torch.randint(0, 3, (count,), generator=generator)
    images = torch.randn(count, 1, 6, 6, generator=generator)
    for label in range(3):
        images[targets == label, :, 2 * label : 2 * label + 2] += 1.5
    return images, targets


class Stop(L.Callback):
    def __init__(self, round, batch):
        self.at = round, batch

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) == self.at:
            raise KeyboardInterrupt
