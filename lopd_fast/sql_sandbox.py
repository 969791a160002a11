"""Runs SQL that a model wrote: in another process, with time, memory, file and network limits.

The SQL of a policy under training is code of an untrusted author. `SqlSandbox` keeps one long-lived worker
(`sql_worker.py`, which holds the fences), talks to it in JSON lines, ends it when it is late or broken, and starts
the next one at the next query. The worker sees no environment variable and no handle of ours, and works in a folder
that no longer exists.
"""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lopd_fast.errors import UserError

Value = str | int | float | None

SQL_CHARACTERS = 10_000
_WORKER_FILE = Path(__file__).with_name("sql_worker.py")
_ANSWER_BYTES = 2**20  # 64 Ki characters escape to at most 12 bytes each; whoever sends more is broken
_OWN_SECONDS = 60.0  # for a worker to start or to load a script: generous, both are ours


@dataclass(frozen=True)
class QueryResult:
    """Rows of a SELECT, or one line that says why there are none.

    `truncated` says that there were more than `row_limit` rows.
    """

    rows: list[tuple[Value, ...]]
    error: str | None = None
    truncated: bool = False


class SqlSandbox:
    """Answers SELECT statements over databases made by trusted scripts; a context manager, safe to share by threads.

    time_limit  CPU seconds of one query, so that a busy machine changes no answer. A worker that hangs is ended
                after 4 * time_limit + 1 seconds on the clock.
    row_limit   rows of one result; the rest is dropped and `QueryResult.truncated` set.

    Raises UserError for limits that are not positive, and on systems without process limits (Windows).
    """

    def __init__(self, *, time_limit: float = 1.0, row_limit: int = 100) -> None:
        if not (math.isfinite(time_limit) and time_limit > 0):
            raise UserError(f"time_limit must be a positive number of seconds, not {time_limit}")
        if row_limit < 1:
            raise UserError(f"row_limit must be at least 1, not {row_limit}")
        if os.name != "posix":
            raise UserError(
                "SqlSandbox needs the process limits of Linux or macOS; run it there or in a container"
            )
        self.time_limit = time_limit
        self.row_limit = row_limit
        self._lock = threading.Lock()
        self._worker: _Worker | None = None

    def query(self, script_key: str, script: str, sql: str) -> QueryResult:
        """Run `sql` over the database that `script` makes.

        script_key  names the database in messages; the worker keeps the last few databases by key and script
        script      our own CREATE / INSERT statements, trusted
        sql         one SELECT statement, not trusted: whatever is wrong with it comes back as `QueryResult.error`

        Values are str, int, float or None; a blob comes back as its hex digits. Raises UserError when the script fails
        or no worker can be started.
        """
        if len(sql) > SQL_CHARACTERS:
            return QueryResult([], f"the SQL is longer than {SQL_CHARACTERS} characters")
        database = f"{script_key}:{hash(script)}"
        request = {"query": database, "sql": sql, "time_limit": self.time_limit, "row_limit": self.row_limit}
        patience = 4 * self.time_limit + 1
        with self._lock:
            worker = self._running_worker()
            try:
                answer = worker.ask(request, patience)
                if answer.get("missing"):
                    loaded = worker.ask({"load": database, "script": script}, _OWN_SECONDS)
                    if "error" in loaded:
                        raise UserError(f"the script of database {script_key!r} failed: {loaded['error']}")
                    answer = worker.ask(request, patience)
            except _WorkerLost as lost:
                worker.stop()
                return QueryResult([], self._reason(lost, worker))
            except (
                BaseException
            ):  # an interrupt between question and answer: the next query must not read this answer
                worker.stop()
                raise
        if "error" in answer:
            return QueryResult([], answer["error"])
        return QueryResult([tuple(row) for row in answer["rows"]], None, answer["truncated"])

    def close(self) -> None:
        """End the worker and wait for it. A later query starts a new one."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop()
                self._worker = None

    def __enter__(self) -> "SqlSandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _running_worker(self) -> "_Worker":
        if self._worker is not None and not self._worker.usable():
            self._worker.stop()
            self._worker = None
        if self._worker is None:
            self._worker = _Worker()
        return self._worker

    def _reason(self, lost: "_WorkerLost", worker: "_Worker") -> str:
        if lost.late or worker.process.returncode == -signal.SIGXCPU:  # the kernel's limit on CPU seconds
            return f"the query takes longer than {self.time_limit:g} s"
        return "the query ended the database process"


class _WorkerLost(Exception):
    """The worker hung (`late`), ended, or answered what no worker answers: stop it."""

    def __init__(self, late: bool) -> None:
        self.late = late


class _Worker:
    """One worker process, and our end of the socket that is its stdin and stdout."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        folder = tempfile.mkdtemp(prefix="lopd-fast-sql-")
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", str(_WORKER_FILE)],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                start_new_session=True,  # an interrupt in our terminal is not the worker's
            )
        except OSError as error:
            self.socket.close()
            raise UserError(f"cannot start a Python process for SQL queries: {error}") from error
        finally:
            theirs.close()
            os.rmdir(folder)  # the worker stands in it: nothing can be made there, and nothing is left behind
        # Runs once: when asked to, when this object goes, or when the interpreter exits.
        self._finalizer = weakref.finalize(self, _end_process, self.process, self.socket)
        try:
            self._receive(time.monotonic() + _OWN_SECONDS)
        except _WorkerLost as lost:
            self.stop()
            command = f"{sys.executable} -I -S {_WORKER_FILE}"
            raise UserError(
                f"the process for SQL queries did not start; run `{command}` to see why"
            ) from lost

    def usable(self) -> bool:
        """Whether the process lives and is our child: after a fork it is not, and the socket is its parent's."""
        return self.process.poll() is None

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to one request, within `seconds` on the clock. Raises _WorkerLost."""
        deadline = time.monotonic() + seconds
        line = json.dumps(request).encode() + b"\n"
        try:
            self.socket.settimeout(seconds)
            self.socket.sendall(line)
        except OSError as error:
            raise _WorkerLost(late=isinstance(error, TimeoutError)) from error
        return self._receive(deadline)

    def stop(self) -> None:
        """End the process, wait for it, and close our end. Twice is fine."""
        self._finalizer()

    def _receive(self, deadline: float) -> dict[str, Any]:
        line = bytearray()
        try:
            while not line.endswith(b"\n"):
                self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                piece = self.socket.recv(2**16)
                line += piece
                if not piece or len(line) > _ANSWER_BYTES:
                    raise _WorkerLost(late=False)
            return json.loads(line)
        except (OSError, ValueError) as error:
            raise _WorkerLost(late=isinstance(error, TimeoutError)) from error


def _end_process(process: subprocess.Popen[bytes], ours: socket.socket) -> None:
    ours.close()
    process.kill()  # signals nothing when the process has ended, or is not our child but our parent's
    process.wait()
