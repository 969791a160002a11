"""The process behind `SqlSandbox`: answers SELECT statements over in-memory SQLite databases, one JSON line each.

Run as a file (`python -I -S sql_worker.py`) in its own process, so it imports the standard library alone and
starts in a few hundredths of a second. Three fences, each enough for most attacks:

1. limits of the process, set before anything is read: no descriptor is left to open a file or a socket with
   (RLIMIT_NOFILE), nothing can be written (FSIZE 0) or forked (NPROC 0), memory (AS) and CPU seconds end;
2. limits of SQLite: heap, length of values, number of columns, no attached database, `query_only`;
3. an authorizer with a positive list: SELECT, reads of the script's own tables, and harmless functions.

Requests  {"load": key, "script": text}  -> {} | {"error": text}      our own CREATE/INSERT script, trusted
          {"query": key, "sql": text, "time_limit": s, "row_limit": n}
                                         -> {"rows": [[...]], "truncated": bool} | {"error": text} | {"missing": true}
"""

import json
import math
import resource
import sqlite3
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, BinaryIO

MEMORY_BYTES = 256 * 2**20  # of the whole process
HEAP_BYTES = 64 * 2**20  # of SQLite, all cached databases together
VALUE_BYTES = 2**20  # one string, one blob, one row
RESULT_CHARACTERS = 64 * 2**10
ERROR_CHARACTERS = 300
LOAD_SECONDS = 30
CACHED_DATABASES = 16

# Nothing random (an answer must repeat), no allocation by number (`zeroblob`), no `load_extension`, no `sqlite_*`.
FUNCTIONS = frozenset(
    """
    abs avg ceil ceiling char coalesce concat concat_ws count cume_dist date datetime dense_rank exp
    first_value floor format glob group_concat hex ifnull iif instr json json_array json_array_length
    json_extract json_group_array json_group_object json_object json_type json_valid julianday lag
    last_value lead length like likelihood likely ln log log10 log2 lower ltrim max min mod nth_value
    ntile nullif percent_rank pi pow power printf quote rank replace round row_number rtrim sign sqrt
    strftime string_agg substr substring sum time timediff total trim trunc typeof unicode unixepoch
    unlikely upper -> ->>
    """.split()
)
SCHEMA_TABLE = "sqlite_master"  # how the authorizer hears of sqlite_schema too


def limit_process() -> None:
    """Close this process off. Limits that this system does not know are skipped; what is open stays open."""
    for name, value in {
        "RLIMIT_AS": MEMORY_BYTES,
        "RLIMIT_NOFILE": 3,
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NPROC": 0,
        "RLIMIT_CORE": 0,
    }.items():
        try:
            resource.setrlimit(getattr(resource, name), (value, value))
        except (AttributeError, ValueError, OSError):
            continue


def limit_cpu(seconds: float) -> None:
    """Have the kernel end this process `seconds` (and up to two more) of CPU time from now.

    A single call of a function written in C never comes back to SQLite's own check of the time.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(
        resource.RLIMIT_CPU, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )


class Deadline:
    """CPU time at which the running query ends. CPU and not wall time: a busy machine must not change an answer."""

    at = math.inf

    def passed(self) -> bool:
        return time.process_time() > self.at


def open_database(script: str, deadline: Deadline) -> sqlite3.Connection:
    """Run the trusted script in a fresh in-memory database, then close the database off for reading alone."""
    connection = sqlite3.connect(":memory:", isolation_level=None, cached_statements=0)
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.executescript(script)
    tables = frozenset(name for (name,) in connection.execute(f"SELECT name FROM {SCHEMA_TABLE}")) | {
        SCHEMA_TABLE
    }
    connection.execute("PRAGMA query_only = ON")
    for category, value in {
        sqlite3.SQLITE_LIMIT_LENGTH: VALUE_BYTES,
        sqlite3.SQLITE_LIMIT_COLUMN: 100,
        sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 100,
        sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
        sqlite3.SQLITE_LIMIT_ATTACHED: 0,
        sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
    }.items():
        connection.setlimit(category, value)
    connection.set_progress_handler(deadline.passed, 10_000)
    connection.set_authorizer(authorizer(tables))
    return connection


def authorizer(tables: frozenset[str]) -> Callable[..., int]:
    """The positive list. A read of no column, as by `count(*)`, is allowed on any name: it may be a WITH table."""

    def authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
        allowed = (
            action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE)
            or (action == sqlite3.SQLITE_READ and (not second or first in tables))
            or (action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FUNCTIONS)
        )
        return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY

    return authorize


def answer_query(connection: sqlite3.Connection, sql: str, row_limit: int) -> dict[str, Any]:
    """Rows as JSON values; a blob becomes its hex digits."""
    cursor = connection.execute(sql)
    try:
        if cursor.description is None:
            return {"error": "the SQL has no SELECT statement"}
        rows: list[list[Any]] = []
        size = 0
        for row in cursor:
            if len(rows) == row_limit:
                return {"rows": rows, "truncated": True}
            values = [value.hex() if isinstance(value, bytes) else value for value in row]
            size += sum(len(value) if isinstance(value, str) else 8 for value in values)
            if size > RESULT_CHARACTERS:
                return {"error": f"the result is longer than {RESULT_CHARACTERS} characters; select less"}
            rows.append(values)
        return {"rows": rows, "truncated": False}
    finally:
        cursor.close()


class Worker:
    """The cached databases, and the answer to one request."""

    def __init__(self) -> None:
        self.deadline = Deadline()
        self.databases: OrderedDict[str, sqlite3.Connection] = OrderedDict()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.load(request) if "load" in request else self.query(request)
        except MemoryError:
            self.close_databases()
            return {"error": "the query needs too much memory"}
        except (
            sqlite3.Error,
            sqlite3.Warning,
            ValueError,
            OverflowError,
        ) as error:  # Warning: several statements
            if self.deadline.passed():
                return {"error": f"the query takes longer than {request['time_limit']:g} s"}
            return {"error": " ".join(str(error).split())[:ERROR_CHARACTERS]}

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        limit_cpu(LOAD_SECONDS)
        self.deadline.at = math.inf
        while len(self.databases) >= CACHED_DATABASES:
            self.databases.popitem(last=False)[1].close()
        self.databases[request["load"]] = open_database(request["script"], self.deadline)
        return {}

    def query(self, request: dict[str, Any]) -> dict[str, Any]:
        connection = self.databases.get(request["query"])
        if connection is None:
            return {"missing": True}
        self.databases.move_to_end(request["query"])
        limit_cpu(request["time_limit"])
        self.deadline.at = time.process_time() + request["time_limit"]
        return answer_query(connection, request["sql"], request["row_limit"])

    def close_databases(self) -> None:
        while self.databases:
            self.databases.popitem()[1].close()


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer until the parent closes its end. The first line says that the limits hold."""
    limit_process()
    with sqlite3.connect(":memory:") as connection:
        connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
    connection.close()
    worker = Worker()
    answers.write(b"{}\n")
    answers.flush()
    for line in requests:
        answers.write(json.dumps(worker.answer(json.loads(line))).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
