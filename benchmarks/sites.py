"""Small version of the recipe for CamVid's drives: best model by client validation data, and tables by client.

The script trains once with `recipes/camvid_sites.yaml`, with fewer and smaller frames and less patience.
"""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

from common import load_json, machine, parser, prepare, save_json, version, write_section

from lightning_fed.callbacks import ClientEvaluation, SiteMatrix
from lightning_fed.callbacks.evaluation.tables import client_table
from lightning_fed.recipe import FederatedCLI

RECIPE = Path(__file__).parents[1] / "recipes" / "camvid_sites.yaml"
SMALLER = ("--data.source.image_size", "[64,96]", "--data.source.train_size", "120")
PATIENCE = 3


def run(data: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """Trains, and evaluates the best model again; returns tables and scores."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["--data.source.data_dir", str(data.resolve()), *SMALLER, "--trainer.max_rounds", str(rounds)]
    options += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    with chdir(folder):
        cli = FederatedCLI(["-c", str(RECIPE), *options], run=False)
        trainer: Any = cli.trainer
        trainer.early_stopping_callback.patience = PATIENCE
        trainer.fit(cli.model, datamodule=cli.datamodule)
        evaluation = next(callback for callback in trainer.callbacks if isinstance(callback, ClientEvaluation))
        matrix = next(callback for callback in trainer.callbacks if isinstance(callback, SiteMatrix))
        best, rounds = trainer.checkpoint_callback, trainer.current_epoch
        sites = matrix.table.markdown()
        trainer.validate(cli.model, datamodule=cli.datamodule, ckpt_path=best.best_model_path, verbose=False)
        clients = client_table(evaluation.results, evaluation.pooled, with_support=False).markdown()
    epoch = int(Path(best.best_model_path).stem.split("=")[1].partition("-")[0])
    score = float(best.best_model_score)
    return {"clients": clients, "sites": sites, "rounds": rounds, "best": epoch, "score": score, "version": version()}


def report(result: dict[str, Any], threads: int, rounds: int) -> str:
    if result["rounds"] < rounds:
        end = (
            f"Early stopping ended the fit after round {result['rounds']} of {rounds}, as {PATIENCE} rounds in a row"
            " had no higher IoU."
        )
    else:
        end = f"Trained for {rounds} rounds."
    return "\n\n".join(
        [
            f"`python benchmarks/sites.py --data DATA --rounds {rounds}`. 120 frames of 64 x 96 pixels, DeepLabV3+ from"
            f" scratch, one seed; {machine(threads)}. {end} The best model is that after round {result['best'] + 1},"
            f" with a mean IoU of {result['score']:.3f} over all drives' frames:",
            result["clients"],
            "Models of the last round by drives:",
            result["sites"],
        ]
    )


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--rounds", type=int, default=60, help="rounds, where none ends early")
    made.add_argument("--figure", type=Path, default=None, help="where the matrix goes as a picture")
    arguments = made.parse_args()
    prepare(arguments)
    rounds = 1 if arguments.quick else arguments.rounds
    folder = arguments.runs / "sites"
    result = load_json(folder / "result.json")
    if result is None:
        result = run(arguments.data, rounds, folder)
        save_json(folder / "result.json", result)
    write_section(arguments.out, "sites", report(result, arguments.threads, rounds))
    if arguments.figure is not None:
        shutil.copy(folder / "runs" / "camvid_sites" / "sites.png", arguments.figure)


if __name__ == "__main__":
    main()
