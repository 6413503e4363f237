"""The command line: help, exit codes, what goes to which stream, and how little it loads."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import ffmem
from ffmem import cli

COMMANDS = {name: cli.cli.get_command(click.Context(cli.cli), name) for name in cli.COMMANDS}
LONG = "a" * 5000
SOURCE = str(Path(ffmem.__file__).parent.parent)


def run(*arguments, **options):
    """Run the command in this process, as `main` does; return (exit code, stdout, stderr)."""
    done = CliRunner().invoke(cli.cli, [str(argument) for argument in arguments], **options)
    if isinstance(done.exception, ffmem.FfmemError):
        return 1, done.stdout, f"{done.stderr}Error: {done.exception}\n"
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def ffmem_process(*arguments, code="from ffmem.cli import main; main()", **options):
    """Run the command in a process of its own."""
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        encoding="latin-1" if "PYTHONIOENCODING" in options.get("env", {}) else "utf-8",
        env=environment | options.pop("env", {}),
        check=False,
        **options,
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name):
    command = COMMANDS[name]
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.name}"
    command._help_option = None  # click keeps that of the first context, which a test may have made
    for flag in ("-h", "--help"):
        code, out, err = run(name, flag)
        assert (code, err) == (0, "")
        assert command.help.split("\n")[0][:30] in out


def test_the_commands_of_the_contract_are_there():
    assert {
        *("describe", "index", "extend", "merge", "show", "search", "export", "demo", "verify"),
        *("trace", "effect", "edit", "compare", "experiment", "report"),
    } <= set(COMMANDS)
    options = {flag for parameter in COMMANDS["index"].params for flag in parameter.opts}
    assert {
        *("--out", "-t", "--unit", "--prefixes", "--compat", "--dtype", "--start", "--detokenize"),
        *("--batch-tokens", "--threads", "--limit", "--device"),
    } <= options


def every_command():
    """Return every command and subcommand by its whole name."""
    found = dict(COMMANDS)
    for name, command in COMMANDS.items():
        inner = getattr(command, "commands", {})
        found |= {f"{name} {below}": one for below, one in inner.items()}
    return found


@pytest.mark.parametrize(("name", "command"), every_command().items())
def test_the_help_of_a_command_is_a_sentence_that_fits_one_line(name, command):
    first = " ".join(command.help.split("\n\n")[0].split())
    assert len(first) < 60
    assert re.fullmatch(r"[A-Z][a-z]+ .*\.", first)


def test_the_list_of_commands_says_what_their_own_help_says():
    lines = run("--help")[1].split("and exit.\n\n")[1].splitlines()
    own = {name: command.help.split("\n")[0] for name, command in COMMANDS.items()}
    assert dict(line[10:].split(maxsplit=1) for line in lines) == own
    assert {name: help for name, (_, help) in cli.COMMANDS.items()} == own
    groups = [line[:10].strip() for line in lines if line[:10].strip()]
    assert groups == ["Index", "Look", "Measure", "Change", "Annotate", "Share", "Serve"]


def test_the_help_fits_one_screen(monkeypatch):
    for columns in ("80", "100", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = run("--help")[1].splitlines()
        assert len(lines) <= 40
        assert max(map(len, lines)) <= min(int(columns), 100)


def test_help_imports_no_command():
    code = (
        "import sys\nfrom ffmem.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "ours = {name for name in sys.modules if name.startswith('ffmem')}\n"
        "print(sorted(ours), 'numpy' in sys.modules, file=sys.stderr)"
    )
    done = ffmem_process("--help", code=code)
    assert done.stderr == "['ffmem', 'ffmem.cli', 'ffmem.errors'] False\n"


def test_without_a_command_the_help_is_shown():
    code, out, err = run()
    assert "key-value memories" in out + err
    assert code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["show"],
        ["show", "somewhere", "L0N0", "--no-such-option"],
        ["no-such-command"],
        ["index", "model", "corpus"],
        ["index", "model", "corpus", "--out", "x", "-t", "many"],
        ["index", "model", "corpus", "--out", "x", "-t", "99999999999"],
        ["index", "model", "corpus", "--out", "x", "--threads", "100000"],
        ["report", "somewhere", "--out", "x", "--corpus", "c", "--threads", "100000"],
        ["report", "somewhere", "--out", "x", "--corpus", "c", "--sample", "9" * 5000],
        ["train", "--memory", "relu", "--layers", "1", "--cutoffs", "9" * 5000],
        ["index", "model", "corpus", "--out", "x", "--prefixes", "some"],
        ["index", "model", "corpus", "--out", "x", "--compat", "theirs"],
        ["index", "model", "corpus", "--out", "x", "--dtype", "int8"],
        ["search", "somewhere", "word", "--in", "keys"],
        ["search", "somewhere", "word", "--limit", "0"],
        ["export", "somewhere", "out", "--to", "xml"],
    ],
)
def test_wrong_usage_ends_with_code_2(arguments):
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert "Usage:" in err


def test_show_prints_what_the_contract_says_and_nothing_else(tiny_index):
    code, out, err = run("show", tiny_index.folder, "1.5", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {**tiny_index["L1N5"].to_dict(), "patterns": []}
    code, out, err = run("show", tiny_index.folder, "L1D5")
    assert (code, err) == (0, "")
    assert out == f"{tiny_index['L1N5']}\n"
    code, out, err = run("show", tiny_index.folder, "L1D5", "--top", 2)
    assert (code, err) == (0, "")
    assert out == f"{tiny_index['L1N5'].format(2)}\n"
    assert "The first 2 of " in out


def test_search_prints_its_hits(tiny_index):
    hits = ffmem.search(tiny_index, "river", place="triggers", limit=3)
    folder = tiny_index.folder
    code, out, _ = run("search", folder, "river", "--in", "triggers", "--limit", 3, "--json")
    assert (code, json.loads(out)) == (0, [hit.to_dict() for hit in hits])
    code, out, _ = run("search", folder, "river", "--in", "triggers", "--limit", "3")
    assert [line.split()[0] for line in out.splitlines()] == [hit.cell for hit in hits]
    code, out, _ = run("search", folder, "^ ", "--regex", "--layer", "1", "--json")
    groups = json.loads(out)["groups"]
    assert [group["place"] for group in groups] == ["values", "triggers"]
    assert {hit["cell"][:2] for group in groups for hit in group["hits"]} == {"L1"}
    filters = ("--sign", "-1", "--rank", "2", "--max-active", "0.9", "--bank", "dense")
    code, out, _ = run("search", folder, "the", "--in", "triggers", *filters, "--json")
    assert {(hit["side"], hit["rank"] <= 2) for hit in json.loads(out)} == {("negative", True)}
    assert run("search", folder, "the", "--rank", "0")[0] == 2
    assert run("search", folder, "the", "--bank", "E7")[0] == 1


def test_nothing_found_is_an_answer_and_no_error(tiny_index):
    values = ("--in", "values")
    assert run("search", tiny_index.folder, "zebra", *values, "--json") == (0, "[]\n", "")
    code, out, _ = run("search", tiny_index.folder, "zebra", *values)
    assert (code, out) == (0, "No memory has 'zebra' in its values.\n")
    code, out, _ = run("search", tiny_index.folder, "zebra")
    assert (code, out.splitlines()[0]) == (0, "No memory has 'zebra' in its values or triggers.")


@pytest.mark.parametrize("arguments", [["show", "L0N0", "--json"], ["search", "the"]])
def test_show_and_search_load_no_heavy_library(tiny_index, arguments):
    code = (
        "import sys\nfrom ffmem.cli import main\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
        "slow = {'torch', 'transformers', 'tokenizers', 'datasets', 'sentencex', 'jaxtyping',"
        " 'pyarrow.compute', 'pandas'}\n"
        "print(sorted(slow & sys.modules.keys()), file=sys.stderr)"
    )
    command, *rest = arguments
    done = ffmem_process(command, tiny_index.folder, *rest, code=code)
    assert done.returncode == 0
    assert done.stdout
    assert done.stderr == "[]\n"


def test_an_interrupt_is_code_1_without_a_word(tiny_index, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(ffmem, "open", interrupt)
    assert run("show", tiny_index.folder, "L0N0") == (1, "", "")


def test_an_interrupted_command_that_resumes_says_so_once(tmp_path, model_folder, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    (tmp_path / "text.txt").write_text("w3 w4 w5\n" * 4)
    monkeypatch.setattr("ffmem.indexing.worker.IndexWorker.read_chunk", interrupt)
    arguments = ("index", model_folder, tmp_path / "text.txt", "--out", tmp_path / "index")
    code, _, told = run(*arguments)
    assert code == 1
    assert told.splitlines()[-1] == "Interrupted. Rerun the command to resume."
    assert told.count("Rerun") == 1
    monkeypatch.setattr(ffmem, "estimate", interrupt)
    assert run(*arguments, "--dry-run")[::2] == (1, "")


def test_an_error_is_one_line_and_code_1(tiny_index):
    done = ffmem_process("show", tiny_index.folder, "L9N0")
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"Error: There is no memory L9N0: .*\n", done.stderr)


def test_a_reader_that_has_gone_is_no_crash(tiny_index):
    code = (
        "import os\nreading, writing = os.pipe()\nos.close(reading)\nos.dup2(writing, 1)\n"
        "from ffmem.cli import main\nmain()"
    )
    done = ffmem_process("show", tiny_index.folder, "L0N0", "--json", code=code)
    assert done.stderr == ""


def test_a_terminal_with_few_characters_gets_escapes_and_no_crash(tiny_index):
    done = ffmem_process("show", tiny_index.folder, "L0N0", env={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\u2192" in done.stdout


def errors():
    yield ["show", "nowhere", "L0N0"], "no index at nowhere: no such folder"
    yield ["show", "INDEX", "river"], "'river' is not the name of a memory"
    yield ["show", "INDEX", "L0N24"], "no memory L0N24"
    yield ["show", "full.txt", "L0N1"], "full.txt is a file, not an index folder. Pass the folder"
    yield ["serve", "full.txt"], "full.txt is a file, not an index folder"
    yield ["index", "MODEL", "INDEX", "--out", "i"], "is an index, not a corpus"
    yield ["trace", "MODEL", "a", "--force", "E3"], "'E3' is not the name of an expert"
    yield ["show", "INDEX", f"L{'9' * 5000}N1"], "no model has that many"
    yield ["search", "INDEX", "a(?R)?b", "--regex"], "searches do not support"
    yield ["search", "INDEX", "(?:(?:a{1000}){1000}){4}", "--regex"], "is too large"
    yield ["search", "INDEX", " "], "The query is empty"
    yield ["search", "INDEX", "(", "--regex"], "not a valid regular expression"
    yield ["search", "INDEX", "x", "--in", "patterns"], "no patterns yet"
    yield ["search", "INDEX", "x", "--layer", "5"], "no layer 5"
    yield ["verify", "nowhere"], "no such folder"
    yield ["export", "INDEX", ".", "--to", "csv"], "is a folder"
    yield ["merge", "INDEX", "--out", "m"], "at least two"
    yield ["describe", "no/such/model.gguf"], "No model"
    yield ["describe", "."], "is not a model"
    yield ["index", "MODEL", "missing.txt", "--out", "i"], "missing.txt"
    yield ["index", "MODEL", "empty.txt", "--out", "i"], "no sentence in"
    yield ["index", "MODEL", "empty.txt", "--out", "i", "--unit", "page"], "page"
    yield ["index", "MODEL", "full.txt", "--out", "i", "--start", "zebra"], "'zebra' is not a"
    yield ["index", "MODEL", "full.txt", "--out", "i", "--device", "abacus"], "abacus"
    yield ["index", "fairseq", "full.txt", "--out", "i"], "dict.txt"
    yield ["index", "MODEL", "full.txt", "--out", "INDEX"], "finished index with other settings"
    yield ["index", "MODEL", "full.txt", "--out", "."], "contains other files, but no index"


@pytest.mark.parametrize(("arguments", "message"), [*errors()])
def test_an_error_says_what_is_wrong(
    arguments, message, tiny_index, model_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("\n\n \n")
    (tmp_path / "full.txt").write_text("The river.\n")
    (tmp_path / "fairseq").mkdir()
    (tmp_path / "fairseq/model.pt").write_bytes(b"")
    places = {"INDEX": tiny_index.folder, "MODEL": model_folder}
    code, out, err = run(*(places.get(argument, argument) for argument in arguments))
    assert (code, out) == (1, "")
    last = err.splitlines()[-1]
    assert last.startswith("Error: ")
    assert message in last


def test_an_index_is_made_shown_extended_merged_exported_and_verified(
    model_folder, corpus_file, tmp_path
):
    made = tmp_path / "made"
    common = ("--unit", "line", "-t", "4", "--threads", "1")
    code, out, err = run("index", model_folder, corpus_file, "--out", made, *common)
    assert code == 0
    assert out == f"{ffmem.open(made)!r}\n"
    assert (
        f"Reading {corpus_file}.\nMeasuring start tokens and perplexity.\nCorpus: 24 sentences"
        in err
    )
    code, out, err = run("index", model_folder, corpus_file, "--out", made, *common)
    assert (code, "finished: nothing to do" in err) == (0, True)
    assert run("verify", made)[:2] == (0, "OK: 15 files, 48 memories.\n")
    (tmp_path / "more.txt").write_text("A further river.\n")
    more = ("index", model_folder, tmp_path / "more.txt", "--out", tmp_path / "other", *common)
    start = ffmem.open(made).manifest.start
    assert run(*more, "--start", start.token or "none")[0] == 0
    assert run("merge", made, tmp_path / "other", "--out", tmp_path / "merged")[0] == 0
    assert run("extend", made, tmp_path / "more.txt", "--unit", "line")[0] == 0
    for name in ("made", "merged"):
        code, out, _ = run("verify", tmp_path / name)
        assert (code, out) == (0, "OK: 15 files, 48 memories.\n")
    code, out, err = run("export", made, tmp_path / "out.jsonl", "--to", "jsonl")
    assert (code, out) == (0, "")
    assert err.startswith("Wrote 48 memories to ")
    first = (tmp_path / "out.jsonl").read_text().split("\n")[0]
    shown = json.loads(run("show", made, "L0N0", "--json")[1])
    assert shown == {**json.loads(first), "patterns": []}


def test_verify_names_what_is_damaged(tiny_index, tmp_path):
    folder = shutil.copytree(tiny_index.folder, tmp_path / "index")
    for name in ("values/layer-000.parquet", "stats/layer-001.parquet"):
        (folder / name).unlink()
    code, out, err = run("verify", folder)
    assert (code, out) == (1, "")
    assert "stats/layer-001.parquet is missing" in err
    assert "values/layer-000.parquet is missing" in err


def test_describe_prints_facts(model_folder):
    code, out, err = run("describe", model_folder, "--json")
    assert (code, err) == (0, f"Loading {model_folder}.\n")
    facts = json.loads(out)
    assert (facts["family"], facts["layers"], facts["memories"]) == ("llama", 2, 24)
    code, out, _ = run("describe", model_folder)
    assert re.search(r"^family +llama$", out, re.MULTILINE)


def test_a_corpus_comes_from_standard_input(model_folder, tmp_path):
    command = ("index", model_folder, "-", "--out", tmp_path / "index", "--unit", "line", "-t", "3")
    done = ffmem_process(*command, input="The river 😀\nin the city\n")
    assert done.returncode == 0, done.stderr
    assert "2 sentences" in done.stdout
    assert "\r" not in done.stderr  # no bar where there is no terminal


@pytest.mark.parametrize(
    "command",
    [
        ("describe", LONG),
        ("show", LONG, "L0N1"),
        ("index", "mini-wiki", LONG, "--out", "x"),
        ("index", "mini-wiki", "mini-wiki:valid", "--out", LONG),
        ("verify", LONG),
    ],
)
def test_a_name_that_no_file_can_have_is_an_error_of_one_line(command):
    done = ffmem_process(*command)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "too long" in done.stderr
    assert len(done.stderr) < 500


def test_a_dry_run_needs_no_folder_and_writes_none(tmp_path, model_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("the cat sat\na dog ran\n")
    code, out, err = run("index", model_folder, "corpus.txt", "--unit", "line", "--dry-run")
    stages = [f"Loading {model_folder}.", "Reading corpus.txt."]
    assert err.splitlines() == [*stages, "Measuring start tokens and speed."]
    assert code == 0
    assert "2 sentences" in out
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.txt"]
    made = ["index", model_folder, "corpus.txt", "--unit", "line", "--out", "made"]
    assert run(*made)[0] == 0
    code, out, _ = run(*made, "--dry-run")
    assert code == 0
    assert "made: Finished: Index(" in out
    assert "2 sentences" in out
    code, _, err = run("index", model_folder, "corpus.txt")
    assert code == 2
    assert "Missing option '--out'" in err


@pytest.mark.parametrize(("typed", "meant"), [("shwo", "show"), ("neighbor", "neighbours")])
def test_a_misspelled_command_is_suggested(typed, meant):
    done = CliRunner().invoke(cli.cli, [typed])
    assert done.exit_code == 2
    assert f"No such command '{typed}'. Did you mean '{meant}'?" in done.output


def test_a_dry_run_onto_a_file_is_no_traceback(model_folder, corpus_file, tmp_path):
    (tmp_path / "file").write_text("x")
    arguments = ["index", str(model_folder), str(corpus_file), "--unit", "line", "--dry-run"]
    done = CliRunner().invoke(cli.cli, [*arguments, "--out", str(tmp_path / "file")])
    assert done.exit_code == 0
    assert "tokens" in done.output


def test_neighbors_is_another_spelling_that_help_does_not_list():
    done = CliRunner().invoke(cli.cli, ["neighbors", "--help"])
    assert done.exit_code == 0
    assert "Find memories with similar values or keys." in done.output
    assert "neighbors" not in CliRunner().invoke(cli.cli, ["--help"]).output
