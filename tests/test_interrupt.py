"""A signal asks for the end of the step, a second one ends it, and the handlers from before come back."""

import errno
import os
import signal
import threading

import pytest
import typer

from lopd_fast.commands import user_errors
from lopd_fast.errors import UserError
from lopd_fast.interrupt import StopRequest

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_first_signal_asks_and_second_stops(
    first: signal.Signals, second: signal.Signals, capfd: pytest.CaptureFixture[str]
):
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(KeyboardInterrupt), StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), first)
        assert stop.requested
        assert capfd.readouterr().err == "stopping after this step; press again to stop at once\n"
        os.kill(os.getpid(), second)
        pytest.fail("the second signal did not stop the block")
    assert capfd.readouterr().err == ""
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_old_handlers_are_back_and_a_new_block_starts_unasked():
    seen = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with StopRequest() as outer:
            os.kill(os.getpid(), signal.SIGTERM)
            with StopRequest() as inner:
                assert not inner.requested
            assert outer.requested and not inner.requested
        assert seen == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_outside_the_main_thread_it_changes_nothing():
    before = [signal.getsignal(number) for number in SIGNALS]
    found: list[object] = []

    def work() -> None:
        with StopRequest() as stop:
            found.extend([stop.requested, *(signal.getsignal(number) for number in SIGNALS)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False, *before]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            KeyboardInterrupt(),
            130,
            "Stopped. What was saved is kept: go on with the same command and --resume.",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "free some space and go on with --resume"),
        (UserError("a\nb"), 2, "error: a b"),
    ],
)
def test_a_command_ends_with_one_sentence(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(typer.Exit) as ended, user_errors():
        raise error
    assert ended.value.exit_code == code
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
