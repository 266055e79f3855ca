"""Fine-tuning with adapters: a transformer with LoRA, and a segmentation network with a frozen encoder."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("peft", reason="the extra `peft` is not installed")
pytest.importorskip("transformers", reason="the extra `peft` is not installed")

import segmentation_models_pytorch as smp
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForSequenceClassification

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.matching import MatchedAverage
from tests import models
from tests.recorders import Recorder, assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Found .* module"),
    pytest.mark.filterwarnings("ignore::FutureWarning:transformers"),  # 5.23 warns about its own attributes
]

COUNTS = {"ann": 16, "bob": 8, "cid": 11}


@pytest.fixture(scope="module")
def example():
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    try:
        import lora

        yield lora
    finally:
        sys.path.pop(0)
        sys.modules.pop("lora", None)


@pytest.fixture(scope="module")
def folder(example, tmp_path_factory):
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("model") / "tiny-bert"
    example.make_folder(path)
    return path


@pytest.fixture
def make_module(example, folder):
    def make(**options):
        torch.manual_seed(1)
        return example.LoraClassifier(str(folder), **options)

    return make


@pytest.fixture
def clients(example, folder):
    collate = example.Collate(folder)
    return {
        name: DataLoader(example.make_texts(count, seed), batch_size=8, collate_fn=collate)
        for seed, (name, count) in enumerate(COUNTS.items())
    }


def adapter_bytes(module):
    """Bytes of the adapters and the trained classifier, as saved by peft."""
    return sum(value.numel() * value.element_size() for value in get_peft_model_state_dict(module.model).values())


def fit(federated_trainer, module, clients, rounds=2, ckpt_path=None, **options):
    recorder = Recorder()
    trainer = federated_trainer(max_rounds=rounds, callbacks=[recorder], **options)
    trainer.fit(module, clients, ckpt_path=ckpt_path)
    return recorder, trainer


def check_bytes(recorder, module, count):
    own = adapter_bytes(module)
    for values in recorder.logged:
        for direction in ("up", "down"):
            assert 0 < values[f"comm/{direction}_bytes"] <= 1.05 * count * own


def test_adapters_alone_travel(make_module, clients, folder, federated_trainer):
    """The base model equals the model in the folder."""
    recorder, _ = fit(federated_trainer, module := make_module(), clients, rounds=1)
    check_bytes(recorder, module, len(clients))
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    base = {name: value for name, value in loaded.state_dict().items() if "classifier" not in name}
    now = module.model.get_base_model().state_dict()
    assert_same(
        {
            name: now[name.replace(".query.", ".query.base_layer.").replace(".value.", ".value.base_layer.")]
            for name in base
        },
        base,
    )
    assert not torch.equal(
        state_of(module)["model.base_model.model.bert.encoder.layer.0.attention.self.query.lora_B.default.weight"],
        torch.zeros(64, 8),
    )


def test_what_was_trained_is_an_adapter_of_peft(make_module, clients, folder, federated_trainer, tmp_path):
    """Saved, loaded on the folder's model and merged, the adapter gives equal outputs."""
    fit(federated_trainer, module := make_module(), clients, rounds=1)
    module.eval().model.save_pretrained(tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    batch = next(iter(clients["bob"]))
    expected = module.model(**batch).logits
    assert torch.equal(loaded(**batch).logits, expected)
    assert torch.allclose(loaded.merge_and_unload()(**batch).logits, expected, atol=1e-5)


def test_resuming(make_module, clients, federated_trainer, tmp_path):
    options = {"clients_per_round": 2, "seed": 1, "method": "fedadam"}
    whole, _ = fit(federated_trainer, expected := make_module(), clients, 2, **options)
    _, trainer = fit(federated_trainer, make_module(), clients, 1, **options)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    rest, _ = fit(federated_trainer, module := make_module(), clients, 2, tmp_path / "last.ckpt", **options)
    assert_same(state_of(module), state_of(expected))
    assert rest.logged == whole.logged[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("personal", "shared"), [(["*lora_*"], ["classifier"]), (["*lora_B*"], ["lora_A", "classifier"])]
)
def test_adapters_of_the_clients_own(personal, shared, make_module, clients, federated_trainer):
    """All adapters, or the B matrices as in FedSA-LoRA."""
    federation = Federation(personal=personal)
    recorder, _ = fit(federated_trainer, module := make_module(), clients, federation=federation)
    parts = get_peft_model_state_dict(module.model)
    size = sum(value.numel() * 4 for name, value in parts.items() if any(part in name for part in shared))
    assert [values["comm/up_bytes"] for values in recorder.logged] == [len(clients) * size] * 2
    own = [federation.client_state(client) for client in clients]
    names = [name for name in own[0] if "lora_B" in name]
    assert len(names) == 8
    assert not any(torch.equal(own[0][name], own[1][name]) for name in names)
    common = [name for name in own[0] if not any(part.strip("*") in name for part in personal)]
    assert_same(own[0], own[1], common)


@pytest.mark.slow
def test_on_flower(make_module, clients, federated_trainer, tmp_path):
    pytest.importorskip("flwr")
    from lightning_fed.backends.flower.client import client_app
    from lightning_fed.backends.flower.transport import FlowerTransport
    from lightning_fed.backends.wire.server import run_server
    from tests.backends.flower.grids import FakeGrid
    from tests.backends.flower.halves import OPTIONS

    def federation():
        return Federation(seed=1)

    fit(federated_trainer, expected := make_module(), clients, federation=federation())
    app = client_app(federation(), make_module, FederatedDataModule(clients), OPTIONS, store=tmp_path / "client")
    transport = FlowerTransport(FakeGrid({11: app}), 60, poll=0.01)
    recorder, module = Recorder(), make_module()
    run_server(
        federation(), module, None, {**OPTIONS, "max_epochs": 2}, transport, transport.await_clients(len(clients), 1),
        tmp_path / "server", [recorder],
    )  # fmt: skip
    assert_same(state_of(module), state_of(expected))
    check_bytes(recorder, module, len(clients))
    assert transport.sent == sum(values["comm/down_bytes"] for values in recorder.logged)


def test_merging_adapters(make_module, clients, federated_trainer, tmp_path):
    """The product of means is not the mean of products: refused, but correct for merged adapters."""
    modules = {}
    for name in ("ann", "bob"):
        _, trainer = fit(federated_trainer, make_module(), {name: clients[name]}, rounds=1)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        modules[name] = trainer.lightning_module
    paths = [tmp_path / f"{name}.ckpt" for name in modules]
    with pytest.raises(ValueError, match=r"without adapters, but got the factor '.*lora_A.*`merge_and_unload`"):
        MatchedAverage().merge(paths, make_module())
    plain = [module.model.merge_and_unload() for module in modules.values()]
    expected = {
        name: torch.stack([model.state_dict()[name].double() for model in plain]).mean(0).float()
        for name in plain[0].state_dict()
    }
    batch = next(iter(clients["cid"]))
    merged = MatchedAverage("none").merge(plain, example_input=(batch["input_ids"], batch["attention_mask"]))
    assert all(torch.allclose(merged.state[name], value, atol=1e-7) for name, value in expected.items())


class Segmenter(models.Module):
    """A U-Net with a frozen encoder from a local file; optionally with LoRA in the convolutions."""

    def __init__(self, path, rank=0):
        torch.manual_seed(1)
        net = smp.Unet("resnet18", encoder_weights=None, classes=3, encoder_depth=3, decoder_channels=(16, 8, 8))
        net.encoder.load_state_dict(torch.load(path, weights_only=True))
        if rank:
            layers = [
                name for name, layer in net.named_modules() if name.startswith("encoder.layer") and ".conv" in name
            ]
            net = get_peft_model(
                net, LoraConfig(r=rank, target_modules=layers, modules_to_save=["decoder", "segmentation_head"])
            )
        else:
            net.encoder.requires_grad_(False)
        super().__init__(net, models.adam)

    def on_train_epoch_start(self):
        for name, layer in self.named_modules():
            if ".encoder" in name:
                layer.eval()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
def test_segmentation_with_an_encoder_from_a_file(rank, federated_trainer, tmp_path):
    torch.manual_seed(0)
    encoder = smp.encoders.get_encoder("resnet18", weights=None, depth=3)
    torch.save(encoder.state_dict(), tmp_path / "encoder.pt")
    clients = models.as_datasets(models.scenes({"a": 4, "b": 6}))
    module = Segmenter(tmp_path / "encoder.pt", rank)
    trained = sum(value.numel() * 4 for value in module.parameters() if value.requires_grad)
    buffers = sum(
        value.numel() * value.element_size() for name, value in module.named_buffers() if ".encoder" not in name
    )
    recorder, _ = fit(federated_trainer, module, clients, batch_norm="average")
    for values in recorder.logged:
        assert values["comm/up_bytes"] == values["comm/down_bytes"] == 2 * (trained + buffers)
    assert trained + buffers < 0.02 * sum(value.numel() * 4 for value in module.state_dict().values())
