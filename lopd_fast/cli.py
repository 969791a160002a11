"""The console script `lopd-fast`: demo, train, plan, ablate, bank."""

import signal
from importlib.metadata import version as installed_version

import typer

from lopd_fast.commands import ablate, demo, plan, train
from lopd_fast.commands.bank import app as bank

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Latent On-Policy Self-Distillation.",
)
app.add_typer(bank, name="bank")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(installed_version("lopd-fast"))


for command in (demo, train, plan, ablate):
    app.command(name=command.__name__.rsplit(".", 1)[-1])(command.run)


def main() -> None:
    """Entry point. SIGTERM ends a command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app()


if __name__ == "__main__":  # torchrun -m lopd_fast.cli
    main()
