"""What a person sees of a long run: stages with a bar and the time left, or plain lines where there is no terminal."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text
from transformers.utils import logging as transformers_logging

LINE_EVERY = 15.0  # seconds between progress lines where there is no terminal


class Stage:
    """One stage's progress; `advance` is called as work is done, with a few words on how it goes."""

    def __init__(self, console: Console, name: str, total: int, bar: Progress | None) -> None:
        self.console, self.name, self.total, self.bar = console, name, total, bar
        self.done = 0
        self._task = bar.add_task(name, total=total, note="") if bar is not None else None
        self._started = self._said = time.perf_counter()

    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done."""
        self.done += count
        now = time.perf_counter()
        if self.bar is not None and self._task is not None:
            self.bar.update(self._task, advance=count, note=note)
        elif now - self._said >= LINE_EVERY or self.done >= self.total:
            self._said = now
            left = (now - self._started) / max(1, self.done) * (self.total - self.done)
            self.console.print(
                Text(f"  {self.name}: {self.done}/{self.total}, about {left:.0f} s left  {note}")
            )


class Stages:
    """Prints each stage's name, its progress and how long it took."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True)
        transformers_logging.disable_progress_bar()  # the stages have bars of their own
        self._bar: Progress | None = None

    @contextmanager
    def stage(self, name: str, total: int) -> Iterator[Stage]:
        """A stage of `total` units."""
        started = time.perf_counter()
        if self.console.is_terminal:
            columns = (
                TextColumn("  {task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}", markup=False),
            )
            with Progress(*columns, console=self.console, transient=True) as bar:
                yield Stage(self.console, name, total, bar)
        else:
            yield Stage(self.console, name, total, None)
        self.say(f" ({time.perf_counter() - started:.0f} s)", title=name)

    def say(self, text: str, title: str = "") -> None:
        """One line for a person, after a bold `title`; both as they are, a folder named [red] too."""
        self.console.print(Text.assemble((title, "bold"), text))
