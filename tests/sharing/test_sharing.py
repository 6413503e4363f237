"""Indexes on the Hub: pushed, pulled and read in parts, by the real client from a server here."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys

import huggingface_hub.constants
import pytest
from transformers import AutoConfig

import ffmem
from ffmem.cells import Cell
from ffmem.errors import FfmemError, HubError, StoreError
from ffmem.hub import parse_repository
from ffmem.indexing.tables import layer_file
from ffmem.patterns.store import ExaminedList, Pattern, PatternWriter, open_patterns
from ffmem.sharing.card import TABLES
from tests import conftest, hub_server

REPOSITORY = "lab/tiny"

# huggingface_hub uploads a file in a way that its own HTTP client calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<.*>' to upload:DeprecationWarning")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub, server = hub_server.start()
    for name, value in {
        "ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    yield hub
    server.shutdown()
    server.server_close()


@pytest.fixture
def pushed(hub, tiny_index):
    ffmem.push(tiny_index, REPOSITORY)
    return hub


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def add_patterns(folder):
    """Write a pattern for every other memory of an index."""
    index = ffmem.open(folder)
    writer = PatternWriter(index, "automatic")
    for layer in range(index.n_layers):
        cells = [cell for cell in index if cell.layer == layer]
        lists = [ExaminedList(cell, 1, 6) for cell in cells]
        found = [
            Pattern(cell, 1, 1, "shallow", f"ends with {cell}", "last-token", "a", (1, 2, 3))
            for cell in cells[::2]
        ]
        writer.layer(layer, lists, found)
    writer.commit({})


@pytest.fixture(scope="module")
def wide_index(index_of, corpus_file, tmp_path_factory):
    """A model with 2,048 memories in a layer, so that most row groups are not needed for one."""
    config = conftest.TINY["llama"]
    wide = AutoConfig.for_model(**config.to_dict() | {"intermediate_size": 2048})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(conftest.TINY, "wide", wide)
        corpus = ffmem.Corpus(str(corpus_file), unit="line")
        return index_of("wide", corpus, tmp_path_factory.mktemp("wide") / "index")


def test_what_is_pulled_is_what_was_pushed(pushed, tiny_index, tmp_path):
    pulled = ffmem.pull(REPOSITORY, tmp_path / "here")
    there = contents(pulled.folder)
    assert there == {name: contents(tiny_index.folder)[name] for name in there}
    assert there.keys() == {"manifest.json", *tiny_index.manifest.files}
    assert ffmem.verify(pulled.folder) == []
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_dataset_has_a_card_with_the_tables_of_the_viewer(hub, tiny_index):
    ffmem.push(tiny_index, REPOSITORY, license="cc-by-sa-4.0", private=True)
    assert hub.repositories[REPOSITORY].private
    files = hub.files(REPOSITORY)
    _, metadata, text = files["README.md"].decode().split("---\n", 2)
    assert "license: cc-by-sa-4.0\n" in metadata
    tables = re.findall(r'- config_name: (\w+)\n  data_files: "(.*)"', metadata)
    assert tables == [item for item in TABLES.items() if item[0] != "patterns"]
    (cell,) = set(re.findall(rf"ffmem show hf:{REPOSITORY} (\w+)", text))
    for line in str(tiny_index[cell]).splitlines():
        assert f"    {line}".rstrip() in text.splitlines()
    assert tiny_index.manifest.model.hash in text
    assert str(tiny_index.folder) not in text


def test_patterns_go_with_the_index(hub, tiny_index, tmp_path):
    folder = shutil.copytree(tiny_index.folder, tmp_path / "index")
    add_patterns(folder)
    here = ffmem.open(folder)
    ffmem.push(folder, REPOSITORY)
    assert "patterns/*/found/*.parquet" in hub.files(REPOSITORY)["README.md"].decode()
    remote = ffmem.open(f"hf:{REPOSITORY}")
    (near,), (far,) = open_patterns(here), open_patterns(remote)
    assert any(near.of(cell) for cell in here)
    for cell in here:
        assert far.of(cell) == near.of(cell)
    assert contents(ffmem.pull(REPOSITORY, tmp_path / "there").folder / "patterns" / "automatic")


def test_a_memory_on_the_hub_is_the_same_as_here(hub, index):
    ffmem.push(index, REPOSITORY)
    remote = ffmem.open(f"hf:{REPOSITORY}")
    for cell in list(index)[::7]:
        assert remote[cell].to_dict() == index[cell].to_dict()
    for table in ("stats", "values", "triggers", "samples"):
        assert remote.table(table, layer=1).equals(index.table(table, layer=1))
    assert repr(remote) == repr(index).replace(str(index.folder), f"hf:{REPOSITORY}")


def test_a_memory_takes_a_few_per_cent_of_the_bytes(hub, wide_index):
    ffmem.push(wide_index, REPOSITORY)
    total = sum(map(len, hub.files(REPOSITORY).values()))
    hub.bytes_sent = 0
    remote = ffmem.open(f"hf:{REPOSITORY}")
    assert remote["L1N1000"].to_dict() == wide_index["L1N1000"].to_dict()
    assert 0 < hub.bytes_sent < 0.08 * total
    before = hub.bytes_sent
    assert remote["L1N1001"].to_dict() == wide_index["L1N1001"].to_dict()
    assert hub.bytes_sent == before  # it is in the same row group


@pytest.mark.parametrize("kind", ["triggers", "samples", "values"])
def test_a_part_that_is_short_or_changed_is_an_error(kind, hub, wide_index):
    ffmem.push(wide_index, REPOSITORY)
    file = layer_file(kind, 1)
    hub.truncate = file
    with pytest.raises(HubError, match=r"bytes arrived\. Rerun"):
        ffmem.open(f"hf:{REPOSITORY}")["L1N3"]
    hub.truncate, hub.corrupt = "", file
    with pytest.raises(StoreError, match=r"The download is damaged"):
        ffmem.open(f"hf:{REPOSITORY}")["L1N3"]


@pytest.mark.parametrize("file", ["sentences.parquet", layer_file("values", 1)])
def test_a_truncated_download_leaves_nothing(file, pushed, tmp_path):
    pushed.truncate = file
    with pytest.raises(HubError, match=r"Consistency check failed|bytes arrived"):
        ffmem.pull(REPOSITORY, tmp_path / "here")
    assert not (tmp_path / "here").exists()
    pushed.truncate = ""
    assert ffmem.verify(ffmem.pull(REPOSITORY, tmp_path / "here").folder) == []
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


@pytest.mark.parametrize("file", ["sentences.parquet", layer_file("triggers", 0)])
def test_a_changed_byte_is_found_on_arrival(file, pushed, tmp_path):
    pushed.corrupt = file
    with pytest.raises(HubError, match=rf"{file} arrived damaged: .* Rerun"):
        ffmem.pull(REPOSITORY, tmp_path / "here")
    assert not (tmp_path / "here").exists()
    pushed.corrupt = ""
    assert ffmem.verify(ffmem.pull(REPOSITORY, tmp_path / "here").folder) == []


def test_a_file_that_was_replaced_on_the_hub_is_refused_before_it_is_read(pushed, tmp_path):
    files = pushed.files(REPOSITORY)
    name = layer_file("stats", 1)
    pushed.put(REPOSITORY, files | {name: files[layer_file("stats", 0)]})
    pushed.bytes_sent = 0
    with pytest.raises(HubError, match=f"{name} is damaged: its hash differs"):
        ffmem.pull(REPOSITORY, tmp_path / "here")
    assert pushed.bytes_sent == len(files["manifest.json"])
    with pytest.raises(HubError, match=f"{name} is damaged: its hash differs"):
        ffmem.open(f"hf:{REPOSITORY}")["L1N0"]
    assert ffmem.open(f"hf:{REPOSITORY}")["L0N0"].cell == Cell(0, 0)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"train.parquet": b"x"}, "a dataset, but not an ffmem index: it has no manifest.json"),
        ({"manifest.json": b'{"name": "some app"}'}, "has the format None"),
        ({"manifest.json": b"no JSON"}, "Cannot read the manifest hf:lab/other/manifest.json"),
    ],
    ids=["no manifest", "another manifest", "no JSON"],
)
def test_a_repository_that_is_not_an_index_is_refused(files, message, hub, tmp_path):
    hub.put("lab/other", files)
    for ask in (
        lambda: ffmem.open("hf:lab/other"),
        lambda: ffmem.pull("lab/other", tmp_path / "here"),
    ):
        with pytest.raises(FfmemError, match=re.escape(message)):
            ask()
    assert list(tmp_path.iterdir()) == []


def test_a_manifest_cannot_name_files_elsewhere(pushed, tmp_path):
    files = pushed.files(REPOSITORY)
    manifest = json.loads(files["manifest.json"])
    manifest["files"]["../evil.parquet"] = hashlib.sha256(b"evil").hexdigest()
    evil = {"manifest.json": json.dumps(manifest).encode(), "../evil.parquet": b"evil"}
    pushed.put(REPOSITORY, files | evil)
    with pytest.raises(HubError, match=r"names '\.\./evil\.parquet', which no index has"):
        ffmem.pull(REPOSITORY, tmp_path / "here")


def test_an_index_without_a_file_is_refused(pushed, tmp_path):
    files = pushed.files(REPOSITORY)
    del files["vocabulary.parquet"]
    pushed.put(REPOSITORY, files)
    with pytest.raises(HubError, match=r"lacks the file vocabulary\.parquet"):
        ffmem.pull(REPOSITORY, tmp_path / "here")


def test_no_such_repository_revision_or_name(pushed, monkeypatch):
    with pytest.raises(HubError, match="There is no dataset lab/none on the Hub, or you may not"):
        ffmem.open("hf:lab/none")
    with pytest.raises(HubError, match="has no such revision"):
        ffmem.open(f"hf:{REPOSITORY}@v9")
    for name in ("hf:", "hf:name", "hf:a/b/c", "hf:../x", "hf:a/b@"):
        with pytest.raises(HubError, match="is not the name of a dataset"):
            ffmem.open(name)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match="Check the network"):
        ffmem.open(f"hf:{REPOSITORY}")


def test_a_private_dataset_needs_a_token_which_no_error_shows(hub, tiny_index, monkeypatch):
    ffmem.push(tiny_index, REPOSITORY, private=True)
    assert ffmem.open(f"hf:{REPOSITORY}")["L0N0"].cell == Cell(0, 0)
    monkeypatch.setenv("HF_TOKEN", "hf_of_somebody_else")
    for ask in (
        lambda: ffmem.open(f"hf:{REPOSITORY}"),
        lambda: ffmem.push(tiny_index, REPOSITORY),
        lambda: ffmem.push(tiny_index, "lab/more"),
    ):
        with pytest.raises(HubError, match="hf auth login") as refused:
            ask()
        assert "hf_of" not in str(refused.value)


def test_revisions(hub, tiny_index, ungated_index, tmp_path):
    ffmem.push(tiny_index, REPOSITORY)
    pushed = ffmem.push(ungated_index, REPOSITORY, revision="v2")  # main keeps its own
    assert f"ffmem show hf:{REPOSITORY}@v2 " in str(pushed)
    assert ffmem.open(f"hf:{REPOSITORY}").manifest == tiny_index.manifest
    assert ffmem.open(f"hf:{REPOSITORY}@v2").manifest == ungated_index.manifest
    assert f"ffmem pull {REPOSITORY} DIR --revision v2" in (
        hub.files(REPOSITORY, "v2")["README.md"].decode()
    )
    pulled = ffmem.pull(REPOSITORY, tmp_path / "here", revision="v2")
    assert pulled.manifest == ungated_index.manifest
    commit = hub.repositories[REPOSITORY].branches["main"]
    assert ffmem.pull(f"{REPOSITORY}@{commit}", tmp_path / "old").manifest == tiny_index.manifest


def test_another_index_is_replaced_only_on_request_and_whole(
    hub, tiny_index, ungated_index, tmp_path
):
    folder = shutil.copytree(ungated_index.folder, tmp_path / "index")
    add_patterns(folder)
    ffmem.push(folder, REPOSITORY)
    before = hub.files(REPOSITORY)
    assert any(name.startswith("patterns/") for name in before)
    with pytest.raises(HubError, match=r"already has another index: .*`replace=True`"):
        ffmem.push(tiny_index, REPOSITORY)
    assert hub.files(REPOSITORY) == before
    ffmem.push(tiny_index, REPOSITORY, replace=True)
    assert hub.files(REPOSITORY).keys() == {
        *(".gitattributes", "README.md", "manifest.json"),
        *tiny_index.manifest.files,
    }
    n_commits = len(hub.repositories[REPOSITORY].commits)
    ffmem.push(tiny_index, REPOSITORY)  # the same once more: nothing to do
    assert len(hub.repositories[REPOSITORY].commits) == n_commits


def test_a_dataset_of_another_kind_is_never_overwritten(hub, tiny_index):
    hub.put("lab/other", {".gitattributes": b"", "README.md": b"#", "train.csv": b"a"})
    for replace in (False, True):
        with pytest.raises(HubError, match=r"not an ffmem index: it has train\.csv"):
            ffmem.push(tiny_index, "lab/other", replace=replace)
    hub.put("lab/new", {".gitattributes": b"", "README.md": b"#"})
    with pytest.raises(HubError, match="exists and is public"):
        ffmem.push(tiny_index, "lab/new", private=True)
    ffmem.push(tiny_index, "lab/new")
    assert ffmem.open("hf:lab/new").manifest == tiny_index.manifest


def test_a_push_that_fails_leaves_the_dataset_as_it_was(hub, tiny_index, ungated_index):
    ffmem.push(tiny_index, REPOSITORY)
    for route in ("/upload/", "/commit/"):
        hub.fail = route
        with pytest.raises(FfmemError):
            ffmem.push(ungated_index, REPOSITORY, replace=True)
        hub.fail = ""
        assert ffmem.open(f"hf:{REPOSITORY}").manifest == tiny_index.manifest


def test_only_a_whole_index_is_pushed(hub, tiny_index, tmp_path):
    folder = shutil.copytree(tiny_index.folder, tmp_path / "index")
    path = folder / layer_file("values", 0)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StoreError, match=r"is damaged, so it was not pushed: values/layer-000"):
        ffmem.push(folder, REPOSITORY)
    (folder / "manifest.json").unlink()
    (folder / "partials").mkdir()
    with pytest.raises(StoreError, match="is not finished"):
        ffmem.push(folder, REPOSITORY)
    with pytest.raises(HubError, match="is not a license id"):
        ffmem.push(tiny_index, REPOSITORY, license="my own: yes")
    assert hub.repositories == {}


def test_a_folder_that_is_there_is_kept(pushed, tiny_index, ungated_index, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(StoreError, match="exists and is not empty"):
        ffmem.pull(REPOSITORY, tmp_path / "notes")
    other = shutil.copytree(ungated_index.folder, tmp_path / "other")
    with pytest.raises(StoreError, match="has another index"):
        ffmem.pull(REPOSITORY, other)
    here = ffmem.pull(REPOSITORY, tmp_path / "here").folder
    pushed.bytes_sent = 0
    ffmem.pull(REPOSITORY, here)  # it is there already
    assert pushed.bytes_sent < 2 * len(pushed.files(REPOSITORY)["manifest.json"])
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


def test_what_needs_the_whole_index_says_to_pull_it(pushed, tmp_path):
    remote = ffmem.open(f"hf:{REPOSITORY}")
    for ask in (
        lambda: ffmem.search(remote, "the"),
        lambda: ffmem.search(f"hf:{REPOSITORY}", "the"),
        lambda: ffmem.export(remote, "csv", tmp_path / "x.csv"),
        lambda: ffmem.verify(f"hf:{REPOSITORY}"),
        lambda: ffmem.detect(remote),
        lambda: ffmem.trace(f"hf:{REPOSITORY}", "a"),
    ):
        with pytest.raises(StoreError, match=f"Run `ffmem pull {REPOSITORY} DIR`"):
            ask()


def test_the_command_reads_the_hub_and_nothing_else_imports_it(pushed, tiny_index, tmp_path):
    program = (
        "import sys\nfrom ffmem.cli import main\ntry:\n    main()\nfinally:\n"
        "    print({'torch', 'huggingface_hub', 'mcp'} & set(sys.modules), file=sys.stderr)"
    )
    environment = os.environ | {
        "HF_ENDPOINT": pushed.url,
        "HF_TOKEN": hub_server.TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path),
    }

    def run(*arguments):
        command = [sys.executable, "-c", program, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    here = run("show", tiny_index.folder, "L1N3", "--json")
    assert here.stderr == "set()\n"
    there = run("show", f"hf:{REPOSITORY}", "L1N3", "--json")
    assert there.stdout == here.stdout
    assert there.stderr == "{'huggingface_hub'}\n"
    unknown = run("show", f"hf:{REPOSITORY}", "L9N9999")
    assert unknown.returncode == 1
    assert "Error: " in unknown.stderr
    assert "Traceback" not in unknown.stderr


@pytest.mark.parametrize(
    ("name", "parsed"),
    [("a/b", ("a/b", None)), ("hf:a/b@v1", ("a/b", "v1")), ("a/b@refs/pr/1", ("a/b", "refs/pr/1"))],
)
def test_names_of_repositories(name, parsed):
    assert parse_repository(name) == parsed
