"""Every kind of damage is told, and a sound index is called sound."""

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ffmem
from ffmem.indexing.manifest import hash_files as hashes
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table
from ffmem.progress import Progress
from tests.indexing.folders import indexed, write_corpus

KINDS = [
    *("sentences.parquet", "vocabulary.parquet", "samples/prefixes.parquet"),
    *(
        layer_file(kind, 1)
        for kind in ("triggers", "stats", "samples", "values", "keys", "agreement")
    ),
]


@pytest.fixture
def folder(tiny_index, tmp_path):
    """A copy of the gated index."""
    return Path(shutil.copytree(tiny_index.folder, tmp_path / "index"))


@pytest.fixture
def authors(ungated_index, tmp_path):
    """A copy of the ungated index, made with --compat ff-layers."""
    return Path(shutil.copytree(ungated_index.folder, tmp_path / "authors"))


def edit_manifest(folder, change):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def tamper(folder, name, change):
    """Change the columns of a file so that all hashes match again."""
    columns = {key: np.array(column) for key, column in read_columns(folder / name).items()}
    change(columns)
    arrays = {
        key: fixed(column) if column.ndim == 2 else pa.array(column)
        for key, column in columns.items()
    }
    write_table(folder / name, pa.table(arrays))
    edit_manifest(folder, lambda manifest: manifest.update(files=hashes(folder)))


def test_a_sound_index_is_called_sound(index):
    assert ffmem.verify(index.folder) == []


@pytest.mark.parametrize("options", [{"prefixes": "all"}, {"start": "none"}, {"t": 1}])
def test_indexes_of_other_settings_are_sound(index_of, corpus_file, tmp_path, options):
    made = index_of("llama", str(corpus_file), tmp_path / "index", **options)
    assert ffmem.verify(made.folder) == []


def test_a_merged_index_is_sound(index_of, corpus_file, tmp_path):
    lines = corpus_file.read_text().splitlines()
    for number, part in enumerate((lines[:9], lines[9:])):
        (tmp_path / f"{number}.txt").write_text("\n".join(part))
        corpus = ffmem.Corpus(str(tmp_path / f"{number}.txt"), unit="line")
        index_of("gpt2", corpus, tmp_path / f"part-{number}", start="eos")
    merged = ffmem.merge([tmp_path / "part-0", tmp_path / "part-1"], tmp_path / "merged")
    assert ffmem.verify(merged.folder) == []


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("place", [5, 0.5, -5])
def test_one_flipped_byte_in_any_file_is_told(folder, name, place):
    content = bytearray((folder / name).read_bytes())
    content[int(len(content) * place) if isinstance(place, float) else place] ^= 1
    (folder / name).write_bytes(content)
    assert ffmem.verify(folder) == [
        f"{name} was changed or damaged: its hash differs from the manifest's."
    ]


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_file_is_told(folder, name):
    (folder / name).unlink()
    assert ffmem.verify(folder) == [f"{name} is missing."]


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_the_manifest_does_not_name_is_told(folder, name):
    edit_manifest(folder, lambda manifest: manifest["files"].pop(name))
    assert ffmem.verify(folder) == [f"{name} is not in the manifest."]


def test_a_foreign_file_is_told(folder):
    name = layer_file("values", 7)
    shutil.copy(folder / layer_file("values", 0), folder / name)
    assert ffmem.verify(folder) == [f"{name} is in the folder, but not in the manifest."]


@pytest.mark.parametrize("kind", ["triggers", "stats", "samples", "values"])
def test_two_swapped_files_are_told(folder, kind):
    one, two = (folder / layer_file(kind, layer) for layer in (0, 1))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    assert len(ffmem.verify(folder)) == 2


@pytest.mark.parametrize("kind", ["triggers", "stats", "samples"])
def test_two_files_swapped_with_their_hashes_break_an_invariant(folder, kind):
    one, two = (folder / layer_file(kind, layer) for layer in (0, 1))
    first = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(first)
    edit_manifest(folder, lambda manifest: manifest.update(files=hashes(folder)))
    assert ffmem.verify(folder)


def changed(name, row, column, value):
    def change(columns):
        columns[name][row, column] = value

    return change


def swapped(name):
    def change(columns):
        columns[name][0, [0, 1]] = columns[name][0, [1, 0]]

    return change


def set_row(name, value):
    def change(columns):
        columns[name][0] = value

    return change


def behind_a_vacant_slot(columns):
    columns["prefix"][0, 0], columns["coefficient"][0, 0], columns["gate"][0, 0] = -1, 0, 0


def from_one_sentence(columns):
    columns["prefix"][0, 1] = columns["prefix"][0, 0] + 1


TAMPERINGS = [
    ("triggers", swapped("coefficient"), "triggers are not in order"),
    ("triggers", swapped("negative_coefficient"), "negative_triggers are not in order"),
    ("triggers", changed("coefficient", 0, 0, 1e6), "first trigger is not the max"),
    ("triggers", changed("negative_coefficient", 0, 0, -1e6), "negative_trigger is not the min"),
    ("triggers", changed("coefficient", 0, 5, -1), "coefficient has the wrong sign"),
    ("triggers", changed("prefix", 0, 0, 10**6), "trigger is not a prefix of the corpus"),
    ("triggers", changed("prefix", 0, 0, 0), "trigger is not a prefix of the corpus"),
    ("triggers", changed("prefix", 0, 0, -5), "trigger is not a prefix of the corpus"),
    ("triggers", changed("gate", 0, 0, 0), "has no gate"),
    ("triggers", behind_a_vacant_slot, "follows an empty slot"),
    ("triggers", from_one_sentence, "are prefixes of one sentence"),
    ("triggers", set_row("memory", 9), "memories are not those of the model"),
    ("triggers", lambda columns: columns.pop("prefix"), "columns or rows of an index"),
    ("stats", set_row("max", 1e6), "first trigger is not the max"),
    ("stats", set_row("min", -1e6), "first negative_trigger is not the min"),
    ("stats", set_row("active", 10**6), "active on more prefixes than there are"),
    ("stats", set_row("sum", 12345), "mean is not the sum"),
    ("samples", changed("coefficient", 0, 0, 1e6), "sample lies beyond"),
    ("values", changed("top_ids", 0, 0, 320), "top token is not in the vocabulary"),
    ("values", changed("bottom_ids", 0, 0, -1), "bottom token is not in the vocabulary"),
    ("values", swapped("top_logits"), "top tokens are not in the order"),
    ("values", swapped("bottom_logits"), "bottom tokens are not in the order"),
    ("values", changed("top_probabilities", 0, 0, 2), "probability of a top token is not between"),
    ("values", set_row("memory", 9), "values do not cover the model"),
    ("stats", set_row("open_positive", 10**6), "sign cases of a memory do not add up"),
    ("stats", set_row("positive", 0), "max is above 0 on no prefix"),
    ("keys", changed("ids", 0, 0, 320), "token of a key is not in the vocabulary"),
    ("keys", swapped("scores"), "tokens of keys are not in the order"),
    ("keys", set_row("cos_gate_up", 1.5), "cos_gate_up is not between"),
    ("keys", set_row("memory", 9), "keys do not cover the model"),
    ("agreement", set_row("sign", 0), "agreement does not follow from"),
    ("agreement", set_row("agreement", 2), "agreement does not follow from"),
    ("agreement", set_row("followed", 99), "agreement does not follow from"),
    ("agreement", set_row("memory", 9), "agreement does not cover the model"),
    ("agreement", lambda columns: columns.pop("followable"), "agreement has the columns"),
]


@pytest.mark.parametrize(("kind", "change", "message"), TAMPERINGS)
def test_an_invariant_that_breaks_under_right_hashes_is_told(folder, kind, change, message):
    tamper(folder, layer_file(kind, 1), change)
    wrong = ffmem.verify(folder)
    assert any(message in sentence for sentence in wrong), wrong


def test_a_memory_without_triggers_has_no_coefficient_beyond_0(folder):
    def change(columns):
        for name, value in (("coefficient", 0), ("prefix", -1), ("gate", 0)):
            columns[name][0] = value

    tamper(folder, layer_file("triggers", 0), change)
    assert any("has no trigger, although its max is beyond 0" in s for s in ffmem.verify(folder))


def test_the_authors_prefixes_end_before_the_last_token(authors):
    index = ffmem.open(authors)
    first = index.sentences.row(0)
    end = first.offset + len(first.ids)
    tamper(authors, layer_file("triggers", 0), changed("prefix", 0, 0, end))
    assert any("not a prefix of the corpus" in sentence for sentence in ffmem.verify(authors))


@pytest.mark.parametrize("name", ["prefix", "hash"])
def test_another_sample_is_told(folder, name):
    def change(columns):
        columns[name][0] += 1

    tamper(folder, "samples/prefixes.parquet", change)
    assert any("smallest hashes" in sentence for sentence in ffmem.verify(folder))


def test_a_vocabulary_of_another_size_is_told(folder):
    table = pq.read_table(folder / "vocabulary.parquet")
    write_table(folder / "vocabulary.parquet", table[:-1])
    edit_manifest(folder, lambda manifest: manifest.update(files=hashes(folder)))
    assert ffmem.verify(folder) == ["vocabulary.parquet has 319 tokens."]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("text", "another text", "do not have the hash"),
        ("offset", 3, "do not follow from the lengths"),
        ("sentence", 3, "do not follow from the lengths"),
    ],
)
def test_other_sentences_are_told(folder, column, value, message):
    table = pq.read_table(folder / "sentences.parquet")
    place = table.column_names.index(column)
    changed = [value, *table[column].to_pylist()[1:]]
    field = table.schema.field(column)
    table = table.set_column(place, field, pa.array(changed, field.type))
    pq.write_table(table, folder / "sentences.parquet", row_group_size=128)
    edit_manifest(folder, lambda manifest: manifest.update(files=hashes(folder)))
    assert any(message in sentence for sentence in ffmem.verify(folder))


@pytest.mark.parametrize("count", ["sentences", "tokens"])
def test_a_manifest_with_another_count_is_told(folder, count):
    edit_manifest(folder, lambda manifest: manifest["corpus"].update({count: 5}))
    assert any("the manifest says" in sentence for sentence in ffmem.verify(folder))


def test_a_manifest_with_another_t_is_told(folder):
    edit_manifest(folder, lambda manifest: manifest.update(t=7))
    assert any(
        "number of triggers per memory is not 7" in sentence for sentence in ffmem.verify(folder)
    )


SEARCH_DAMAGE = {
    "emptied": lambda path: path.write_bytes(b""),
    "random": lambda path: path.write_bytes(random.Random(0).randbytes(9000)),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-4096]),
    "one byte": lambda path: path.write_bytes(
        path.read_bytes()[:-500] + b"#" + path.read_bytes()[-499:]
    ),
    "without rows": lambda path: execute(path, "DELETE FROM sentences"),
    "without an index": lambda path: execute(path, "DROP TABLE words"),
}


def execute(path, statement):
    with closing(sqlite3.connect(path)) as base:
        base.execute(statement)
        base.commit()


@pytest.mark.parametrize("damage", SEARCH_DAMAGE)
def test_a_search_file_that_does_not_fit_is_made_again_and_it_is_said(folder, damage, capsys):
    path = folder / "search.sqlite"
    ffmem.search(folder, "the")
    whole = path.read_bytes()
    assert ffmem.verify(folder, Progress()) == []
    assert capsys.readouterr().err == ""
    SEARCH_DAMAGE[damage](path)
    assert path.read_bytes() != whole
    assert ffmem.verify(folder, Progress()) == []
    assert capsys.readouterr().err == "search.sqlite was out of date and has been rebuilt.\n"
    assert path.read_bytes() == whole
    path.unlink()
    assert ffmem.verify(folder) == []  # the first search makes it


def test_a_search_file_that_cannot_be_made_again_is_told(folder):
    (folder / "search.sqlite").unlink(missing_ok=True)
    (folder / "search.sqlite").mkdir()
    (wrong,) = ffmem.verify(folder)
    assert wrong.startswith("search.sqlite is out of date and cannot be rebuilt. ")


def test_an_open_index_is_verified_as_it_is_now(tmp_path):
    index = indexed(tmp_path / "index", write_corpus(tmp_path / "corpus.txt"))
    assert ffmem.verify(index) == []
    (index.folder / "stats" / "layer-001.parquet").unlink()
    assert ffmem.verify(index) != []
