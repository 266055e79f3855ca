"""Clients from another datamodule's training data: training and held-out examples per client."""

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.transforms.v2 import RandomHorizontalFlip

from lightning_fed.data import IID, ByGroup, Dirichlet, LabelsPerClient, PartitionedData, PermutedPixels
from lightning_fed.data.population import PlannedVisit
from lightning_fed.datasets.arrays import ArrayDataset
from lightning_fed.partitions.loader_split import split_loader
from lightning_fed.server.schedule import Visit
from lightning_fed.tasks import ClassificationTask


class Numbered(L.LightningDataModule):
    """Images with pixels starting at 4 times the image number, and labels by number."""

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
        trained = population.source.datasets[client].indices.tolist()
        assert len(held_out) == max(1, int(fraction * len(indices)))
        assert sorted(held_out + trained) == sorted(indices.tolist())
        assert trained == numbers([[image[None]] for image, _ in data.clients[client]])
        assert population.num_samples(client) == len(trained)
    everything = sorted(index for indices in split.values() for index in indices.tolist())
    assert sorted(numbers(data.train_dataloader()) + numbers(data.val_dataloader())) == everything
    assert numbers(data.test_dataloader()) == list(range(90))


def test_the_split_is_that_of_a_federation(federated_trainer):
    """With the same seed a client only lacks the held-out examples."""
    L.seed_everything(5, verbose=False)
    data = set_up(Dirichlet(4, 0.5))
    trainer = federated_trainer(max_rounds=1, partition=Dirichlet(4, 0.5))
    source = Numbered()
    trainer.fit(ClassificationTask("mlp", 5, input_size=2), datamodule=source)
    for client, part in trainer.federation.population.source.datasets.items():
        examples = data.population().source.datasets[client].indices.tolist() + numbers(data.val_clients()[client])
        assert sorted(examples) == sorted(part.indices.tolist())


def test_what_is_held_out_depends_on_seed_and_client():
    split = [{client: numbers(loader) for client, loader in set_up(ByGroup([i % 3 for i in range(90)]), seed=seed)
              .val_clients().items()} for seed in (0, 0, 1)]  # fmt: skip
    assert split[0] == split[1] != split[2]
    held_out_positions = [sorted(number // 3 for number in held_out) for held_out in split[0].values()]
    assert held_out_positions[0] != held_out_positions[1]  # clients of equal size draw independently


def test_clients_with_test_data_of_their_own():
    split = Dirichlet(4, 0.5).split(Numbered().dataset, 3)
    data = set_up(Dirichlet(4, 0.5), val_fraction=0.2, test_fraction=0.3, seed=3, stage="test")
    for client, indices in split.items():
        parts = [numbers(loaders[client]) for loaders in (data.val_clients(), data.test_clients())]
        assert [len(part) for part in parts] == [max(1, int(share * len(indices))) for share in (0.2, 0.3)]
        trained = data.population().source.datasets[client].indices.tolist()
        assert sorted(parts[0] + parts[1] + trained) == sorted(indices.tolist())
    assert len(numbers(data.test_dataloader())) == sum(map(len, map(numbers, data.test_clients().values())))
    assert not set_up(Dirichlet(4, 0.5), seed=3).test_clients()
    tiny = set_up(ByGroup([0] * 85 + [1, 1, 1, 2, 2]), val_fraction=0.01, test_fraction=0.01)
    sizes = [
        {c: len(numbers(loader)) for c, loader in loaders.items()}
        for loaders in (tiny.val_clients(), tiny.test_clients())
    ]
    assert sizes == [{0: 1, 1: 1, 2: 1}, {0: 1, 1: 1}]


def test_small_clients():
    """One of two examples is held out, but not a single example."""
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
    assert numbers(loader) == data.population().source.datasets[0].indices.tolist()[:81]
    population = data.population()
    assert (population.batch_size, population.shuffle, population.drop_last) == (8, False, True)
    assert len(numbers(data.val_dataloader())) == 9


def test_permuted_pixels_are_permuted_everywhere():
    partition = PermutedPixels(IID(3))
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
    assert data.source.stages == ["prepare", "fit", "prepare", "fit"]
    scores = [float(trainer.callback_metrics[f"client/{client}/val_acc"]) for client in range(5)]
    assert float(trainer.callback_metrics["fed/val_acc/mean"]) == pytest.approx(np.mean(scores))
    trainer.test(task, datamodule=data, verbose=False)
    assert data.source.stages == ["prepare", "fit", "prepare", "fit", "prepare", "test"]
    plain = plain_trainer(max_epochs=1)
    plain.fit(task, datamodule=data)
    assert plain.num_training_batches == -(-sum(data.population().num_samples(client) for client in range(5)) // 8)


# --- Hooks of the other datamodule ------------------------------------------------------------------------------------


class Hooked(Numbered):
    """Implements all datamodule hooks; records the calls, and whether a Trainer was attached."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def note(self, *call):
        self.calls.append((*call, self.trainer.world_size))

    def prepare_data(self):
        self.note("prepare_data")

    def setup(self, stage):
        self.note("setup", stage.value)

    def teardown(self, stage):
        self.note("teardown", stage.value)

    def on_exception(self, exception):
        self.note("on_exception", str(exception))

    def state_dict(self):
        self.note("state_dict")
        return {"of": torch.arange(3)}

    def load_state_dict(self, state_dict):
        self.note("load_state_dict", state_dict["of"].tolist())

    def train_dataloader(self):
        self.note("train_dataloader")
        return super().train_dataloader()

    def predict_dataloader(self):
        self.note("predict_dataloader")
        return DataLoader(self.dataset, batch_size=45)

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 1024, batch[1]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device([batch[0] / 4, batch[1]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / 1024, batch[1]


class Seeing(ClassificationTask):
    """Records the smallest pixel of its inputs, and may raise."""

    def __init__(self, fails=False):
        super().__init__("mlp", 5, input_size=2, lr=1e-4)
        self.fails = fails
        self.seen = {}

    def training_step(self, batch, batch_idx):
        self.see("training", batch)
        if self.fails:
            raise KeyError("gone")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.see("validation", batch)
        super().validation_step(batch, batch_idx, dataloader_idx)

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        self.see("test", batch)
        super().test_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch, batch_idx):
        self.see("predict", batch)
        return batch[1]

    def see(self, stage, batch):
        self.seen.setdefault(stage, set()).update(batch[0].amin((1, 2, 3)).tolist())


@pytest.fixture
def door(request, federated_trainer):
    """The inner datamodule, the data passed to the Trainer, and a function for Trainers."""
    source = Hooked()
    if request.param == "partition":
        return source, source, lambda **options: federated_trainer(partition=ByGroup(GROUPS), **options)
    return source, PartitionedData(source, ByGroup(GROUPS), val_fraction=0.2), federated_trainer


GROUPS = [i % 3 for i in range(90)]
DOORS = pytest.mark.parametrize("door", ["partition", "PartitionedData"], indirect=True)
TRANSFERRED = {(4 * number + 1024) / 4 / 1024 for number in range(90)}


@DOORS
def test_steps_see_what_the_hooks_make_of_batches(door):
    """Includes client evaluation and the measurement of BatchNorm statistics."""
    _, data, make = door
    module, trainer = Seeing(), make(max_rounds=1)
    trainer.fit(module, datamodule=data)
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)
    assert set(module.seen) == {"training", "validation", "test", "predict"}
    for stage, values in module.seen.items():
        assert values <= TRANSFERRED, stage
    assert module.seen["training"] | module.seen["validation"] == TRANSFERRED
    assert module.seen["test"] == module.seen["predict"] == TRANSFERRED


@DOORS
def test_the_other_datamodule_notices_no_difference(door, tmp_path):
    """Hooks run in the same order with a Trainer, and the state is saved and restored."""
    source, data, make = door
    module, trainer = Seeing(), make(max_rounds=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer = make(max_rounds=2)
    trainer.fit(module, datamodule=data, ckpt_path=tmp_path / "one.ckpt")
    trainer.test(module, datamodule=data, verbose=False)
    trainer.predict(module, datamodule=data)
    with pytest.raises(KeyError, match="gone"):
        make(max_rounds=1).fit(Seeing(fails=True), datamodule=data)
    begin, end = [("prepare_data", 1), ("setup", "fit", 1)], [("teardown", "fit", 1)]
    assert [call for call in source.calls if call[0] != "train_dataloader"] == [
        *(*begin, *end, ("state_dict", 1)),
        *(*begin, ("load_state_dict", [0, 1, 2], 1), *end),
        *(("prepare_data", 1), ("setup", "test", 1), ("teardown", "test", 1)),
        *(("prepare_data", 1), ("setup", "predict", 1), ("predict_dataloader", 1), ("teardown", "predict", 1)),
        *(*begin, ("on_exception", "'gone'", 1)),
    ]
    assert [call for call in source.calls if call[0] == "train_dataloader"] == 3 * [("train_dataloader", 1)]


@pytest.mark.filterwarnings("ignore:.*on_after_batch_transfer")  # Lightning warns once per process
def test_the_modules_own_hooks_where_the_other_datamodule_has_none(federated_trainer):
    class Halving(Seeing):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] / 2, batch[1]

    module = Halving()
    federated_trainer(max_rounds=1).fit(module, datamodule=PartitionedData(Numbered(), ByGroup(GROUPS)))
    assert module.seen["training"] | module.seen["validation"] == {2 * number for number in range(90)}


def test_hooks_of_a_subclass_precede_hooks_of_the_source():
    class Saves(PartitionedData):
        def state_dict(self):
            return {**self.source.state_dict(), "own": 1}

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] + 1, batch[1]

    data = Saves(Numbered(), ByGroup(GROUPS))
    assert data.state_dict() == {"own": 1}
    assert data.on_after_batch_transfer((1, 2), 0) == (2, 2)


def test_what_is_held_out_does_not_change_between_two_stages():
    data = set_up(ByGroup(GROUPS))
    before = {client: numbers(loader) for client, loader in data.val_clients().items()}
    L.seed_everything(5, verbose=False)
    data.setup("validate")
    assert {client: numbers(loader) for client, loader in data.val_clients().items()} == before
    after = {client: numbers(loader) for client, loader in set_up(ByGroup(GROUPS)).val_clients().items()}
    assert after != before


@pytest.mark.parametrize("fraction", [0, 1, -0.1])
def test_refuses_what_is_no_share(fraction):
    with pytest.raises(ValueError, match=rf"`val_fraction` to be in \(0, 1\), but got {fraction}"):
        PartitionedData(Numbered(), ByGroup([0] * 90), val_fraction=fraction)
    with pytest.raises(ValueError, match=r"`test_fraction` to be in \[0, 1 - val_fraction\), but got 0.9 with"):
        PartitionedData(Numbered(), ByGroup([0] * 90), test_fraction=0.9)


def test_a_data_set_alone_is_refused_with_the_call_that_makes_a_datamodule():
    data = Numbered().dataset
    with pytest.raises(TypeError, match=r"`source` to be a LightningDataModule, but got TensorDataset") as raised:
        PartitionedData(data, ByGroup([0] * 90))
    assert "L.LightningDataModule.from_datasets(data_set, batch_size=32)" in str(raised.value)
    made = PartitionedData(L.LightningDataModule.from_datasets(data, batch_size=32), ByGroup([0] * 90))
    made.setup("fit")
    assert made.population().clients == [0]


def test_the_clients_are_not_known_before_setup():
    with pytest.raises(RuntimeError, match="Expected `setup` before `population`"):
        PartitionedData(Numbered(), ByGroup([0] * 90)).population()


def test_what_is_held_out_is_not_augmented():
    images = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    source = Numbered()
    source.dataset = ArrayDataset(images, torch.arange(12), augment=RandomHorizontalFlip(1.0))
    data = set_up(PermutedPixels(IID(2)), source, val_fraction=0.2, test_fraction=0.2, seed=3)
    for client in range(2):
        permute = data.partition.transform(client, 3)
        for parts, change in ((data.clients, lambda image: image.flip(-1)), (data.val, None), (data.test, None)):
            for image, label in parts[client]:
                expected = images[label] if change is None else change(images[label])
                assert torch.equal(image, permute((expected, label))[0])
    assert source.dataset.augment is not None


def test_an_augmentation_comes_before_a_clients_permutation():
    """As in FedFusion's program: mirrors the image, not the permuted pixels."""
    images = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    dataset = ArrayDataset(images, torch.arange(6), augment=RandomHorizontalFlip(1.0))
    partition = PermutedPixels(IID(2, seed=1), seed=1)
    population = split_loader(DataLoader(dataset, 3, shuffle=True), partition, seed=1)
    (batch,) = population.stream([PlannedVisit(Visit(1, 0, 0), 3, 1)])
    permute = partition.transform(1, 1)
    for sample, label in zip(*batch.batch, strict=True):
        assert torch.equal(sample, permute((images[label].flip(-1), label))[0])
        assert not torch.equal(sample, permute((images[label], label))[0].flip(-1))
