import logging
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from ffmem.errors import ModelError
from ffmem.models.tokenizer import Encoding, SubwordTokenizer, WordTokenizer

LINES = [
    "the press said that the base was in the city",
    "शहर में प्रेस",
    "העיר של העיתון",
    "in the city 😀",
]
TEXTS = ["the press in the city", "प्रेस में", "העיר 😀 in", "  two  spaces\n", "price: 5 €"]


def wrapped(core, **special):
    return SubwordTokenizer(PreTrainedTokenizerFast(tokenizer_object=core, **special))


def byte_level(start=False, **special):
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(LINES, trainer)
    if start:
        core.post_processor = processors.TemplateProcessing(
            single="<|end|> $A", special_tokens=[("<|end|>", core.token_to_id("<|end|>"))]
        )
    return wrapped(core, eos_token="<|end|>", **special)


def metaspace():
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁in", "▁the", "s"]
    core = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], 0, byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return wrapped(core, bos_token="<s>", unk_token="<unk>")


def word_piece():
    pieces = ["[UNK]", "[CLS]", "[SEP]", "play", "##ing", "▁"]
    core = Tokenizer(models.WordPiece({piece: id for id, piece in enumerate(pieces)}))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.decoder = decoders.WordPiece()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return wrapped(core, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")


class Letters(PreTrainedTokenizer):
    """A slow tokenizer: one token per letter."""

    def __init__(self, **options):
        self.letters = {letter: id for id, letter in enumerate("abc▁")}
        super().__init__(unk_token="c", bos_token="a", **options)

    vocab_size = 4

    def get_vocab(self):
        return dict(self.letters)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.get(token, 2)

    def _convert_id_to_token(self, index):
        return "abc▁"[index]


def bytes_shown(shown):
    """The bytes that a shown text stands for."""
    parts = re.split(r"((?:⟨[0-9a-f]{2}⟩)+)", shown)
    return b"".join(
        bytes.fromhex(re.sub("[⟨⟩]", "", part)) if place % 2 else part.encode()
        for place, part in enumerate(parts)
    )


BYTE_LEVEL = byte_level()


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="⟨⟩")))
def test_the_shown_tokens_of_a_byte_level_text_joined_are_the_text(text):
    shown = BYTE_LEVEL.token_texts(300)

    [encoding] = BYTE_LEVEL.encode([text])

    joined = "".join(shown[id] for id in encoding.ids)
    assert bytes_shown(joined) == text.encode()
    if text.isascii():
        assert joined == text


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_lie_in_the_text_in_order_and_reach_its_end(text):
    [encoding] = BYTE_LEVEL.encode([text])

    assert encoding.starts == sorted(encoding.starts)
    assert encoding.ends == sorted(encoding.ends)
    assert encoding.ends[-1] == len(text)
    shown = BYTE_LEVEL.token_texts(300)
    for id, start, end in zip(*encoding, strict=True):
        whole = shown[id]
        assert "⟨" in whole or whole == text[start:end]


@pytest.mark.parametrize(
    ("tokenizer", "text"),
    [
        (WordTokenizer(["the", "press", "in"]), "the press in the unknown press"),
        (BYTE_LEVEL, "the press in the city"),
        (metaspace(), "the sin in the s"),
        (word_piece(), "play playing play"),
    ],
    ids=["words", "byte level", "metaspace", "word pieces"],
)
def test_a_text_and_what_follows_it_are_one_text_wherever_it_is_cut(tokenizer, text):
    (encoding,) = tokenizer.encode([text])
    ids = encoding.ids
    assert len(ids) > 3
    for n in range(1, len(ids) + 1):
        begun, following = tokenizer.decode(ids[:n]), tokenizer.decode_after(ids[n - 1], ids[n:])
        assert begun + following == tokenizer.decode(ids)


def test_a_token_that_is_part_of_a_character_is_shown_by_its_bytes():
    shown = BYTE_LEVEL.token_texts(300)

    [encoding] = BYTE_LEVEL.encode(["€"])

    assert "".join(shown[id] for id in encoding.ids) == "⟨e2⟩⟨82⟩⟨ac⟩"
    assert "�" not in "".join(shown)


def test_a_leading_space_is_part_of_the_shown_token():
    [encoding] = BYTE_LEVEL.encode(["that the"])

    assert BYTE_LEVEL.token_texts(300)[encoding.ids[-1]] == " the"


def test_special_tokens_are_shown_by_name_and_empty_rows_as_unused():
    shown = BYTE_LEVEL.token_texts(302)

    assert shown[BYTE_LEVEL.eos] == "<|end|>"
    assert shown[301] == "⟨unused 301⟩"
    assert len(shown) == 302


def test_an_added_token_is_shown_as_it_was_added():
    tokenizer = byte_level()
    tokenizer.tokenizer.add_tokens([AddedToken("éé", special=False)])

    assert tokenizer.token_texts(301)[300] == "éé"
    assert tokenizer.encode(["éé"])[0].ids == [300]


def test_metaspace_is_shown_as_a_space_and_byte_pieces_as_what_they_are():
    tokenizer = metaspace()

    shown = tokenizer.token_texts(262)

    assert shown[tokenizer.id_of("▁in")] == " in"
    assert shown[tokenizer.id_of("<0x0A>")] == "\n"
    assert shown[tokenizer.id_of("<0xE2>")] == "⟨e2⟩"
    assert shown[1] == "<s>"
    [encoding] = tokenizer.encode(["in the €"])
    assert "".join(shown[id] for id in encoding.ids) == " in the ⟨e2⟩⟨82⟩⟨ac⟩"


def test_word_pieces_are_shown_as_the_vocabulary_writes_them():
    tokenizer = word_piece()

    assert tokenizer.token_texts(6) == ["[UNK]", "[CLS]", "[SEP]", "play", "##ing", "▁"]
    assert tokenizer.encode(["playing"]) == [Encoding([3, 4], [0, 4], [4, 7])]


def test_the_end_of_a_word_is_shown_as_a_space():
    core = Tokenizer(models.BPE({"a": 0, "a</w>": 1}, [], end_of_word_suffix="</w>"))
    core.decoder = decoders.BPEDecoder("</w>")

    assert wrapped(core).token_texts(2) == ["a", "a "]


def test_a_slow_tokenizer_cannot_tell_places():
    tokenizer = SubwordTokenizer(Letters())

    assert tokenizer.encode(["ab", "cab"]) == [
        Encoding([0, 1], None, None),
        Encoding([2, 0, 1], None, None),
    ]
    assert tokenizer.token_texts(5) == ["a", "b", "c", " ", "⟨unused 4⟩"]


def test_a_token_is_found_by_its_entry_and_by_its_shown_form():
    tokenizer = byte_level()

    assert tokenizer.id_of(" the") == tokenizer.id_of("Ġthe") == tokenizer.vocabulary["Ġthe"]
    assert tokenizer.id_of("<|end|>") == tokenizer.eos
    with pytest.raises(
        ModelError, match=r"' THE' is not a single token .*\. Similar tokens: ' the'\. Use one"
    ):
        tokenizer.id_of(" THE")


def test_the_token_that_the_tokenizer_puts_in_front_is_its_own_start():
    assert byte_level().own_start is None
    assert byte_level(start=True).own_start == byte_level().eos
    assert word_piece().own_start == 1
    assert metaspace().own_start is None
    assert SubwordTokenizer(Letters()).own_start is None
    assert byte_level(start=True).encode(["the"])[0].ids == byte_level().encode(["the"])[0].ids


def test_a_long_text_is_taken_whole_and_in_silence():
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("transformers").addHandler(handler)
    try:
        for tokenizer in (
            byte_level(model_max_length=4),
            SubwordTokenizer(Letters(model_max_length=4)),
        ):
            assert len(tokenizer.encode(["ab" * 50])[0].ids) == 100
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert records == []


def test_no_texts_have_no_tokens():
    assert BYTE_LEVEL.encode([]) == WordTokenizer([]).encode([]) == []
    assert BYTE_LEVEL.encode([""]) == [Encoding([], [], [])]


def test_the_fingerprint_changes_exactly_when_ids_may_change():
    lower = byte_level()
    lower.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    padded = byte_level()
    padded.tokenizer.backend_tokenizer.enable_truncation(3)

    fingerprints = {byte_level().fingerprint, padded.fingerprint}

    assert len(fingerprints) == 1
    assert len(fingerprints | {lower.fingerprint, metaspace().fingerprint}) == 3
    assert SubwordTokenizer(Letters()).fingerprint == SubwordTokenizer(Letters()).fingerprint


@pytest.fixture
def dictionary(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text("the 10\n, 7\nNew York 3\nmadeupword0000 0\n", encoding="utf-8")
    return WordTokenizer.from_file(path)


def test_words_are_numbered_as_fairseq_numbers_them(dictionary):
    assert dictionary.token_texts(9) == [
        *("<s>", "<pad>", "</s>", "<unk>", "the", ",", "New York", "madeupword0000"),
        "⟨unused 8⟩",
    ]
    assert dictionary.token_texts(2) == ["<s>", "<pad>"]
    assert (dictionary.bos, dictionary.eos, dictionary.own_start) == (2, 2, 2)
    assert dictionary.unlisted == {0, 1, 7}
    assert dictionary.word_level


def test_unknown_words_are_unk_and_every_word_keeps_its_place(dictionary):
    text = " the  @-@ ,\n<unk> </s>"

    assert dictionary.encode([text]) == [
        Encoding([4, 3, 5, 3, 2], [1, 6, 10, 12, 18], [4, 9, 11, 17, 22])
    ]


def test_unknown_words_are_named_but_not_the_unknown_token_itself(dictionary):
    text = "Zembla, the <unk> sea , Zembla,"
    (encoding,) = dictionary.encode([text])
    assert dictionary.unknown_words(text, *encoding) == ["Zembla,", "sea", "Zembla,"]
    assert dictionary.unknown_words(None, encoding.ids, None, None) == []
    (known,) = dictionary.encode(["the <unk> ,"])
    assert dictionary.unknown_words("the <unk> ,", *known) == []


@given(st.text("ab \t\n\u00a0😀"))
def test_words_are_those_of_str_split(text):
    [encoding] = WordTokenizer(["a", "b"]).encode([text])

    words = [text[start:end] for start, end in zip(encoding.starts, encoding.ends, strict=True)]
    assert words == text.split()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("the 1\nthe 2\n", r"lists 'the' twice.*dict\.txt"),
        ("<unk> 1\n", r"lists '<unk>' twice"),
        ("the\n", r"Line 1 of .* is 'the', not `token count`\. Use"),
        ("the 1\nof x\n", r"Line 2 of .* is 'of x'"),
    ],
)
def test_a_foreign_dictionary_is_refused(tmp_path, content, message):
    (tmp_path / "dict.txt").write_text(content)

    with pytest.raises(ModelError, match=message):
        WordTokenizer.from_file(tmp_path / "dict.txt")


def test_a_missing_or_undecodable_dictionary_is_refused(tmp_path):
    (tmp_path / "dict.txt").write_bytes(b"\xff 1\n")

    for name in "dict.txt", "none.txt":
        with pytest.raises(ModelError, match=r"Cannot read the dictionary .*\. Use the dict"):
            WordTokenizer.from_file(tmp_path / name)


def test_the_module_imports_neither_torch_nor_transformers():
    check = (
        "import sys, ffmem.models.tokenizer;"
        "sys.exit(' '.join({'torch', 'transformers', 'tokenizers'} & set(sys.modules)) or 0)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", check], check=True, env=environment)
