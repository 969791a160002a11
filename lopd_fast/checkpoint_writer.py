"""Checkpoints written behind the training: what is saved is copied at once, and a thread brings it to the disk."""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lopd_fast.checkpoint import save_checkpoint
from lopd_fast.errors import UserError


class CheckpointWriter:
    """`with writer: writer.save(...)` whenever a step should be kept, and in the end `writer.finish()`.

    One save is under way at a time, with one copy of the tensors in the host's memory. A save that fails (a full
    disk) is said and the training goes on: the checkpoints before it are whole, and the next save is the next try.
    The end of the block waits for the save under way, whatever ended it.
    """

    def __init__(self, root: str | Path, *, keep: int = 2, say: Callable[[str], None] = print) -> None:
        """root, keep: as `checkpoint.save_checkpoint` has them. say: called from the thread."""
        self.root, self.keep, self.say = Path(root), keep, say
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        extra: Callable[[Path], None] | None = None,
    ) -> None:
        """Copy `tensors` and `state` as they are now and write them as `save_checkpoint` does; wait for no disk.

        extra: called in the thread, so what it writes must not change any more.

        Raises:
            TypeError: `state` is not what JSON can hold.
            Exception: whatever but a UserError ended the save before.
        """
        self._wait()
        if self._error is not None and not isinstance(self._error, UserError):
            raise self._error
        self._error = None
        arguments = step, _copies(tensors), json.loads(json.dumps(dict(state))), extra
        # Not a daemon: an interpreter that ends in any way but a kill waits for the write.
        self._thread = threading.Thread(target=self._write, args=arguments, name=f"checkpoint {step}")
        self._thread.start()

    def finish(self) -> None:
        """Wait for the save under way; raise what ended the last one: UserError where the disk was full."""
        self._wait()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self,
        step: int,
        tensors: dict[str, dict[str, Tensor]],
        state: dict[str, Any],
        extra: Callable[[Path], None] | None,
    ) -> None:
        try:
            save_checkpoint(self.root, step, tensors, state, extra=extra, keep=self.keep)
        except UserError as error:
            self._error = error
            self.say(f"warning: {error} The run goes on without it.")
        except BaseException as error:
            self._error = error


def _copies(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The same tensors in memory of their own, on the CPU: what trains goes on changing in place."""
    return {
        group: {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in entries.items()
        }
        for group, entries in tensors.items()
    }
