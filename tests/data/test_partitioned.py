"""Clients cut out of another datamodule's training data: what trains, what is held back, and for whom."""

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.data import ByGroup, Dirichlet, LabelsPerClient, PartitionedData, PermutedPixels
from lightning_fed.tasks import ClassificationTask


class Numbered(L.LightningDataModule):
    """Images whose pixels are 4 times their number and more, and classes by number."""

    def __init__(self, count=90, shuffle=True, drop_last=False, collate_fn=None):
        super().__init__()
        self.options = {"shuffle": shuffle, "drop_last": drop_last, "collate_fn": collate_fn}
        images = 4 * torch.arange(count, dtype=torch.float32)[:, None] + torch.arange(4)
        self.dataset = TensorDataset(images.reshape(count, 1, 2, 2), torch.arange(count) % 5)
        self.stages = []

    def prepare_data(self):
        self.stages.append("prepare")

    def setup(self, stage):
        self.stages.append(stage)

    def train_dataloader(self):
        return DataLoader(self.dataset, batch_size=8, **self.options)

    def val_dataloader(self):
        return DataLoader(self.dataset, batch_size=30)

    test_dataloader = val_dataloader


def set_up(partition, source=None, stage="fit", **options):
    data = PartitionedData(source or Numbered(), partition, **options)
    data.setup(stage)
    return data


def numbers(batches):
    return [int(image.min()) // 4 for images, *_ in batches for image in images]


@pytest.mark.parametrize("fraction", [0.1, 0.3])
@pytest.mark.parametrize("partition", [Dirichlet(4, 0.5), LabelsPerClient(5, 2), ByGroup([i % 7 for i in range(90)])])
def test_every_clients_data_are_cut_in_two(partition, fraction):
    data = set_up(partition, val_fraction=fraction, seed=3)
    split = partition.split(data.source.dataset, 3)
    population = data.population()
    assert population.clients == list(split)
    for client, indices in split.items():
        held_out = numbers(data.val_clients()[client])
        kept = population.source.indices[client].tolist()
        assert len(held_out) == max(1, int(fraction * len(indices)))
        assert sorted(held_out + kept) == sorted(indices.tolist())
        assert kept == numbers([[image[None]] for image, _ in data.clients[client]])
        assert population.num_samples(client) == len(kept)
    everything = sorted(index for indices in split.values() for index in indices.tolist())
    assert sorted(numbers(data.train_dataloader()) + numbers(data.val_dataloader())) == everything
    assert numbers(data.test_dataloader()) == list(range(90))


def test_the_split_is_that_of_a_federation(federated_trainer):
    """With the same seed: the clients differ by what they hold back alone."""
    L.seed_everything(5, verbose=False)
    data = set_up(Dirichlet(4, 0.5))
    trainer = federated_trainer(max_rounds=1, partition=Dirichlet(4, 0.5))
    source = Numbered()
    trainer.fit(ClassificationTask("mlp", 5, input_size=2), datamodule=source)
    for client, indices in trainer.federation.population.source.indices.items():
        mine = data.population().source.indices[client].tolist() + numbers(data.val_clients()[client])
        assert sorted(mine) == sorted(indices.tolist())


def test_what_is_held_out_depends_on_seed_and_client():
    split = [{client: numbers(loader) for client, loader in set_up(ByGroup([i % 3 for i in range(90)]), seed=seed)
              .val_clients().items()} for seed in (0, 0, 1)]  # fmt: skip
    assert split[0] == split[1] != split[2]
    places = [sorted(number // 3 for number in held_out) for held_out in split[0].values()]
    assert places[0] != places[1]  # clients of equal sizes draw alone


def test_clients_with_test_data_of_their_own():
    split = Dirichlet(4, 0.5).split(Numbered().dataset, 3)
    data = set_up(Dirichlet(4, 0.5), val_fraction=0.2, test_fraction=0.3, seed=3, stage="test")
    for client, indices in split.items():
        parts = [numbers(loaders[client]) for loaders in (data.val_clients(), data.test_clients())]
        assert [len(part) for part in parts] == [max(1, int(share * len(indices))) for share in (0.2, 0.3)]
        kept = data.population().source.indices[client].tolist()
        assert sorted(parts[0] + parts[1] + kept) == sorted(indices.tolist())
    assert len(numbers(data.test_dataloader())) == sum(map(len, map(numbers, data.test_clients().values())))
    assert not set_up(Dirichlet(4, 0.5), seed=3).test_clients()
    tiny = set_up(ByGroup([0] * 85 + [1, 1, 1, 2, 2]), val_fraction=0.01, test_fraction=0.01)
    sizes = [
        {c: len(numbers(loader)) for c, loader in loaders.items()}
        for loaders in (tiny.val_clients(), tiny.test_clients())
    ]
    assert sizes == [{0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}]


def test_small_clients():
    """One of two examples is held out, one of one is not."""
    data = set_up(ByGroup([0] * 88 + [1, 2]), val_fraction=0.01)
    assert {client: data.population().num_samples(client) for client in (0, 1, 2)} == {0: 87, 1: 1, 2: 1}
    assert sorted(data.val_clients()) == [0]
    two = set_up(ByGroup([0] * 88 + [1, 1]), val_fraction=0.01)
    assert two.population().num_samples(1) == len(numbers(two.val_clients()[1])) == 1


def test_the_loaders_options_are_kept():
    collate = torch.utils.data.default_collate
    data = set_up(ByGroup([0] * 90), Numbered(shuffle=False, drop_last=True, collate_fn=lambda batch: collate(batch)))
    loader = data.train_dataloader()
    assert loader.batch_size == 8
    assert data.collate_fn is data.source.options["collate_fn"]
    assert numbers(loader) == data.population().source.indices[0].tolist()[:81]
    population = data.population()
    assert (population.batch_size, population.shuffle, population.drop_last) == (8, False, True)
    assert len(numbers(data.val_dataloader())) == 9


def test_permuted_pixels_are_permuted_everywhere():
    partition = PermutedPixels(3)
    data = set_up(partition, val_fraction=0.2, seed=2)
    for client in range(3):
        transform = partition.transform(client, 2)
        for dataset in (data.clients[client], data.val[client]):
            for image, label in dataset:
                number = int(image.min()) // 4
                expected, expected_label = transform(data.source.dataset[number])
                assert torch.equal(image, expected)
                assert label == expected_label
    images = torch.cat([images for images, _ in data.train_dataloader()]).reshape(-1, 4)
    assert not (images[:, 0] % 4 == 0).all()


def test_a_fit(federated_trainer, plain_trainer):
    data = PartitionedData(Numbered(), LabelsPerClient(5, 2), val_fraction=0.3)
    task = ClassificationTask("mlp", 5, input_size=2, lr=1e-4)
    trainer = federated_trainer(max_rounds=2, clients_per_round=2)
    trainer.fit(task, datamodule=data)
    assert data.source.stages == ["prepare", "fit"]
    trainer.validate(task, datamodule=data, verbose=False)
    assert data.source.stages == ["prepare", "fit", "prepare"]
    scores = [float(trainer.callback_metrics[f"client/{client}/val_acc"]) for client in range(5)]
    assert float(trainer.callback_metrics["fed/val_acc/mean"]) == pytest.approx(np.mean(scores))
    trainer.test(task, datamodule=data, verbose=False)
    assert data.source.stages == ["prepare", "fit", "prepare", "prepare", "test"]
    plain = plain_trainer(max_epochs=1)
    plain.fit(task, datamodule=data)
    assert plain.num_training_batches == -(-sum(data.population().num_samples(client) for client in range(5)) // 8)
    assert data.source.stages.count("fit") == 1


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_refuses_what_is_no_share(fraction):
    with pytest.raises(ValueError, match=rf"`val_fraction` to be in \(0, 1\), but got {fraction}"):
        PartitionedData(Numbered(), ByGroup([0] * 90), val_fraction=fraction)
    with pytest.raises(ValueError, match=r"`test_fraction` to be in \[0, 1 - val_fraction\), but got 0.9 beside"):
        PartitionedData(Numbered(), ByGroup([0] * 90), test_fraction=0.9)


def test_the_clients_are_not_known_before_setup():
    with pytest.raises(RuntimeError, match="after `setup`"):
        PartitionedData(Numbered(), ByGroup([0] * 90)).population()
