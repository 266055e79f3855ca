"""Real packages in a separate environment, plain and federated: ``make test-projects``.

Each package is installed separately; packages that fail to install are named and skipped. Each script in this folder
runs unchanged and with both changes below, in one process per script.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tests.projects.changes import changed_lines, federate, with_callback, with_trainer

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
RESULT = "RESULT "
IID = "fed.data.IID(3)"


@dataclass
class Project:
    """A script, the required packages, and the changes to a federated script.

    Args:
        packages: Packages for pip; the table shows the version of the first package.
        about: Description of the project.
        score: Logged value that must fall.
        trainer: Change to a ``FederatedTrainer`` for :func:`tests.projects.changes.federate`; empty if the package
            creates the Trainer.
        callback: Change to a Trainer with the callback.
    """

    packages: tuple[str, ...]
    about: str
    score: str
    trainer: str
    callback: str


REGIONS = "[load(dataset, RandomGeoSampler(dataset, 32, 32, roi=scene)) for scene in dataset.index.geometry]"
SERIES = "fed.data.ByGroup(lambda sample: int(sample[0]['groups'][0]) % 3)"

PROJECTS = {
    "torchgeo_samplers": Project(
        ("torchgeo",),
        "segmentation of raster files with a geographic sampler; a scene is a client",
        "val_loss",
        f"""
-    train = load(dataset, RandomGeoSampler(dataset, 32, 64))
+    train = {REGIONS}
-    trainer = pl.Trainer(max_epochs=2, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(max_rounds=2, callbacks=callbacks, **options)
""",
        with_callback(
            "    pl.seed_everything(0)",
            "",
            "-    trainer.fit(task, train, val)",
            f"+    scenes = {REGIONS}",
            "+    trainer.fit(task, scenes, val)",
        ),
    ),
    "lightly_moco": Project(
        ("lightly",),
        "self-supervision with MoCo: a momentum encoder and a memory bank",
        "train_loss",
        with_trainer(4, "partition=fed.data.Dirichlet(3, 1.0)"),
        with_callback(
            "    L.seed_everything(1)",
            "partition=fed.data.Dirichlet(3, 1.0)",
        ),
    ),
    "pytorch_forecasting_tft": Project(
        ("pytorch-forecasting",),
        "a temporal fusion transformer; series are grouped into clients",
        "val_loss",
        f"""
-    trainer = pl.Trainer(max_epochs=2, gradient_clip_val=0.1, callbacks=callbacks, **options)
+    regions = {SERIES}
+    trainer = fed.FederatedTrainer(
+        partition=regions, max_rounds=2, gradient_clip_val=0.1, callbacks=callbacks, **options)
""",
        with_callback(
            "    pl.seed_everything(42)",
            f"partition={SERIES}",
        ),
    ),
    "torch_geometric_graphs": Project(
        ("torch-geometric",),
        "classification of graphs, with its datamodule; labels from `Data.y`",
        "val_loss",
        with_trainer(4, "partition=fed.data.Dirichlet(3, 5.0)"),
        with_callback("    L.seed_everything(12)", "partition=fed.data.Dirichlet(3, 5.0)"),
    ),
    "monai_segmentation": Project(
        ("monai",),
        "a 3D U-Net on crops of cached volumes, sliding windows in validation",
        "val_loss",
        with_trainer(3, f"partition={IID}", "pl"),
        with_callback("    pl.seed_everything(0)", f"partition={IID}"),
    ),
    "peft_lora": Project(
        ("transformers", "peft", "datasets"),
        "LoRA of a text classifier; a column of the table names the clients",
        "val_loss",
        """
-    trainer = L.Trainer(max_epochs=3, callbacks=callbacks, **options)
+    trainer = fed.FederatedTrainer(
+        max_rounds=3, partition=fed.data.ByGroup("reviewer"), callbacks=callbacks, **options)
""",
        with_callback(
            "    L.seed_everything(1)",
            'partition=fed.data.ByGroup("reviewer")',
        ),
    ),
    "anomalib_ganomaly": Project(
        ("anomalib",),
        "anomaly detection with GANomaly; its engine makes the Trainer",
        "generator_loss_epoch",
        "",
        with_callback("    pl.seed_everything(5)", f"partition={IID}"),
    ),
    "uq_box_ensemble": Project(
        ("lightning-uq-box",),
        "regression with its variance, a loss that changes after some epochs",
        "valRMSE",
        with_trainer(6, "partition=fed.data.Dirichlet(3, 5.0)", "pl"),
        with_callback("    pl.seed_everything(0)", "partition=fed.data.Dirichlet(3, 5.0)"),
    ),
    "diffusers_ddpm": Project(
        ("diffusers",),
        "a diffusion model; the module brings its data",
        "train_loss",
        with_trainer(3, f"partition={IID}"),
        with_callback("    L.seed_everything(0)", f"partition={IID}"),
    ),
    "wandb_offline": Project(
        ("wandb",),
        "Weights & Biases without a connection: curves by epoch, histograms of the gradients",
        "val_loss",
        f"""
-    trainer = L.Trainer(max_epochs=4, log_every_n_steps=4, logger=[board, logger], callbacks=callbacks, **options)
+    options |= {{"log_every_n_steps": 4, "logger": [board, logger], "callbacks": callbacks}}
+    trainer = fed.FederatedTrainer(max_rounds=4, partition={IID}, **options)
""",
        with_callback("    L.seed_everything(9)", f"partition={IID}"),
    ),
    "hydra_instantiate": Project(
        ("hydra-core",),
        "the template's module, datamodule and Trainer from a configuration",
        "val/loss",
        """
-_target_: lightning.pytorch.Trainer
+_target_: lightning_fed.FederatedTrainer
+partition: {_target_: lightning_fed.data.IID, num_clients: 3}
""",
        with_callback("    L.seed_everything(cfg.seed)", f"partition={IID}"),
    ),
}


def install(packages):
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.strip() and "WARNING" not in line]
    return "" if done.returncode == 0 else (lines or ["pip failed"])[-1]


def run_main(source, name, *callbacks):
    from tests.recorders import MemoryLogger

    path = Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"{name}_{path.parent.name}", path)
    script = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    logger = MemoryLogger()
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = script.main(
        callbacks=list(callbacks), accelerator="cpu", logger=logger, default_root_dir=str(path.parent), **quiet
    )
    return trainer, logger


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def try_project(name):
    """Runs the three forms of a project; returns the results for :func:`table`."""
    import torch

    from tests.recorders import state_of

    warnings.simplefilter("ignore")  # warnings of the packages
    project, said = PROJECTS[name], Warnings()
    logging.getLogger("lightning_fed").addHandler(said)
    source = (FOLDER / f"{name}.py").read_text()
    forms = {"plain": source}
    for way in ("trainer", "callback"):
        if getattr(project, way):
            forms[way] = federate(source, getattr(project, way))
    result, states = {"version": importlib.metadata.version(project.packages[0])}, {}
    for way, script in forms.items():
        started = time.perf_counter()
        trainer, logger = run_main(script, name)
        curve = [float(value) for _, value in logger.curve(project.score)]
        result[way] = {
            "first": curve[0], "last": curve[-1], "seconds": time.perf_counter() - started,
            "lines": len(changed_lines(source, script)),
            "clients": sorted({float(value) for _, value in logger.curve("fed/clients")}),
        }  # fmt: skip
        states[way] = state_of(trainer.lightning_module)
    if "trainer" in states:
        first, second = states["trainer"], states["callback"]
        result["same"] = all(torch.equal(first[key], second[key]) for key in first) and first.keys() == second.keys()
    return result | {"warnings": said.lines}


def run_project(name):
    command = [sys.executable, "-m", "tests.projects.packages", "--only", name, "--here"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT, env=environment
        )
    except subprocess.TimeoutExpired:
        return {"error": "took more than ten minutes"}
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return json.loads(line.removeprefix(RESULT))
    lines = [line for line in done.stderr.splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return {"error": (lines or done.stderr.splitlines() or ["no output"])[-1]}


def verdict(result):
    if "error" in result:
        return result["error"]
    ways = [result[way] for way in ("plain", "trainer", "callback") if way in result]
    faults = []
    if any(way["last"] >= way["first"] for way in ways):
        faults.append("the score does not fall")
    if not result.get("same", True):
        faults.append("the two ways give other weights")
    if any(way["lines"] > 5 for way in ways):
        faults.append("more than five lines")
    if any(len(way["clients"]) != 1 for way in ways[1:]):
        faults.append("clients are missing in some rounds")
    return ", ".join(faults)


def shorten(warning):
    carried = re.search(r"visits changed these attributes of \w+: (.*?)\. Their", warning)
    text = f"the log names what passes between visits: {carried[1]}" if carried else warning
    return text.replace("|", "/")


def table(results):
    lines = [
        "| package | project | changed lines: Trainer, callback | plain | federated | remarks |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        project = PROJECTS[name]
        packages = ", ".join(project.packages)
        if "version" not in result:
            fault = verdict(result).replace("|", "/")
            lines.append(f"| {packages} | {project.about} | | | | {fault} |")
            continue
        ways = [result.get(way) for way in ("trainer", "callback")]
        counts = ", ".join(str(way["lines"]) if way else "none" for way in ways)
        plain, federated = (f"{way['first']:.3g} to {way['last']:.3g}" for way in (result["plain"], ways[0] or ways[1]))
        note = verdict(result) or "; ".join(dict.fromkeys(map(shorten, result["warnings"])))
        lines.append(
            f"| {packages} {result['version']} | {project.about} | {counts} | {plain} | {federated} | {note} |"
        )
    return "\n".join(lines)


def write_table(page, text):
    begin, end = "<!-- projects -->", "<!-- /projects -->"
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main():
    parser = argparse.ArgumentParser(description="Tries real packages, plain and federated.")
    parser.add_argument("--only", nargs="+", choices=PROJECTS, default=list(PROJECTS), help="these projects")
    parser.add_argument("--installed", action="store_true", help="install nothing")
    parser.add_argument("--here", action="store_true", help="run one project in this process, without installing")
    parser.add_argument("--out", type=Path, help="page in which the table is written between its marks")
    arguments = parser.parse_args()
    if arguments.here:
        print(RESULT + json.dumps(try_project(arguments.only[0])))
        return
    results = {}
    for name in arguments.only:
        fault = "" if arguments.installed else install(PROJECTS[name].packages)
        results[name] = {"error": f"skipped, does not install: {fault}"} if fault else run_project(name)
        print(f"{name}: {verdict(results[name]) or 'passed'}", flush=True)
    text = table(results)
    print(text)
    if arguments.out is not None:
        date = f"{datetime.now():%B %Y}"
        write_table(arguments.out, f"{date}, Python {sys.version.split()[0]}, {versions()}.\n\n{text}")
    if any(verdict(result) and "skipped" not in verdict(result) for result in results.values()):
        sys.exit(1)


def versions():
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "lightning"))


if __name__ == "__main__":
    main()
