"""Plays by speaking role: explicit windows and split, both file formats, generated text, the real files."""

import gzip
import json

import numpy as np
import pytest
import torch

from lightning_fed.client.client_store import FolderStore
from lightning_fed.datasets import Shakespeare
from lightning_fed.datasets.text import LEAF_VOCABULARY, decode_text, encode_text, make_roles, read_roles
from lightning_fed.tasks import CharLanguageTask
from tests.datasets.test_datasets import DATA, real

NAMES = ["hamlet/HAMLET", "hamlet/Ghost", "lear/KING LEAR", "lear/Fool"]
LENGTHS = [700, 30, 500, 260]


def write_roles(root, lengths=LENGTHS):
    """Four roles speaking in turns, with texts of the given lengths including line breaks."""
    letters = np.array(list("abcdefgh \n$"))
    texts = ["".join(np.random.default_rng(role).choice(letters, length)) for role, length in enumerate(lengths)]
    speeches = [[role, text[:25]] for role, text in enumerate(texts)] + [
        [role, text[26:]] for role, text in reversed(list(enumerate(texts)))
    ]
    root.mkdir(exist_ok=True)
    content = json.dumps({"plays": ["hamlet", "lear"], "titles": [], "roles": NAMES, "speeches": speeches})
    (root / "shakespeare_roles.json.gz").write_bytes(gzip.compress(content.encode()))
    return {name: f"{text[:25]}\n{text[26:]}" for name, text in zip(NAMES, texts, strict=True)}


def samples(text, length, stride=1):
    """Every window and the following character."""
    return [(text[i : i + length], text[i + length]) for i in range(0, len(text) - length, stride)]


def pairs(data, dataset):
    return [(data.decode(window), data.decode(target.reshape(-1))) for window, target in dataset]


@pytest.mark.parametrize("folder", ["shakespeare", "."])
def test_windows_and_split(tmp_path, folder):
    texts = write_roles(tmp_path / folder)
    data = Shakespeare(tmp_path, min_samples=200, seq_length=10, val_fraction=0.25, batch_size=16)
    data.setup("fit")
    large = [name for name in NAMES if len(texts[name]) >= 210]
    assert list(data.clients) == list(data.val) == large == [NAMES[0], NAMES[2], NAMES[3]]
    for name in large:
        expected = samples(texts[name].replace("$", " "), 10)
        cut = int(0.75 * len(expected))
        train, val = pairs(data, data.clients[name]), pairs(data, data.val[name])
        assert train == expected[:cut]
        assert val == expected[cut + 9 :]  # the first window starts at the last training target
        assert len(val) >= 0.25 * len(expected) - 10 > 30
        assert [target for _, target in train] == list(data.decode(data.clients[name].targets))
    assert data.num_classes == 80


@pytest.mark.parametrize("stride", [1, 3, 10])
def test_every_step_and_strides(tmp_path, stride):
    texts = write_roles(tmp_path)
    options = {"min_samples": 400, "seq_length": 10, "stride": stride, "vocabulary": "text"}
    data = Shakespeare(tmp_path, every_step=True, **options)
    data.setup()
    assert data.vocabulary == "".join(sorted(set("".join(texts.values())))) == "\n $abcdefgh"
    last = Shakespeare(tmp_path, **options)
    last.setup()
    for name in (NAMES[0], NAMES[2]):
        text = texts[name]
        expected = [text[start : start + 11] for start in range(0, int(0.8 * (len(text) - 10)), stride)]
        assert pairs(data, data.clients[name]) == [(window[:10], window[1:]) for window in expected]
        for first, second in ((data.clients, last.clients), (data.val, last.val)):
            assert torch.equal(first[name].inputs, second[name].inputs)
            assert torch.equal(first[name].targets[:, -1], second[name].targets)
    shared = data.clients[NAMES[0]].inputs
    assert shared.untyped_storage().nbytes() == 8 * 700  # the windows are views of the text


def test_the_first_clients_of_the_file_are_kept(tmp_path):
    write_roles(tmp_path)
    data = Shakespeare(tmp_path, min_samples=200, seq_length=10, max_clients=2)
    assert data.population().clients == [NAMES[0], NAMES[2]]


def test_blocks_of_text(tmp_path):
    text = "First Citizen:\nYou are all.\nResolved!\n\nAll:\nSpeak, speak.\n\nFirst Citizen:\nOne word: go.\n"
    (tmp_path / "tinyshakespeare.txt").write_text(text)
    roles = {"First Citizen": "You are all.\nResolved!\nOne word: go.", "All": "Speak, speak."}
    assert read_roles(tmp_path / "tinyshakespeare.txt") == roles
    for path in (tmp_path, tmp_path / "tinyshakespeare.txt"):
        data = Shakespeare(path, min_samples=20, seq_length=4, vocabulary="text")
        assert data.vocabulary == "".join(sorted(set("".join(roles.values()))))  # includes excluded roles
        assert list(data.clients) == ["First Citizen"]


def test_codes():
    assert len(LEAF_VOCABULARY) == len(set(LEAF_VOCABULARY)) == 80
    text = LEAF_VOCABULARY[::-1] + "é$|"
    codes = encode_text(text, LEAF_VOCABULARY)
    assert codes.tolist() == [*range(79, -1, -1), 1, 1, 1]
    assert decode_text(codes, LEAF_VOCABULARY) == LEAF_VOCABULARY[::-1] + "   "
    assert encode_text("", "ab").tolist() == []
    with pytest.raises(ValueError, match="all characters, or a space"):
        encode_text("abc", "ab")


def test_generated_text():
    roles = make_roles(12, 0)
    assert make_roles(3, 0) == {name: roles[name] for name in list(roles)[:3]}
    assert make_roles(3, 1).keys() == make_roles(3, 0).keys()
    assert make_roles(3, 1) != make_roles(3, 0)
    assert all(1500 <= len(text) < 4600 and set(text) <= set(LEAF_VOCABULARY) for text in roles.values())
    data = Shakespeare()
    assert data.population().clients == sorted(roles)
    counts = [np.bincount(data.encode(text), minlength=80) / len(text) for text in roles.values()]
    apart = [np.abs(first - second).sum() for first in counts for second in counts if first is not second]
    assert min(apart) > 0.1  # roles differ
    for name, text in roles.items():
        whole = [data.clients[name], data.val[name]]
        assert data.decode(whole[0].inputs[0]) == text[:80]
        assert data.decode(whole[1].targets[-1:]) == text[-1]


def test_federated_and_pooled(federated_trainer, plain_trainer, tmp_path):
    """Roles are validated separately; role names with slashes and spaces are client names."""
    write_roles(tmp_path)
    data = Shakespeare(tmp_path, min_samples=200, seq_length=10, batch_size=64, eval_batch_size=20)
    task = CharLanguageTask(hidden_size=8)
    trainer = federated_trainer(
        max_rounds=1, clients_per_round=2, store=FolderStore(tmp_path / "store"), personal=["model.decoder.bias"]
    )
    trainer.fit(task, datamodule=data)
    logged = trainer.callback_metrics
    assert {f"client/{name}/val_acc" for name in (NAMES[0], NAMES[2], NAMES[3])} <= set(logged)
    assert float(logged["fed/val_perplexity/mean"]) > 1
    assert trainer.num_val_batches == [sum(-(-len(windows) // 20) for windows in data.val.values())]
    plain = plain_trainer(max_epochs=1)
    plain.fit(task, datamodule=data)
    assert plain.num_training_batches == -(-sum(map(len, data.clients.values())) // 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vocabulary": "ascii"}, "`vocabulary` to be one of"),
        ({"stride": 0}, "`stride` to be at least 1, but got 0"),
        ({"seq_length": 0}, "`seq_length` to be at least 1"),
        ({"max_clients": 0}, "`max_clients` to be at least 1"),
        ({"batch_size": 0}, "`batch_size` to be at least 1"),
        ({"seed": -1}, "`seed` to be at least 0"),
        ({"val_fraction": 1.0}, r"`val_fraction` to be in \(0, 1\), but got 1.0"),
        ({"min_samples": 399}, r"`min_samples` to be at least 80 / 0.2, .* but got 399"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        Shakespeare(**arguments)


def test_files_that_are_not_there_or_not_of_the_kind(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"shakespeare_roles\.json\.gz` or .*omit `data_dir`"):
        Shakespeare(tmp_path).setup()
    write_roles(tmp_path)
    with pytest.raises(ValueError, match=r"a role with 1000 samples \(`min_samples`\), but the largest role has 620"):
        Shakespeare(tmp_path).setup()
    (tmp_path / "shakespeare_roles.json.gz").write_bytes(gzip.compress(b"[1]"))
    with pytest.raises(ValueError, match="the entries 'roles' and 'speeches'"):
        Shakespeare(tmp_path).setup()
    (tmp_path / "tinyshakespeare.txt").write_text("No role\nspeaks here.\n")
    with pytest.raises(ValueError, match="the line `ROLE:`, but it has none"):
        Shakespeare(tmp_path / "tinyshakespeare.txt").setup()


@pytest.mark.slow
@real("shakespeare/shakespeare_roles.json.gz")
def test_the_real_plays():
    data = Shakespeare(DATA, min_samples=10_000, max_clients=66)
    content = json.loads(gzip.decompress((DATA / "shakespeare/shakespeare_roles.json.gz").read_bytes()))
    texts = {}
    for role, speech in content["speeches"]:
        texts.setdefault(content["roles"][role], []).append(speech)
    texts = {role: "\n".join(speeches) for role, speeches in texts.items()}
    large = [role for role, text in texts.items() if len(text) >= 10_080]
    assert (len(texts), len(large)) == (1343, 136)
    data.setup()
    assert list(data.clients) == large[:66]
    hamlet = next(name for name in data.clients if name.endswith("FALSTAFF"))
    text, size = texts[hamlet], len(texts[hamlet]) - 80
    assert len(data.clients[hamlet]) == int(0.8 * size)
    assert len(data.val[hamlet]) == size - int(0.8 * size) - 79
    assert data.decode(data.clients[hamlet].inputs[1000]) == text[1000:1080]
    assert data.decode(data.val[hamlet].targets) == text[-len(data.val[hamlet]) :]
    everything = Shakespeare(DATA, vocabulary="text")
    assert (everything.num_classes, len(everything.clients)) == (76, sum(len(t) >= 1080 for t in texts.values()))


@real("shakespeare/tinyshakespeare.txt")
def test_the_real_excerpt():
    data = Shakespeare(DATA / "shakespeare/tinyshakespeare.txt", vocabulary="text")
    assert data.num_classes == 65
    assert (len(data.clients), next(iter(data.clients))) == (138, "First Citizen")
