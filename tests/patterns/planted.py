"""A corpus with topics, years and names, and an index of it whose triggers are planted."""

import dataclasses
import random
import shutil
import unicodedata
from unittest import mock

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

import ffmem
from ffmem.files import sha256
from ffmem.indexing.manifest import Manifest
from ffmem.indexing.store import Index
from ffmem.indexing.tables import fixed, layer_file, open_table, write_table
from ffmem.models.tokenizer import SubwordTokenizer
from ffmem.patterns.features import extract_features
from ffmem.progress import Progress
from tests.tiny import TINY

MEMORIES, LAYERS, T = 64, 2, 50

ENDINGS = ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st", "uv", "wx")
TOPICS = {
    topic: [f"{topic}{letters}" for letters in ENDINGS]
    for topic in ("naval", "music", "plant", "court", "chess", "rocks", "birds", "steel")
}
COMMON = ["the", "of", "and", "in", "was", "a", "to", "with"]
OTHERS = [f"{first}{last}" for first in ("mor", "tal", "ved", "sun", "pil") for last in
          ("an", "et", "ig", "ox", "ul", "ar", "em", "in")]  # fmt: skip
YEARS = [str(year) for year in range(1900, 1960)]
NAMES = [f"{name}son" for name in ("Al", "Bo", "Cy", "Dee", "Ed", "Fay", "Gus", "Hal")]
RARE, N_RARE = "quoll", 20
"""A word, and in how many sentences it is."""
ARTICLE = ["jackets", "columbus"]
"""Words that one article repeats in every line, and no other has."""
DAYS, COLORS = ("monday", "tuesday", "friday"), ("red", "green", "blue")
STEMS = ("base", "bases")
BEGIN_ALIKE = ("port", "portuguese")
BOILERPLATE = ["the", "naval", "list", "of", "ships", "was", "with", "a", "base", "in", "court"]


def sentences(n=1200, seed=0):
    """Return sentences of a topic each, words of others among them; and one that comes again."""
    rng = random.Random(seed)
    found = []
    for _ in range(n):
        topic = TOPICS[rng.choice(list(TOPICS))]
        words = []
        for _ in range(rng.randint(8, 18)):
            kind = rng.random()
            source = COMMON if kind < 0.35 else topic if kind < 0.7 else OTHERS
            words.append(rng.choice(source))
        for word, share in (("base", 0.3), ("military base", 0.12), (None, 0.3), ("", 0.3)):
            if rng.random() < share:
                drawn = rng.choice(YEARS) if word is None else word or rng.choice(NAMES)
                words.insert(rng.randint(1, len(words)), drawn)
        found.append(" ".join(words))
    for place in range(N_RARE):
        found[place * 53] += f" {RARE}"
    for place in range(60):
        found.insert(place * 17, " ".join(BOILERPLATE))
    return found


def articles(n=40, size=30, seed=0):
    """Return lines of articles, one article after the other.

    Every article has lines about naval matters; the first is about nothing else, and only there
    are the words of ARTICLE, in every line.
    """
    rng = random.Random(seed)
    found = []
    for number in range(n):
        for line in range(size):
            is_naval = number == 0 or line % 10 == 0
            topic = TOPICS["naval" if is_naval else rng.choice(list(TOPICS)[1:])]
            words = [rng.choice(COMMON if rng.random() < 0.4 else topic) for _ in range(14)]
            words += ARTICLE if number == 0 else rng.sample(OTHERS, 2)
            rng.shuffle(words)
            found.append(" ".join(words))
    return found


def index_of(folder, lines, n_memories=MEMORIES, name="llama", t=T):
    """Index a tiny model whose tokens are the words of the lines."""
    words = sorted({word for line in lines for word in line.split()})
    core = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(["<unk>", "<s>", *words])}, "<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = SubwordTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", unk_token="<unk>")
    )
    set_seed(0)
    sizes = {"vocab_size": len(words) + 2, "intermediate_size": n_memories}
    config = TINY[name].__class__.from_dict(TINY[name].to_dict() | sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    path = folder.parent / f"{folder.name}.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    corpus = ffmem.Corpus(str(path), unit="line")
    return ffmem.index(ffmem.load(model, tokenizer), corpus, folder, t=t, start="bos", threads=1)


def related_features(folder):
    """Return features of a corpus with words that belong together, and the rows by last word.

    Weekdays stand between the same words; so do colors; base and bases are forms of one word. Port
    and Portuguese begin alike, and do not belong together. A bracket stands where weekdays do.
    """
    rng = random.Random(0)

    def filler():
        return " ".join(rng.choice(OTHERS) for _ in range(rng.randint(1, 8)))

    forms = [(DAYS, "we met on {} at noon"), (COLORS, "sold the {} car"), (STEMS, "{} fell")]
    lines = [f"{filler()} {form.format(word)}" for words, form in forms for word in words * 30]
    for word, form in zip(BEGIN_ALIKE, ("the old {} burned", "she spoke {} well"), strict=True):
        lines += [f"{filler()} {form.format(word)}" for _ in range(30)]
    lines += [f"{filler()} we met on ( at noon" for _ in range(30)]
    lines += [f"{filler()} {filler()}" for _ in range(400)]
    index = index_of(folder, lines, n_memories=8)
    with mock.patch("ffmem.patterns.features.SAMPLE", 100_000):  # every prefix
        features, _ = extract_features(index, 0, Progress(quiet=True))
    rows = {}
    for number, _, prefix in every_prefix(index):
        rows.setdefault(prefix[-1], []).append(int(np.searchsorted(features.numbers, number)))
    return features, rows


def every_prefix(index):
    """Return (prefix number, sentence, words) of all prefixes, as plain as it gets."""
    return [
        (row.offset + length, row.sentence, row.text.split()[:length])
        for row in index.sentences.rows(0, index.sentences.n_sentences)
        for length in range(1, len(row.ids) + 1)
    ]


def drawn(prefixes, seed, n=T):
    """Return n of some prefixes, one of each sentence, in random order."""
    rng = random.Random(seed)
    of_sentence = {}
    for number, sentence, _ in rng.sample(prefixes, min(len(prefixes), 8 * n)):
        of_sentence.setdefault(sentence, number)
    return list(of_sentence.values())[:n]


def plant(index, folder, lists):
    """Copy an index; `lists` maps (layer, memory, sign) to the prefixes of its triggers."""
    shutil.copytree(index.folder, folder)
    files = dict(index.manifest.files)
    for layer in range(index.n_layers):
        path = folder / layer_file("triggers", layer)
        table = open_table(path).read()
        for sign, side in ((1, ""), (-1, "negative_")):
            columns = {
                name: np.zeros((index.layout.widths[0], index.manifest.t), dtype)
                for name, dtype in (("coefficient", np.float32), ("prefix", np.int64))
            }
            columns["prefix"] -= 1
            for memory in range(index.layout.widths[0]):
                prefixes = lists.get((layer, memory, sign), [])
                n = len(prefixes)
                columns["prefix"][memory, :n] = prefixes
                columns["coefficient"][memory, :n] = sign * np.linspace(2, 1, max(n, 1))[:n]
            for name, values in columns.items():
                at = table.column_names.index(f"{side}{name}")
                table = table.set_column(at, f"{side}{name}", fixed(values))
        write_table(path, table)
        files[layer_file("triggers", layer)] = sha256(path)
    dataclasses.replace(Manifest.read(folder), files=files).write(folder)
    return Index(folder)


def plain_units(text):
    """Return the units of a text, character by character."""
    found, in_word = [], False
    for character in text:
        kind = unicodedata.category(character)
        word = kind[0] in "LN" or kind in {"Co", "Mn", "Mc"}
        alone = word and any(
            low <= character <= high for low, high in (("぀", "ヿ"), ("㐀", "䶿"), ("一", "鿿"))
        )
        alone |= word and ("\uf900" <= character <= "\ufaff" or character >= "\U00020000")
        alone &= character < "\U00040000"
        if word and not alone and in_word:
            found[-1] += character
        elif word or kind[0] not in "ZC":
            found.append(character)
        in_word = word and not alone
    return found
