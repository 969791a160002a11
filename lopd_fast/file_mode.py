"""The umask rules for tensors as for any other file: safetensors makes its files for their owner alone."""

import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def take_mode(files: Iterable[Path], of: Path) -> None:
    """Give `files` the permissions of a file that was opened in the ordinary way."""
    mode = stat.S_IMODE(of.stat().st_mode)
    for file in files:
        with suppress(PermissionError):  # a file system without permissions, or a file of somebody else
            file.chmod(mode)
