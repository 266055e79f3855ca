"""BatchNorm statistics on a network with a process per site, as on NVFLARE."""

import itertools
import logging
import re

import pytest

from lightning_fed import Federation
from lightning_fed.backends.wire.runner import ClientRunner
from lightning_fed.backends.wire.server import ServerRunner
from lightning_fed.backends.wire.transport import Transport
from lightning_fed.callbacks import ClientEvaluation
from tests import models
from tests.backends.flower.halves import OPTIONS, clients_of, in_process, norm_module
from tests.breadth import slow
from tests.recorders import assert_same, state_of

SIZES = {"site-1": 33, "site-2": 20, "site-3": 16}
ROUNDS = 2


class Sites(Transport):
    """A process per site; the second site starts again before each message."""

    def __init__(self, folder, data, make_federation):
        super().__init__(60.0)
        self.folder, self.data, self.make_federation = folder, data, make_federation
        self.runners, self.answers, self.names = {}, {}, itertools.count()

    def runner(self, site):
        if site not in self.runners or site == "site-2":
            data = clients_of({site: self.data[site]}, held_out=held_out({site: self.data[site]}))
            self.runners[site] = ClientRunner(
                self.make_federation(), norm_module, lambda node: data, OPTIONS, callbacks=[ClientEvaluation()],
                store=self.folder / site,
            )  # fmt: skip
        return self.runners[site]

    def await_clients(self, expected, patience):
        return expected

    def connection(self, client):
        return client

    def push(self, client, kind, packet, round):
        name = str(next(self.names))
        self.answers[name] = self.runner(client).answer(kind, packet, {"site": client})
        return name

    def pull(self, name):
        return self.answers.pop(name)


def held_out(data):
    return models.as_datasets(data)


def values(trainer):
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name.startswith(("fed/val", "client/", "fed/batch_norm"))
    }


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize(("offset", "decision"), [slow((0.0, "pooled")), (20.0, "own")])
def test_sites_have_the_statistics_of_one_process(offset, decision, federated_trainer, tmp_path, caplog):
    """The server writes a report, and each site logs each visit."""
    data = {
        site: (inputs + offset * place, targets)
        for place, (site, (inputs, targets)) in enumerate(models.vectors(SIZES).items())
    }
    module, trainer = in_process(
        federated_trainer, norm_module, data, Federation(seed=3), ROUNDS, [ClientEvaluation()], held_out(data)
    )
    server = ServerRunner(
        Federation(seed=3), norm_module, None, {**OPTIONS, "max_epochs": ROUNDS}, clients=list(data),
        folder=tmp_path / "server", callbacks=[ClientEvaluation()],
    )  # fmt: skip
    with caplog.at_level(logging.INFO, "lightning_fed"):
        remote = server.run(Sites(tmp_path, data, lambda: Federation(seed=3)))
    decisions = {fitted.callbacks[0].batch_norm_decision for fitted in (trainer, remote)}
    assert decisions == {decision}
    assert_same(state_of(remote.lightning_module), state_of(module))
    assert len(values(trainer)) >= 8
    assert values(remote) == pytest.approx(values(trainer), rel=1e-5)
    pattern = r"Round (\d): client '(.+)' trained on (\d+) examples in [\d.]+ s\. The answer has \d"
    visits = [(str(round), site, str(size)) for round in range(1, ROUNDS + 1) for site, size in SIZES.items()]
    assert re.findall(pattern, caplog.text) == visits
    page = (tmp_path / "server" / "report.html").read_text()
    assert f"<td>{ROUNDS} of {ROUNDS}</td>" in page
    scores = [value for name, value in values(remote).items() if re.fullmatch(r"client/.+/val_acc", name)]
    assert len(scores) == len(SIZES)
    assert all(f'<td data-value="{score}">' in page for score in scores)
