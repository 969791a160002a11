"""What is printed is what was given: names of folders are no markup."""

from io import StringIO

import pytest
from rich.console import Console

from lopd_fast.console import Stages

NAME = "runs[1]/[red]x[/red]/:smile:"


@pytest.mark.parametrize("terminal", [True, False])
def test_names_are_printed_as_they_are(terminal: bool):
    file = StringIO()
    stages = Stages(Console(file=file, soft_wrap=True, force_terminal=terminal, width=200, no_color=True))
    stages.say(f"The student is in {NAME}.")
    with stages.stage(f"evaluate {NAME}", 1) as stage:
        stage.advance(note=f"note {NAME}")
    text = file.getvalue()
    for before in ("The student is in", "evaluate", "note"):
        assert f"{before} {NAME}" in text
    assert "(0 s)" in text
