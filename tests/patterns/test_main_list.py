"""One list stands for a memory: that of its strongest trigger, whatever the sign."""

import shutil
import subprocess
import sys

import pyarrow as pa
import pytest

import ffmem
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.tables import fixed, layer_file, read_columns, write_table
from ffmem.patterns.main_list import main_prefixes, main_sign
from tests.indexing.folders import indexed, memories, write_corpus
from tests.tiny import TINY


def by_hand(memory):
    """Return (sign, triggers) of a memory's main list as the definition says it."""
    up, down = memory.triggers, memory.negative_triggers
    if not up and not down:
        return 0, []
    if not down or (up and abs(up[0].coefficient) >= abs(down[0].coefficient)):
        return 1, up
    return -1, down


def compare(index, top):
    for layer in range(index.n_layers):
        signs, prefixes = main_sign(index, layer), main_prefixes(index, layer, top)
        for memory in index.memories(layer):
            sign, triggers = by_hand(memory)
            places = [
                index.sentences.row(one.sentence).offset + one.length for one in triggers[:top]
            ]
            assert signs[memory.cell.memory] == sign
            assert prefixes[memory.cell.memory].tolist() == places + [NO_PREFIX] * (
                top - len(places)
            )


@pytest.mark.parametrize("top", [1, 4, 60])
def test_the_main_list_is_the_one_with_the_strongest_trigger(index, top):
    compare(index, top)


@pytest.mark.parametrize("name", ["arcee", "bloom", "gemma2", "opt", "qwen3"])
def test_every_kind_of_family_has_main_lists(name, tmp_path):
    assert name in TINY
    made = indexed(tmp_path / "index", write_corpus(tmp_path / "lines.txt", 20), memories(name))
    compare(made, 3)


def test_equals_go_to_the_positive_list_and_nothing_has_no_sign(tiny_index, tmp_path):
    shutil.copytree(tiny_index.folder, tmp_path / "index")
    path = tmp_path / "index" / layer_file("triggers", 0)
    columns = {name: column.copy() for name, column in read_columns(path).items()}
    firsts = {
        "coefficient": [2.0, 1.0, 0.0, 0.0],
        "prefix": [7, 7, NO_PREFIX, NO_PREFIX],
        "negative_coefficient": [-2.0, -3.0, -0.5, 0.0],
        "negative_prefix": [9, 9, 9, NO_PREFIX],
    }
    for name, values in firsts.items():
        columns[name][:4, 0] = values
        if name.endswith("prefix"):
            columns[name][:4, 1:] = NO_PREFIX
    table = {name: fixed(c) if c.ndim == 2 else c for name, c in columns.items()}
    write_table(path, pa.table(table))
    index = ffmem.open(tmp_path / "index")
    assert main_sign(index, 0)[:4].tolist() == [1, -1, -1, 0]
    expected = [[7, NO_PREFIX], [9, NO_PREFIX], [9, NO_PREFIX], [NO_PREFIX, NO_PREFIX]]
    assert main_prefixes(index, 0, 2)[:4].tolist() == expected


def test_main_lists_need_no_torch():
    code = "import sys, ffmem.patterns.main_list; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
