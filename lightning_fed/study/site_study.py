"""Study of sites on other machines. Each model is trained in a separate fit."""

from __future__ import annotations

import json
import logging
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import lightning as L
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.argument_checks import check_count, check_option
from lightning_fed.atomic_files import write_text_atomically
from lightning_fed.callbacks.evaluation.client_evaluation import loaders_of
from lightning_fed.callbacks.evaluation.data_pass import Stage
from lightning_fed.callbacks.evaluation.results import is_score
from lightning_fed.callbacks.evaluation.tables import row_name
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.errors import BadUpdate, ClientFault
from lightning_fed.federated_callback import AskableCallback
from lightning_fed.messages import Client, ClientUpdate
from lightning_fed.privacy.masked_sums import FEWEST, decode, encode, to_numbers, to_words
from lightning_fed.study.answers import LOCAL, Answer, Kind, answer_site, estimate
from lightning_fed.study.report import Study, describe, write_study
from lightning_fed.study.site_scores import check_rounds, score_site
from lightning_fed.study.statistics import effect_sums, tau_squared_of_sums

_log = logging.getLogger(__name__)

_LENGTHS: dict[str, int] = {"scores": 6, "areas": 10, "replicates": 9}  # sums for a pair, by kind of score

_SUM = "study/sum"

_NAME = re.compile(r"[\w.:=+\-]{1,100}")


class SiteStudy(AskableCallback):
    """Compares models at sites on other machines. Each model is trained in a separate fit per seed.

    Add this callback to server and sites. After each fit, every site scores the model on each case (example), and sends
    only sums over cases. The scores stay in ``folder/sites``.

    One model is the baseline ``"local"``: with ``personal=["*"]``, each site trains and keeps a separate model. After
    fits of ``"local"`` and another model, the server writes a report (see :func:`write_study`). By default, the report
    shows each site's gain: a model's score minus the score of ``"local"``. The primary comparison is between
    ``"local"`` and the first other model. Every site writes a table with the site's gain, ``sites/<client>.md``.

    With a secure sum, the study needs at least five sites, and the report shows only the mean gain over sites. With
    central privacy, the server writes no report.

    Args:
        model: Name of the trained model, equal on server and sites: ``"local"``, or a name such as ``"fedavg"``.
        metric: Name of a logged value: ``"test_acc"``, or ``"val_acc"`` for validation data.
        folder: Folder for the study's files, the same in all fits.
        stage: ``"test"`` or ``"validation"``.
        patient: Key for patient names in a dictionary batch; ``None`` if all cases are independent.
        min_support: A site with fewer cases sends no sums; see :func:`answer_site`. Each site may choose another value.

    Raises:
        MisconfigurationException: In ``fit``, with several processes, ``EarlyStopping`` on the server, or fewer than
            five sites and a secure sum. Also if metric, stage or number of rounds differ from earlier fits.

    Example:
        >>> study = SiteStudy("fedavg", "test_acc", "runs/study")
    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(
        self,
        model: str,
        metric: str,
        folder: str | os.PathLike[str],
        stage: Stage = "test",
        patient: str | None = None,
        min_support: int = 10,
    ) -> None:
        check_option("stage", stage, get_args(Stage))
        if not _NAME.fullmatch(model):
            raise ValueError(f"Expected `model` to have letters, digits and `.:=+-_` only, but got {model!r}.")
        self.model, self.metric, self.stage, self.patient = model, metric, stage, patient
        self.min_support = check_count("min_support", min_support, lowest=2)
        self.folder = Path(folder).expanduser()

    # The server

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Stores the study's settings and primary method before training, so that results cannot affect these."""
        federation = find_federation(trainer)
        if not federation.has_server:
            return  # at a site a visit may have several processes, and a question has one
        check_rounds(trainer)
        sites = len(federation.population.clients)
        if federation.server.chain.reveals == "sum" and sites < FEWEST:
            raise MisconfigurationException(
                f"Expected at least {FEWEST} sites in a study with a secure sum, but got"
                f" {sites}. From the sums over fewer sites, the server could compute each site's gain (difference from"
                " the local model's score). Remove the secure sum if the server may know the gains, or use `CentralDP`:"
                " then the sites send no sums, and each site only writes a table with the site's own gain."
            )
        schedule = federation.schedule
        plan = {"metric": self.metric, "stage": self.stage, "rounds": trainer.max_epochs}
        plan |= {"local_epochs": schedule.local_epochs, "local_steps": schedule.local_steps}
        content = {"plan": plan, "models": {}} | _read(self._runs)
        if different := [name for name, value in plan.items() if value != content["plan"][name]]:
            raise MisconfigurationException(
                f"Expected equal {', '.join(different)} in all fits of a study, but this fit has {plan}, and an earlier"
                f" fit in the same `folder` had {content['plan']}: choose another `folder` for another study."
            )
        content["models"].setdefault(self.model, {})
        write_text_atomically(self._runs, json.dumps(content))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        if not federation.has_server or trainer.current_epoch < (trainer.max_epochs or 0):
            return
        seed, content = federation.schedule.seed, _read(self._runs)
        sent = [float(trainer.callback_metrics.get(f"comm/total_{way}_bytes", 0)) for way in ("up", "down")]
        content["models"][self.model][str(seed)] = sum(sent) / 1e6
        write_text_atomically(self._runs, json.dumps(content))
        megabytes = {model: by_seed for model, by_seed in content["models"].items() if by_seed}
        models = sorted(megabytes, key=lambda model: model == LOCAL)
        shared = [one for one in megabytes[models[0]] if all(one in by_seed for by_seed in megabytes.values())]
        seeds = sorted(map(int, shared))
        question = {"metric": self.metric, "model": self.model, "seed": seed, "models": models, "seeds": seeds}
        with federation.averages_in_place():
            answers = federation.ask(pl_module, self, federation.population.clients, question, own=True)
        kinds, sums, totals = dict[str, Kind](), dict[str, Answer](), dict[str, list[float]]()
        for client, update in answers.updates.items():
            try:
                kinds[row_name(client)], sums[row_name(client)] = _read_sums(update, models, seeds)
            except BadUpdate as error:
                _log.warning("The study excludes the answer of client %r: %s.", client, error)
        missing, reveals = "", federation.server.chain.reveals
        if reveals == "model":
            missing = "central privacy hides the scores of single sites; a table of a site's gain is only at the site"
        elif not seeds or len(models) < 2 or models[-1] != LOCAL:
            missing = f"a table needs {LOCAL!r} and another model with an equal seed, but the study has {models}"
        elif reveals == "sum":
            totals = self._sum_sites(federation, pl_module, list(answers.updates), question)
            kinds, sums = {}, {}
        if missing or not (sums or totals):
            _log.info("The study has no table yet: %s.", missing or "no site answered")
            return
        means = {model: sum(by_seed.values()) / len(by_seed) for model, by_seed in megabytes.items()}
        study = Study(self.metric, is_score(self.metric), models, seeds, self.min_support, kinds, sums, means, totals)
        _log.info("%s", write_study(study, self.folder))

    def _sum_sites(
        self,
        federation: Federation,
        module: L.LightningModule,
        clients: Sequence[Client],
        question: Mapping[str, Any],
    ) -> dict[str, list[float]]:
        methods, width = question["models"][:-1], 6
        tau_squared = [0.0] * len(methods)
        for is_last in (False, True):
            asked = {**question, "sum": _name_sum(question), "tau_squared": tau_squared}
            updates = list(federation.ask(module, self, clients, asked).updates.values())
            clients = [member for update in updates for member in update.clients]
            if len(clients) < FEWEST:
                _log.warning(
                    "The study has no secure sum of the sites' gains (score minus the local model's score): %d sites "
                    "answered, but at least %d are needed.",
                    len(clients),
                    FEWEST,
                )
                return {}
            numbers = np.sum([to_numbers(next(iter(update.extras.values()))) for update in updates], axis=0)
            total = decode(to_words(numbers))
            if len(total) != width * len(methods) or min(total[::width]) <= 0:
                _log.warning(
                    "The study ignores the secure sum of the sites' gains (score minus the local model's score), "
                    "because a site sent invalid numbers."
                )
                return {}
            found = np.reshape(np.asarray(total), (-1, width))
            tau_squared = tau_squared_of_sums(found[:, :4], len(clients)).tolist()
            if is_last or not any(tau_squared):
                break
        found[:, 4:] /= len(clients)
        return {method: [len(clients), *row] for method, row in zip(methods, found.tolist(), strict=True)}

    @property
    def _runs(self) -> Path:
        return self.folder / "runs.json"

    # A site

    def on_client_question(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, question: Mapping[str, Any]
    ) -> ClientUpdate:
        model, seed, models, seeds = self._read_question(question)
        federation = find_federation(trainer)
        if (model, seed) != (self.model, federation.schedule.seed):
            raise ClientFault(f"the request is for another model or seed than the client's program ({self.model!r})")
        reveals = federation.server.chain.reveals
        loaders = loaders_of(trainer, self.stage)
        if client not in loaders:
            raise ClientFault(f"the client has no {self.stage} data")
        path = self.folder / "sites" / f"{urllib.parse.quote(row_name(client), safe='')}.json"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        settings = [self.metric, self.stage, self.patient, reveals]
        content = {"settings": settings, "runs": {}} | _read(path)
        if content["settings"] != settings:
            raise ClientFault(
                "the client's earlier fits in this `folder` had another metric, stage, patient key or privacy step"
                " (secure sum, central privacy): use equal settings, or another `folder` for another study"
            )
        runs = content["runs"]
        if "sum" in question:
            if reveals != "sum":
                raise ClientFault("the client's federation has no secure sum")
            _check_sum(content, question)
            write_text_atomically(path, json.dumps(content))
            return self._answer_sum(client, _compared(runs, models, seeds), question)
        found = score_site(trainer, module, client, loaders[client], self.metric, self.stage, self.patient, 1.0)
        runs.setdefault(model, {})[str(seed)] = found
        write_text_atomically(path, json.dumps(content))
        compared = _compared(runs, models, seeds)
        if not seeds or len(models) < 2:
            return ClientUpdate(client, 1, {})
        try:
            kind, answer = answer_site(compared, 2)
            sent = answer_site(compared, self.min_support)[1]
        except MisconfigurationException as error:  # the texts have no data
            raise ClientFault(str(error)) from error
        if models[-1] == LOCAL:
            name = row_name(client)
            study = Study(self.metric, is_score(self.metric), models, seeds, 2, {name: kind}, {name: answer}, {})
            write_text_atomically(path.with_suffix(".md"), f"{describe(study)}\n")
        if reveals != "update":
            return ClientUpdate(client, 1, {})
        extras = {
            f"study/{kind}/{pair}/{part}": torch.tensor(numbers, dtype=torch.float64)
            for pair, parts in sent.items()
            for part, numbers in parts.items()
        }
        return ClientUpdate(client, 1, {}, extras)

    def _answer_sum(
        self, client: Client, compared: Mapping[str, Mapping[int, Any]], question: Mapping[str, Any]
    ) -> ClientUpdate:
        *methods, baseline = compared
        kind, answer = answer_site(compared, self.min_support)
        if not answer:
            raise ClientFault(f"the client has fewer cases than `min_support` ({self.min_support})")
        terms: list[float] = []
        for method, tau_squared in zip(methods, question["tau_squared"], strict=True):
            gain, _, values = estimate(kind, answer[f"{method}|{baseline}"]["all"])
            if not gain.variance > 0:
                raise ClientFault(
                    f"the site sends no sum, because the variance of the gain of {method!r} over the local model is 0"
                    " or unknown: all cases may have the same difference, or the site may have too few cases"
                )
            terms += [*effect_sums(gain.value, gain.variance, tau_squared).tolist(), *values]
        return ClientUpdate(client, 1, {}, {_SUM: encode(terms)})

    def _read_question(self, question: Mapping[str, Any]) -> tuple[str, int, list[str], list[int]]:
        model, seed, models, seeds = (question.get(name) for name in ("model", "seed", "models", "seeds"))
        if question.get("metric") != self.metric:
            raise ClientFault(f"the client's program has the metric {self.metric!r} instead of the server's metric")
        if not isinstance(models, list) or not isinstance(seeds, list):
            raise ClientFault("the server's request lacks the lists `models` and `seeds` of a study")
        if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in (model, *models)):
            raise ClientFault("the request has an invalid model name")
        if not all(type(number) is int for number in (seed, *seeds)):
            raise ClientFault("the request has an invalid seed")
        return str(model), int(seed or 0), models, seeds


def _compared(runs: Mapping[str, Any], models: Sequence[str], seeds: Sequence[int]) -> dict[str, dict[int, Any]]:
    if any(str(one) not in runs.get(other, {}) for other in models for one in seeds):
        raise ClientFault("the client has no scores from an earlier fit of this study: repeat that fit")
    return {other: {one: runs[other][str(one)] for one in seeds} for other in models}


def _check_sum(content: dict[str, Any], question: Mapping[str, Any]) -> None:
    # Sums with many values would reveal the terms of single sites.
    models, seeds = question["models"], question["seeds"]
    if models[-1:] != [LOCAL] or len({*models}) < len(models) or seeds != sorted({*seeds}):
        raise ClientFault("the request must list each model once, 'local' last, and each seed once, in order")
    name, tau_squared = _name_sum(question), dict(zip(models, question["tau_squared"], strict=False))
    if question["sum"] != name:
        raise ClientFault("the server's request is inconsistent: the sum is over another metric or other seeds")
    if any(tau_squared.values()):
        used = content.setdefault("tau_squared", {}).setdefault(name, {})
        if used | tau_squared != tau_squared | used or not all(value >= 0 for value in tau_squared.values()):
            raise ClientFault(
                "the server's request has an invalid variance between sites, or another variance between sites than an"
                " earlier request. From sums for several variances, the server could compute this site's gain (score"
                " minus the local model's score): repeat the fits with another seed"
            )
        used |= tau_squared


def _name_sum(question: Mapping[str, Any]) -> str:
    # Without the models, because the difference between a method's sums over two sets of sites would reveal a site.
    return json.dumps([question[name] for name in ("metric", "seeds")])


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return content


def _read_sums(update: ClientUpdate, models: Sequence[str], seeds: Sequence[int]) -> tuple[Kind, Answer]:
    """Reads the result of :func:`answer_site` from a site's update. An empty answer means too few cases."""
    answer: Answer = {f"{one}|{two}": {} for one, two in combinations(models, 2)}
    parts = ["all", *map(str, seeds)]
    if not update.extras:
        return "scores", {}
    kind: Any = next(iter(update.extras)).split("/")[1:2]
    length = _LENGTHS.get("".join(kind), 0)
    names = {f"study/{''.join(kind)}/{pair}/{part}": (pair, part) for pair in answer for part in parts}
    if update.extras.keys() != names.keys():
        raise BadUpdate(
            "the site's answer has other names than expected. A name is `study/KIND/FIRST|SECOND/SEED`, where KIND is"
            f" scores, areas or replicates, FIRST and SECOND are two of the models {list(models)}, and SEED is one of"
            f" {parts} (`all`: mean over the seeds)"
        )
    for name, (pair, part) in names.items():
        value = update.extras[name]
        if value.shape != (length,) or value.dtype != torch.float64 or not 1 <= float(value[0]) < 2**53:
            raise BadUpdate(
                f"the site's answer has an invalid {name!r}: expected a float64 tensor with {length} numbers, the first"
                " at least 1 (a number of cases)"
            )
        answer[pair][part] = value.tolist()
    return kind[0], answer
