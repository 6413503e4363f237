"""Corpora of conversations: one sentence each, in the tokens of the chat template."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import ffmem
from ffmem import Corpus
from ffmem.errors import CorpusError, FfmemError
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.interventions.coefficients import coefficients_along
from ffmem.progress import Progress
from tests.chats import chat_memories, chat_tokenizer

ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"Is {word} <|im_end|> {n}?"},
            {"role": "assistant", "content": f"The {word} is {'very ' * n}good."},
        ]
    }
    for n, word in enumerate(["cat", "dog", "fish", "bird", "cow", "worm", "ox"])
]


def write(path, rows=ROWS):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        data = "\n".join(map(json.dumps, rows)).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.fixture(scope="module")
def memories():
    return chat_memories()


def test_a_conversation_is_one_sentence_whatever_holds_it(tmp_path):
    tokenizer = chat_tokenizer()
    expected = [tokenizer.chat.encode(row["messages"]) for row in ROWS]
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        source = write(tmp_path / name)
        for options in ({}, {"column": "messages"}, {"unit": "line"}):
            reading = Corpus(source, **options).sentences(tokenizer)
            found = list(reading)
            assert [one[:4] for one in found] == [one[:4] for one in expected]
            assert (reading.n_conversations, reading.n_control) == (len(ROWS), 0)
            assert all(one.is_content is None for one in found)
    only = list(Corpus(source, content_only=True, limit=3).sentences(tokenizer))
    assert [one.is_content for one in only] == [one.is_content for one in expected[:3]]


def test_a_text_beside_messages_is_what_is_read(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"text": "Plain.", **ROWS[0]}])
    tokenizer = chat_tokenizer()
    assert [one.text for one in Corpus(source).sentences(tokenizer)] == ["Plain."]
    (found,) = Corpus(source, column="messages").sentences(tokenizer)
    assert found.text.startswith("<|im_start|>user")


def test_a_start_token_that_the_tokenizer_adds_itself_is_not_in_the_sentence(tmp_path):
    tokenizer = chat_tokenizer("<|endoftext|>" + chat_tokenizer().tokenizer.chat_template)
    source = write(tmp_path / "a.jsonl")
    plain = list(Corpus(source).sentences(chat_tokenizer()))
    assert next(Corpus(source).sentences(tokenizer)).ids == [2, *plain[0].ids]
    tokenizer.own_start = 2
    assert list(Corpus(source).sentences(tokenizer)) == plain


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, r"Line 2 of .*a\.jsonl: A conversation is a list of messages"),
        ({"messages": [{"role": "user"}]}, r"Line 2 of .*: Message 1 \(user\) has no content"),
        (
            {"messages": [{"role": "ghost", "content": "x"}]},
            r"Line 2 of .*rejects the conversation: unknown role ghost",
        ),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, r"half a character"),
    ],
)
def test_a_bad_conversation_is_named_by_its_line(row, message, tmp_path):
    source = write(tmp_path / "a.jsonl", [ROWS[0], row])
    with pytest.raises(CorpusError, match=message):
        list(Corpus(source).sentences(chat_tokenizer()))


def test_conversations_are_not_cut_into_windows(tmp_path):
    source = write(tmp_path / "a.jsonl")
    with pytest.raises(CorpusError, match=r"is a conversation, which is one sentence"):
        list(Corpus(source, unit="window:9").sentences(chat_tokenizer()))


def test_a_model_without_a_template_is_refused_and_leaves_nothing(tmp_path):
    source = write(tmp_path / "a.jsonl")
    with pytest.raises(FfmemError, match="no chat template"):
        ffmem.index(chat_memories(template=None), source, tmp_path / "index")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("prefixes", ["best", "all"])
def test_prefixes_that_end_in_the_template_do_not_count(name, prefixes, tmp_path):
    """Against one pass per memory and conversation."""
    memories = chat_memories(name)
    corpus = Corpus(write(tmp_path / "a.jsonl"), content_only=True)
    made = ffmem.index(memories, corpus, tmp_path / "index", t=4, prefixes=prefixes)
    assert ffmem.verify(tmp_path / "index") == []
    sentences = [made.sentences.row(n) for n in range(len(ROWS))]
    (source,) = made.manifest.corpus.sources
    n_prefixes = sum(sum(one.is_content) for one in sentences)
    assert made.n_prefixes == n_prefixes == source.tokens - source.left_out
    assert source.conversations == len(ROWS)
    assert made.manifest.start.id is None
    kept = {
        one.offset + p
        for one in sentences
        for p in range(1, len(one.ids) + 1)
        if one.is_content[p - 1]
    }
    assert set(made.sampled_prefixes.tolist()) <= kept
    for cell in [made.layout.cell(layer, n) for layer in (0, 1) for n in (0, 5, 17)]:
        along = coefficients_along(memories, cell, [one.ids for one in sentences], None)
        found = []
        for one, numbers in zip(sentences, along, strict=True):
            mine = [
                (number, one.offset + p)
                for p, number in enumerate(numbers, start=1)
                if one.is_content[p - 1]
            ]
            found += mine if prefixes == "all" else [max(mine, key=lambda pair: pair[0])]
            assert len(mine) == sum(one.is_content)
        ranked = sorted((pair for pair in found if pair[0] > 0), key=lambda pair: -pair[0])[:4]
        row = made.columns("triggers", cell.layer)
        prefix, m = row["prefix"][cell.memory], row["coefficient"][cell.memory]
        assert prefix[prefix != NO_PREFIX].tolist() == [place for _, place in ranked]
        np.testing.assert_allclose(m[: len(ranked)], [m for m, _ in ranked], rtol=1e-4, atol=1e-5)
        everything = [
            number
            for one, numbers in zip(sentences, along, strict=True)
            for number, is_it in zip(numbers, one.is_content, strict=True)
            if is_it
        ]
        stats = made[cell].stats
        np.testing.assert_allclose(
            [stats.mean, stats.max, stats.min],
            [np.mean(everything), max(everything), min(everything)],
            rtol=1e-4,
            atol=1e-5,
        )


def test_an_extended_index_keeps_what_is_left_out(memories, tmp_path):
    first = Corpus(write(tmp_path / "a.jsonl", ROWS[:4]), content_only=True)
    second = Corpus(write(tmp_path / "b.parquet", ROWS[4:]))  # reads as the index has read
    (tmp_path / "c.txt").write_text("Plain text.\n")
    ffmem.index(memories, first, tmp_path / "index", t=3)
    for corpus in (second, Corpus(str(tmp_path / "c.txt"))):
        larger = ffmem.extend(tmp_path / "index", corpus, model=memories)
    assert ffmem.verify(tmp_path / "index") == []
    flags = [larger.sentences.row(n).is_content for n in range(len(ROWS) + 1)]
    tokenizer = memories.tokenizer
    assert flags[:-1] == [tokenizer.chat.encode(row["messages"]).is_content for row in ROWS]
    assert flags[-1] is None
    assert larger.n_prefixes == sum(map(sum, flags[:-1])) + len("Plain text.")
    assert [source.content_only for source in larger.manifest.corpus.sources] == [True] * 3
    again = ffmem.extend(tmp_path / "index", second, model=memories)
    assert again.manifest == larger.manifest


def test_content_only_without_conversations_says_that_it_changes_nothing(
    memories, tmp_path, capsys
):
    (tmp_path / "c.txt").write_text("Plain text.\n")
    corpus = Corpus(str(tmp_path / "c.txt"), content_only=True)
    made = ffmem.index(memories, corpus, tmp_path / "index", t=2, progress=Progress())
    assert made.n_prefixes == len("Plain text.")
    said = capsys.readouterr()
    note = "c.txt has no conversations, so --content-only changes nothing."
    assert note in said.out + said.err
    assert "conversation" not in "".join(said).replace(note, "")


def test_a_conversation_longer_than_the_context_is_cut_and_counted(memories, tmp_path):
    system = {"role": "system", "content": "s" * 300}
    rows = [*ROWS[:2], {"messages": [system, *ROWS[0]["messages"]]}]
    long = {"messages": [{"role": "user", "content": " " * 300 + "."}]}
    corpus = Corpus(write(tmp_path / "a.jsonl", [*rows, long]), content_only=True)
    made = ffmem.index(memories, corpus, tmp_path / "index", t=2)
    (source,) = made.manifest.corpus.sources
    assert (source.sentences, source.cut) == (4, 1)
    assert ffmem.verify(tmp_path / "index") == []


def test_a_corpus_without_content_in_the_context_is_refused(tmp_path):
    lost = chat_memories(template="{{ 'x' * 300 }}{{ messages[0]['content'] }}")
    one = [{"messages": [{"role": "user", "content": "Hi"}]}]
    corpus = Corpus(write(tmp_path / "b.jsonl", one), content_only=True)
    with pytest.raises(FfmemError, match=r"No conversation of .* within the model's context"):
        ffmem.index(lost, corpus, tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_experiments_draw_no_prefix_that_is_left_out(memories, tmp_path):
    from ffmem.experiments.sample import draw_sample

    corpus = Corpus(write(tmp_path / "a.jsonl"), content_only=True)
    for how, size in (("sentences", 5), ("tokens", 20), ("tokens", None)):
        sample = draw_sample(corpus.sentences(memories.tokenizer), how, size, 0, 1, 200)
        drawn = [example.sentence.is_content[p - 1] for example, p in sample.prefixes()]
        assert all(drawn)
        assert len(drawn) >= 5


def test_left_out_prefixes_do_not_fit_the_authors_definition(memories, tmp_path):
    corpus = Corpus(write(tmp_path / "a.jsonl"), content_only=True)
    with pytest.raises(FfmemError, match=r"`content_only` does not work with `compat`"):
        ffmem.index(memories, corpus, tmp_path / "index", compat="ff-layers", start="eos")
