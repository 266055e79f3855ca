"""The server of the case that the run's configuration names."""

from flwr.serverapp import ServerApp

from lightning_fed.backends.flower import server_app
from tests.backends.flower.halves import CASES, OPTIONS, SIZES

app = ServerApp()


@app.main()
def main(grid, context):
    config, case = context.run_config, CASES[context.run_config["case"]]
    options = {**OPTIONS, **case.options, "max_epochs": config["rounds"]}
    server_app(
        case.federation(), case.module, None, options, clients=list(SIZES), folder=config["folder"],
        callbacks=case.callbacks(), time_limit=config["limit"], patience=60,
    )(grid, context)  # fmt: skip
