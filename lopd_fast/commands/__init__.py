"""The subcommands of lopd-fast, one file each, and the way they all report a mistake of the user."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lopd_fast.errors import UserError


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a UserError, or a file that cannot be opened, as one `error: ...` line on stderr and exit with code 2.

    Use it as a decorator, below the one that registers the command.
    """
    try:
        yield
    except UserError as error:
        message = str(error)
    except OSError as error:
        if (
            error.filename is None
        ):  # a broken pipe and the like: no file to name, nothing for the user to mend
            raise
        message = f"{error.filename}: {error.strerror}"
    else:
        return
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)
