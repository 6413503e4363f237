"""`index.table`: the same as `index[cell]`, memory by memory."""

import pytest

import ffmem
from ffmem.errors import FfmemError, NoStaticValues
from ffmem.indexing.tidy import SCHEMAS

NAMES = [name for name in SCHEMAS if name != "patterns"]
"""The tables that every index has."""


@pytest.fixture(params=["tiny_index", "ungated_index"])
def any_index(request):
    return request.getfixturevalue(request.param)


def rows(table):
    return table.to_pylist()


def test_stats_are_those_of_show(any_index):
    found = rows(any_index.table("stats"))
    assert [row["cell"] for row in found] == [str(cell) for cell in any_index]
    for row in found:
        memory = any_index[row["cell"]]
        assert (row["layer"], row["memory"]) == memory.cell[:2]
        assert row["bank"] == "dense"
        for name in ("active_share", "mean", "max", "min"):
            assert row[name] == getattr(memory.stats, name)


@pytest.mark.parametrize("top", [None, 3])
def test_values_are_those_of_show(any_index, top):
    expected = [
        (str(cell), side, rank, token.token, token.id, token.logit, token.probability)
        for cell in any_index
        for side in ("top", "bottom")
        for rank, token in enumerate(getattr(any_index[cell].value, side)[:top], start=1)
    ]
    columns = ["cell", "side", "rank", "token", "id", "logit", "probability"]
    found = any_index.table("values", top=top, columns=columns)
    assert [tuple(row.values()) for row in rows(found)] == expected


@pytest.mark.parametrize("top", [None, 2])
def test_triggers_are_those_of_show(any_index, top):
    expected = []
    for cell in any_index:
        memory = any_index[cell]
        for sign, triggers in ((1, memory.triggers), (-1, memory.negative_triggers)):
            expected += [(str(cell), sign, trigger) for trigger in triggers[:top]]
    found = rows(any_index.table("triggers", top=top))
    assert len(found) == len(expected)
    for row, (cell, sign, trigger) in zip(found, expected, strict=True):
        assert (row["cell"], row["sign"]) == (cell, sign)
        fields = trigger._asdict()
        del fields["rest"]
        assert {name: row[name] for name in fields} == fields


def test_samples_are_the_coefficients_on_the_sampled_prefixes(any_index):
    found = rows(any_index.table("samples", layer=1))
    n = len(any_index.sampled_prefixes)
    assert len(found) == n * any_index.layout.widths[1]
    for memory, cell in enumerate(cell for cell in any_index if cell.layer == 1):
        mine = found[memory * n : (memory + 1) * n]
        assert {row["cell"] for row in mine} == {str(cell)}
        assert [row["coefficient"] for row in mine] == any_index.sample(cell).tolist()
    for row, prefix in zip(found[:n], any_index.sampled_prefixes.tolist(), strict=True):
        sentence = any_index.sentences.at([prefix])[prefix]
        assert (row["sentence"], row["length"]) == (sentence.sentence, prefix - sentence.offset)
        text = any_index.prefix_text(sentence, row["length"])
        shown = row["prefix"], row["last_token"], row["next_token"]
        assert shown == (text.prefix, text.last_token, text.next_token)


@pytest.mark.parametrize("name", NAMES)
def test_the_table_of_a_layer_is_its_part_of_the_whole(any_index, name):
    whole = any_index.table(name)
    assert whole.schema == SCHEMAS[name]
    layers = [any_index.table(name, layer=layer) for layer in range(any_index.n_layers)]
    assert rows(whole) == [row for layer in layers for row in rows(layer)]


@pytest.mark.parametrize("name", NAMES)
def test_columns_come_alone_and_in_the_order_asked_for(any_index, name):
    whole = any_index.table(name)
    for column in whole.column_names:
        assert any_index.table(name, columns=[column]).equals(whole.select([column]))
    asked = whole.column_names[::-1]
    assert any_index.table(name, columns=asked).column_names == asked


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"name": "neurons"}, "There is no table 'neurons'. There are: stats, values"),
        ({"name": "stats", "layer": 99}, "There is no layer 99"),
        ({"name": "stats", "columns": ["size"]}, "no column 'size'. It has: cell, layer"),
        ({"name": "stats", "columns": "cell"}, r"columns is 'cell'\. It must be Sequence"),
        ({"name": "stats", "columns": []}, "Pass a list of names"),
        ({"name": "stats", "top": 3}, "for the tables values, keys and triggers"),
        ({"name": "values", "top": 0}, "at least 1"),
    ],
)
def test_a_table_that_is_not_there_is_refused(tiny_index, asked, message):
    with pytest.raises(FfmemError, match=message):
        tiny_index.table(**asked)


def test_memories_without_static_values_have_no_table_of_values(index_of, tmp_path):
    (tmp_path / "text.txt").write_text("one two three\n" * 5)
    corpus = ffmem.Corpus(str(tmp_path / "text.txt"), unit="line")
    index = index_of("ffmem_adaptive lambda", corpus, tmp_path / "index", start="none")
    with pytest.raises(NoStaticValues):
        index.table("values")
    assert len(index.table("triggers"))
