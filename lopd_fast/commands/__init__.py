"""The subcommands of lopd-fast, one file each, and the way they all report a mistake of the user."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lopd_fast.errors import UserError


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a UserError, or a file that cannot be opened, as one `error: ...` line on stderr and exit with code 2.

    Use it as a decorator, below the one that registers the command. Of several processes of a run, one prints.
    """
    try:
        yield
    except UserError as error:
        message = str(error)
    except KeyboardInterrupt:
        if _speaks():
            typer.echo("Stopped. What was saved is kept: go on with the same command and --resume.", err=True)
        raise typer.Exit(130) from None
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise  # a broken pipe and the like: no file to name, nothing for the user to mend
        message = f"{error.filename or 'writing a file'}: {error.strerror}"
        if error.errno == errno.ENOSPC:
            message += "; free some space and go on with --resume"
    else:
        return
    if _speaks():
        typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def alone(command: str) -> None:
    """Refuse to run `command` in several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"lopd-fast {command} runs in one process; of several, only lopd-fast train makes use."
        )


def _speaks() -> bool:
    if "RANK" not in os.environ:
        return True
    from lopd_fast.processes import first_to_speak

    return first_to_speak()
