"""Server app for the case named in the run configuration."""

from flwr.serverapp import ServerApp

from lightning_fed.backends.flower import server_app
from tests.backends.flower.halves import ALL_CASES, OPTIONS, SIZES
from tests.backends.flower.process_kills import watched

app = ServerApp()


@app.main()
def main(grid, context):
    config, case = context.run_config, ALL_CASES[context.run_config["case"]]
    callbacks, logging = watched(config["folder"])
    options = {**OPTIONS, **case.options, **logging, "max_epochs": config["rounds"]}
    server_app(
        case.federation(), case.module, None, options, clients=list(case.data(SIZES)), folder=config["folder"],
        callbacks=[*case.callbacks(), *callbacks], time_limit=config["limit"], patience=300,
        key=config["key"] or None,
    )(grid, context)  # fmt: skip
