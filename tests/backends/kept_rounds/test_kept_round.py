"""Kept rounds: repeated models, models without a client, a bounded folder, and a certificate for every bit."""

import json
from pathlib import Path

import lightning as L
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from lightning_fed import FederatedCallback, FederatedDataModule, Federation
from lightning_fed.backends.kept_rounds.certificate import find_changes, write_certificate
from lightning_fed.backends.kept_rounds.kept_round import KeepRounds, load_round, replay_round
from lightning_fed.cli.main import main
from lightning_fed.compression import TopK
from lightning_fed.errors import ClientFault, OptionError
from lightning_fed.messages import digest
from lightning_fed.privacy import CentralDP, SecureSum
from lightning_fed.privacy.accounting import Budget
from lightning_fed.steps import MaxSamples
from tests import models
from tests.breadth import quick
from tests.recorders import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

DATA = models.vectors({"ann": 33, "bob": 20, "cid": 48})


def fit(trainer, folder, federation, clients=DATA, max_bytes=10**8, rounds=3, callbacks=(), val=None, **options):
    module = models.Module(models.mlp(), models.momentum)
    kept = KeepRounds(folder, max_bytes)
    fitted = trainer(federation=federation, max_rounds=rounds, callbacks=[kept, *callbacks], **options)
    fitted.fit(module, datamodule=FederatedDataModule(models.as_datasets(clients), val, batch_size=16))
    return module.state_dict()


def records_of(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("round-*/round.json"))]


@pytest.mark.parametrize("method", quick(["fedavg", "fedadam", "krum"], ["fedadam", "krum"]))
def test_a_repeated_round_equals_the_recorded_round(method, federated_trainer, tmp_path):
    final = fit(federated_trainer, tmp_path, Federation(method, seed=3, steps=[TopK(0.5)]))
    for round in range(3):
        recorded, repeated = replay_round(tmp_path, round, Federation(method, steps=[TopK(0.5)]))
        assert_same(repeated, recorded)
    assert_same(recorded, final)


def test_a_round_without_a_client_equals_a_fit_without_the_client(federated_trainer, tmp_path):
    fit(federated_trainer, tmp_path / "all", Federation(seed=3), rounds=1)
    others = {client: data for client, data in DATA.items() if client != "bob"}
    expected = fit(federated_trainer, tmp_path / "two", Federation(seed=3), others, rounds=1)
    _, repeated = replay_round(tmp_path / "all", 0, Federation(), ["bob"])
    assert_same(repeated, expected)


def test_other_steps_and_hidden_updates_are_refused(federated_trainer, tmp_path):
    hidden = [MaxSamples(40), SecureSum(5.0)]
    fit(federated_trainer, tmp_path / "plain", Federation(seed=3), rounds=1)
    fit(federated_trainer, tmp_path / "hidden", Federation(seed=3, steps=hidden), rounds=1)
    for run, steps in (("plain", [TopK(0.5)]), ("hidden", hidden)):
        with pytest.raises(OptionError, match="use the run's recipe"):
            replay_round(tmp_path / run, 0, Federation(steps=steps))


def test_the_oldest_rounds_are_deleted_but_for_their_records(federated_trainer, tmp_path):
    fit(federated_trainer, tmp_path / "all", Federation(seed=3), rounds=1)
    size = sum(file.stat().st_size for file in (tmp_path / "all").rglob("*.ckpt"))
    fit(federated_trainer, tmp_path / "kept", Federation(seed=3), max_bytes=int(2.5 * size), rounds=4)
    assert {path.parent.name for path in (tmp_path / "kept").rglob("*.ckpt")} == {"round-000002", "round-000003"}
    assert [record["round"] for record in records_of(tmp_path / "kept")] == [0, 1, 2, 3]
    with pytest.raises(FileNotFoundError, match="complete round"):
        replay_round(tmp_path / "kept", 1, Federation())


class Validated(L.Callback):
    """Validation losses by round, from the validation step."""

    def __init__(self):
        self.losses = {}

    def on_validation_end(self, trainer, pl_module):
        self.losses[trainer.current_epoch] = float(trainer.callback_metrics["val_loss"])


def test_a_record_has_the_epsilon_and_evaluation_of_its_round(federated_trainer, tmp_path):
    pytest.importorskip("dp_accounting")
    validated, step = Validated(), CentralDP(0.5, 1e-3, noise_multiplier=0.5)
    budget = Budget(noise_multiplier=0.5, delta=1e-3, population=len(DATA), cohort=2)
    fit(
        federated_trainer, tmp_path, Federation(seed=3, steps=[step], clients_per_round=2), rounds=4,
        callbacks=[validated], val=models.as_datasets(DATA)["ann"], check_val_every_n_epoch=2,
    )  # fmt: skip
    records = records_of(tmp_path)
    assert [record["last_validation"] for record in records] == [None, 1, 1, 3]
    for record in records:
        assert record["metrics"].get("val_loss") == validated.losses.get(record["last_validation"])
        assert record["metrics"]["privacy/epsilon"] == pytest.approx(budget.epsilon(record["round"] + 1))
    assert "noise_multiplier=0.5" in records[0]["steps"]["CentralDP:0"]


class Fails(FederatedCallback):
    """The client bob fails in the second round."""

    def on_client_start(self, trainer, module, client, broadcast):
        if (trainer.current_epoch, client) == (1, "bob"):
            raise ClientFault("no data")


def test_a_record_describes_rule_clients_and_digests(federated_trainer, tmp_path):
    fit(federated_trainer, tmp_path, Federation("fedprox:mu=0.25", seed=3), callbacks=[Fails()])
    records = records_of(tmp_path)
    for number, record in enumerate(records):
        content, updates = load_round(tmp_path, number)
        assert record["digests"] == {"start": digest(content["start"]), "model": digest(content["model"])}
        assert [client for client, _ in record["answers"]] == [update.client for update in updates]
        assert record["callbacks"] == ["ProximalTerm(mu=0.25)"]
        assert record["versions"]["torch"] == torch.__version__.partition("+")[0]
    assert [sorted(record["received"]) for record in records] == [sorted(DATA), ["ann", "cid"], sorted(DATA)]
    assert records[1]["failed"] == [["bob", "no data"]]
    assert [record["digests"]["start"] for record in records[1:]] == [one["digests"]["model"] for one in records[:-1]]
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    participants = json.loads(write_certificate(tmp_path, key))["participants"]
    assert sorted(participants) == [["ann", 3, 0], ["bob", 2, 1], ["cid", 3, 0]]


def test_the_commands_name_every_changed_bit(federated_trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit(federated_trainer, tmp_path / "run", Federation(seed=3), rounds=2)
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    Path("key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    Path("key.pub").write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    main(["replay", "run", "2"])
    assert "equal" in capsys.readouterr().out
    main(["replay", "run", "2", "--without", "bob", "--rule", "krum"])
    assert "different, distance" in capsys.readouterr().out
    main(["certify", "run", "--key", "key"])
    main(["certify", "run", "--check", "key.pub"])
    assert "nothing has changed" in capsys.readouterr().out
    content = json.loads(Path("certificate.json").read_text())
    assert [sorted(one["received"]) for one in content["rounds"]] == 2 * [["ann", "bob", "cid"]]
    assert content["rounds"][0]["method"] == "FedAvg"
    generator = torch.Generator().manual_seed(0)
    for file in sorted(Path("run").rglob("round-*/*")):
        data = file.read_bytes()
        for place in torch.randint(8 * len(data), (5,), generator=generator).tolist():
            changed = bytearray(data)
            changed[place // 8] ^= 1 << place % 8
            file.write_bytes(changed)
            assert find_changes(Path("run"), Path("certificate.json").read_text(), key.public_key()) == [
                str(file.relative_to("run"))
            ]
        file.write_bytes(data)
    text = Path("certificate.json").read_text()
    for place in torch.randint(len(text), (50,), generator=generator).tolist():
        changed = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        assert find_changes(Path("run"), changed, key.public_key()) == ["the certificate itself"]
    assert write_certificate(Path("run"), key) == text
    next(Path("run").rglob("000001.ckpt")).unlink()
    with pytest.raises(SystemExit):
        main(["certify", "run", "--check", "key.pub"])
    assert "changed: round-00000" in capsys.readouterr().out
