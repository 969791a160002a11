"""SQL that a model wrote is answered or contained, and the next query is answered whatever the last one did."""

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lopd_fast import sql_worker
from lopd_fast.errors import UserError
from lopd_fast.sql_sandbox import SQL_CHARACTERS, QueryResult, SqlSandbox

SCRIPT = """
CREATE TABLE staff (name TEXT, age INTEGER, pay REAL);
INSERT INTO staff VALUES ('Ada', 36, 1.5), ('Bob', NULL, 2.5), ('Cy', 36, 4.0);
CREATE VIEW adults AS SELECT name FROM staff WHERE age > 17;
"""
ENDLESS = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT sum(n) FROM r"
PROC = pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="reads /proc")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[SqlSandbox]:
    with SqlSandbox(time_limit=0.1) as shared:
        yield shared


def ask(sandbox: SqlSandbox, sql: str) -> QueryResult:
    return sandbox.query("staff", SCRIPT, sql)


def worker_pid(sandbox: SqlSandbox) -> int:
    assert sandbox._worker is not None
    return sandbox._worker.process.pid


def assert_intact(sandbox: SqlSandbox) -> None:
    """The database is as the script made it."""
    rows = [("Ada", 36, 1.5), ("Bob", None, 2.5), ("Cy", 36, 4.0)]
    assert ask(sandbox, "SELECT * FROM staff ORDER BY name") == QueryResult(rows)
    assert ask(sandbox, "SELECT name FROM sqlite_schema") == QueryResult([("staff",), ("adults",)])


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


def wait_until_gone(pid: int) -> None:
    """Return when `pid` has ended; one that nobody has collected yet (a zombie) has ended too."""
    for _ in range(1000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    pytest.fail(f"process {pid} still runs")


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT name, age, pay FROM staff WHERE age IS NULL", [("Bob", None, 2.5)]),
        (
            "SELECT age, count(*), sum(pay) FROM staff GROUP BY age ORDER BY age",
            [(None, 1, 2.5), (36, 2, 5.5)],
        ),
        ("SELECT upper(a.name) FROM staff a JOIN staff b ON a.age = b.age AND a.name > b.name", [("CY",)]),
        ("WITH old AS (SELECT * FROM staff WHERE age > 30) SELECT count(*) FROM old", [(2,)]),
        ("SELECT name, rank() OVER (ORDER BY pay DESC) FROM staff LIMIT 1", [("Cy", 1)]),
        ("SELECT count(*) FROM adults", [(2,)]),
        ("SELECT name FROM staff WHERE name LIKE 'a%'; -- all", [("Ada",)]),
        ("SELECT 9223372036854775807, 'é', 9e999", [(2**63 - 1, "é", float("inf"))]),
        ("SELECT x'ff41'", [("ff41",)]),
        ("SELECT name FROM staff WHERE pay < 0", []),
    ],
)
def test_select_gives_rows(sandbox: SqlSandbox, sql: str, rows: list[tuple]) -> None:
    assert ask(sandbox, sql) == QueryResult(rows)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELEC name", 'near "SELEC": syntax error'),
        ("SELECT nmae FROM staff", "no such column: nmae"),
        ("SELECT * FROM\nstuff", "no such table: stuff"),
        ("SELECT 1; SELECT 2", "one statement at a time"),
        ("SELECT 1; DROP TABLE staff", "one statement at a time"),
        ("", "no SELECT statement"),
        ("-- SELECT 1", "no SELECT statement"),
        ("SELECT '\ud800'", "surrogates not allowed"),
        ("SELECT 1\0", "null character"),
        ("SELECT '" + "x" * SQL_CHARACTERS + "'", "longer than 10000 characters"),
        ("SELECT " + "(" * 3000 + "1" + ")" * 3000, "parser stack overflow"),
        ("SELECT CAST(x'ff' AS TEXT)", "Could not decode to UTF-8"),
    ],
)
def test_wrong_sql_gives_one_line(sandbox: SqlSandbox, sql: str, message: str) -> None:
    result = ask(sandbox, sql)
    assert result.rows == [] and result.error is not None
    assert message in result.error
    assert "\n" not in result.error


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH '/tmp/lopd_fast_attached.db' AS other",
        "ATTACH ':memory:' AS other",
        "DETACH main",
        "PRAGMA table_info(staff)",
        "PRAGMA query_only = OFF",
        "PRAGMA hard_heap_limit = 0",
        "SELECT * FROM pragma_database_list",
        "SELECT count(*) FROM pragma_table_info('staff')",
        "INSERT INTO staff VALUES ('Eve', 1, 1)",
        "UPDATE staff SET pay = 9",
        "DELETE FROM staff",
        "REPLACE INTO staff VALUES ('Eve', 1, 1)",
        "WITH x AS (SELECT 1) DELETE FROM staff",
        "DROP TABLE staff",
        "ALTER TABLE staff RENAME TO crew",
        "CREATE TABLE other (x)",
        "CREATE TEMP TABLE other (x)",
        "CREATE VIRTUAL TABLE other USING fts5(x)",
        "CREATE TRIGGER t AFTER INSERT ON staff BEGIN SELECT 1; END",
        "VACUUM",
        "VACUUM INTO '/tmp/lopd_fast_vacuum.db'",
        "ANALYZE",
        "BEGIN",
        "SAVEPOINT s",
        "SELECT load_extension('/tmp/evil.so')",
        "SELECT readfile('/etc/passwd')",
        "SELECT writefile('/tmp/lopd_fast_written', 'x')",
        "SELECT edit('x')",
        "SELECT fts3_tokenizer('simple')",
        "SELECT sqlite_compileoption_get(0)",
        "SELECT * FROM sqlite_dbpage",
        "SELECT random()",
        "SELECT hex(randomblob(8))",
        "SELECT zeroblob(8)",
    ],
)
def test_anything_but_reading_is_refused(sandbox: SqlSandbox, sql: str) -> None:
    result = ask(sandbox, sql)
    assert result.error is not None and result.rows == []
    assert not list(Path("/tmp").glob("lopd_fast_*"))
    assert_intact(sandbox)


@pytest.mark.parametrize(
    "sql",
    [
        ENDLESS,
        ENDLESS.replace("sum(n)", "n") + " ORDER BY n",
        "SELECT count(*) FROM " + ", ".join(f"staff AS s{number}" for number in range(40)),
    ],
)
def test_endless_query_ends_at_the_time_limit(sandbox: SqlSandbox, sql: str) -> None:
    ask(sandbox, "SELECT 1")
    pid = worker_pid(sandbox)
    assert ask(sandbox, sql).error == "the query takes longer than 0.1 s"
    assert_intact(sandbox)
    assert worker_pid(sandbox) == pid  # SQLite was told to stop; the worker need not be ended


@PROC
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT length(randomblob(2000000000))",
        "SELECT length(zeroblob(2000000000))",
        "SELECT printf('%.*c', 1000000000, 'x')",
        "SELECT length(printf('%1000000000s', 'x'))",
        "SELECT replace(printf('%.*c', 100000, 'x'), 'x', printf('%.*c', 100000, 'y'))",
        "SELECT group_concat(printf('%.*c', 900000, 'x')) FROM staff, staff b, staff c",
        "SELECT " + ", ".join(["printf('%.*c', 900000, 'x')"] * 100),
        "WITH RECURSIVE r(n, s) AS (SELECT 1, printf('%.*c', 900000, 'x') UNION ALL SELECT n + 1, s || '' FROM r)"
        " SELECT n FROM r ORDER BY s, n",
    ],
)
def test_huge_values_stay_within_the_memory_limit(sql: str) -> None:
    with SqlSandbox(time_limit=0.3) as sandbox:
        ask(sandbox, "SELECT 1")
        pid = worker_pid(sandbox)
        result = ask(sandbox, sql)
        assert result.rows in (
            [],
            [(None,)],
        )  # NULL: what SQLite gives for a printf width that is out of range
        status = Path(f"/proc/{pid}/status")
        if status.exists():  # else the worker was ended, which contains it too
            peak = next(line for line in status.read_text().splitlines() if line.startswith("VmPeak"))
            assert int(peak.split()[1]) * 1024 <= sql_worker.MEMORY_BYTES
        assert_intact(sandbox)


def test_long_results() -> None:
    numbers = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r LIMIT {}) SELECT n{} FROM r"
    with SqlSandbox(row_limit=3) as sandbox:
        assert ask(sandbox, numbers.format(3, "")) == QueryResult([(1,), (2,), (3,)])
        assert ask(sandbox, numbers.format(4, "")) == QueryResult([(1,), (2,), (3,)], truncated=True)
        wide = ask(sandbox, numbers.format(2, ", printf('%.*c', 40000, 'x')"))
        assert wide.error == "the result is longer than 65536 characters; select less"
        fitting = ask(sandbox, "SELECT printf('%.*c', 65536, '\N{GRINNING FACE}')").rows
        assert fitting == [("\N{GRINNING FACE}" * 65536,)]


def test_worker_killed_between_queries_is_replaced(sandbox: SqlSandbox) -> None:
    ask(sandbox, "SELECT 1")
    pid = worker_pid(sandbox)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert_intact(sandbox)
    assert worker_pid(sandbox) != pid


def test_worker_killed_in_a_query_gives_an_error() -> None:
    with SqlSandbox(time_limit=50) as sandbox:
        ask(sandbox, "SELECT 1")
        killer = threading.Timer(0.2, os.kill, (worker_pid(sandbox), signal.SIGKILL))
        killer.start()
        assert ask(sandbox, ENDLESS).error == "the query ended the database process"
        killer.join()
        assert_intact(sandbox)


def test_worker_that_hangs_is_replaced(sandbox: SqlSandbox) -> None:
    ask(sandbox, "SELECT 1")
    pid = worker_pid(sandbox)
    os.kill(pid, signal.SIGSTOP)
    assert ask(sandbox, "SELECT 1").error == "the query takes longer than 0.1 s"
    assert_intact(sandbox)
    assert worker_pid(sandbox) != pid


def test_interrupt_leaves_no_stale_answer(sandbox: SqlSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    ask(sandbox, "SELECT 1")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sandbox._worker, "_receive", interrupted)
        ask(sandbox, "SELECT 'stale'")
    assert ask(sandbox, "SELECT 'fresh'").rows == [("fresh",)]


@PROC
def test_worker_sees_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOPD_FAST_SECRET", "hunter2")
    with open(__file__, "rb") as ours, SqlSandbox() as sandbox:
        os.set_inheritable(ours.fileno(), True)
        ask(sandbox, "SELECT 1")
        process = Path(f"/proc/{worker_pid(sandbox)}")
        assert (process / "environ").read_bytes() == b""
        assert sorted(entry.name for entry in (process / "fd").iterdir()) == ["0", "1", "2"]
        assert os.readlink(process / "cwd").endswith("(deleted)")
        limits = (process / "limits").read_text()
        for name, value in {
            "Max address space": sql_worker.MEMORY_BYTES,
            "Max open files": 3,
            "Max file size": 0,
            "Max processes": 0,
            "Max core file size": 0,
        }.items():
            assert re.search(rf"^{name} +{value} +{value} ", limits, re.MULTILINE), name


def test_limited_process_can_open_nothing(tmp_path: Path) -> None:
    code = f"""
    import os, runpy, socket, sys
    os.closerange(3, 64)
    runpy.run_path({sql_worker.__file__!r})["limit_process"]()
    for attempt in (
        lambda: open({str(tmp_path / "new")!r}, "w"),
        lambda: open("/etc/passwd"),
        lambda: os.listdir("/"),
        lambda: socket.socket(),
        lambda: bytearray(2**28),
    ):
        try:
            attempt()
        except (OSError, MemoryError) as error:
            print(type(error).__name__, getattr(error, "errno", None))
    """
    shown = run_python(code).stdout.split("\n")
    assert shown == ["OSError 24"] * 4 + ["MemoryError None", ""]  # 24: too many open files


@PROC
def test_no_process_and_no_handle_is_left() -> None:
    def handles() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = handles()
    for _ in range(5):
        with SqlSandbox(time_limit=0.1) as sandbox:
            ask(sandbox, "SELECT 1")
            first = worker_pid(sandbox)
            os.kill(first, signal.SIGKILL)
            ask(sandbox, "SELECT 1")
            second = worker_pid(sandbox)
    dropped = SqlSandbox()
    ask(dropped, "SELECT 1")
    third = worker_pid(dropped)
    del dropped
    assert handles() == before
    for pid in (first, second, third):
        assert not Path(f"/proc/{pid}").exists()  # collected, so not a zombie either


@PROC
@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)", "raise SystemExit(3)"])
def test_worker_ends_with_its_parent(ending: str) -> None:
    result = run_python(f"""
    import os
    from lopd_fast.sql_sandbox import SqlSandbox
    sandbox = SqlSandbox()
    sandbox.query("a", "CREATE TABLE t (x)", "SELECT * FROM t")
    print(sandbox._worker.process.pid, flush=True)
    {ending}
    """)
    assert result.stderr == ""
    wait_until_gone(int(result.stdout))


def test_forked_child_takes_a_worker_of_its_own() -> None:
    result = run_python("""
    import os
    from lopd_fast.sql_sandbox import SqlSandbox
    with SqlSandbox() as sandbox:
        ask = lambda: (sandbox.query("a", "CREATE TABLE t (x)", "SELECT 7").rows, sandbox._worker.process.pid)
        before = ask()
        for quiet in (False, True):
            child = os.fork()
            if child == 0:
                good = quiet or (ask()[0] == [(7,)] and ask()[1] != before[1])
                raise SystemExit(0 if good else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ask() == before
    """)
    assert result.returncode == 0, result.stderr


def test_databases_are_told_apart_by_key_and_script(sandbox: SqlSandbox) -> None:
    count = sql_worker.CACHED_DATABASES + 3
    scripts = [f"CREATE TABLE t (x); INSERT INTO t VALUES ({number})" for number in range(count)]
    for _ in range(2):
        for number, script in enumerate(scripts):
            assert sandbox.query("one key", script, "SELECT x FROM t").rows == [(number,)]


def test_threads_share_a_sandbox(sandbox: SqlSandbox) -> None:
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda number: ask(sandbox, f"SELECT {number}").rows, range(200)))
    assert results == [[(number,)] for number in range(200)]


def test_faults_of_ours_raise(sandbox: SqlSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"script of database 'broken' failed: near \"TABEL\""):
        sandbox.query("broken", "CREATE TABEL t (x)", "SELECT 1")
    assert_intact(sandbox)
    with pytest.raises(UserError, match="time_limit"):
        SqlSandbox(time_limit=0)
    with pytest.raises(UserError, match="row_limit"):
        SqlSandbox(row_limit=0)
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(UserError, match="cannot start a Python process"):
        ask(SqlSandbox(), "SELECT 1")
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(UserError, match="did not start"):
        ask(SqlSandbox(), "SELECT 1")


@settings(max_examples=200)
@given(st.text() | st.text(alphabet="SELECT FROM staff name*(),;'\"0123456789=-/").map("SELECT ".__add__))
@example("SELECT 1 UNION SELECT name FROM staff")
def test_any_text_is_answered_in_one_line(sandbox: SqlSandbox, sql: str) -> None:
    result = ask(sandbox, sql)
    assert (result.error is None) or (result.rows == [] and len(result.error.splitlines()) <= 1)
    assert ask(sandbox, "SELECT count(*) FROM staff").rows == [(3,)]
