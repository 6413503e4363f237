"""What many tests share: tiny models indexed over a text of hard characters."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

import ffmem
from ffmem.networks.config import KINDS, AdaptiveConfig
from tests.ray_cluster import gone_in_the_end, ray_cluster  # noqa: F401
from tests.texts import LINES
from tests.tiny import EXPERTS, TINY, changed_since_read

VOCABULARY = 320

DENSE = tuple(kind for kind in KINDS if kind != "moe")
"""The kinds of our own memories with one bank in a layer; `EXPERTS` has the mixture of experts."""

OURS = {kind: "ffmem_adaptive" if kind == "relu" else f"ffmem_adaptive {kind}" for kind in DENSE}
"""The tiny model of each of these kinds."""

# A shell's `&` ignores Ctrl-C, and processes inherit that. Tests interrupt some, so undo it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A law holds or not, however busy the machine is. `--hypothesis-profile thorough` tries harder.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("ffmem", max_examples=50, **PATIENT)
settings.register_profile("thorough", max_examples=1000, **PATIENT)
settings.load_profile("ffmem")


LONG_FILES = (
    "indexing/test_workers.py",
    "test_golden.py",
    "test_parallel.py",
    "test_examples.py",
    "web/test_annotate_browser.py",
    "web/test_browser.py",
    "test_demo.py",
    "sharing/test_sharing.py",
    "agents/test_server.py",
    "test_site.py",
    "web/test_live.py",
)
"""Files that take longest, or mostly wait. One process runs a whole file, so these come first."""


def pytest_collection(session):
    gc.disable()


def pytest_collection_finish(session):
    """Garbage collection looks at what tests make, not at a million objects that stay."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    def place(item):
        path = str(item.path)
        return next((n for n, end in enumerate(LONG_FILES) if path.endswith(end)), len(LONG_FILES))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _do_not_wait_for_the_disk():
    """A process that is killed loses nothing that it wrote; a power cut would, and none is tested.

    Flushing takes up to half of the time of an index as small as those of the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _models_that_many_read_stay_as_they_were():
    yield
    assert changed_since_read() == []


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE so small that it splits emoji, Hebrew and Devanagari inside characters."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10,  # the model has more rows than the tokenizer has tokens
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([line for line in LINES if line.isascii()], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")


def text_model(name):
    """Return a tiny random model with a vocabulary for text."""
    set_seed(0)
    size = {"vocab_size": VOCABULARY}
    plain = (TINY | EXPERTS)[name]
    if isinstance(plain, AdaptiveConfig):
        size = {"band_sizes": [200, 60, VOCABULARY - 260]}
    config = plain.__class__.from_dict(plain.to_dict() | size)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * parameter.data.new_empty(parameter.shape).normal_()
    return model.eval()


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    path.write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return path


def indexed(name, tokenizer, corpus, folder, **options):
    memories = ffmem.load(text_model(name), tokenizer)
    return ffmem.index(memories, corpus, folder, **({"t": 6, "threads": 1} | options))


@pytest.fixture(scope="session")
def tiny_index(tokenizer, corpus_file, tmp_path_factory):
    """An index of a gated model (llama). Tests copy its folder before they change anything."""
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    return indexed("llama", tokenizer, corpus, tmp_path_factory.mktemp("gated") / "index")


@pytest.fixture(scope="session")
def ungated_index(tokenizer, corpus_file, tmp_path_factory):
    """An index of an ungated model (gpt2), with the authors' prefixes 0 … n − 1, and room left."""
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    folder = tmp_path_factory.mktemp("ungated") / "index"
    return indexed("gpt2", tokenizer, corpus, folder, t=30, compat="ff-layers", start="eos")


@pytest.fixture(scope="session")
def expert_index(tokenizer, corpus_file, tmp_path_factory):
    """An index of a mixture of experts (deepseek_v3), whose model lies in a folder.

    Layer 0 is dense (24 memories), layer 1 has a shared expert and 5 routed ones of 12 each, of
    which a token reaches two.
    """
    root = tmp_path_factory.mktemp("experts")
    text_model("deepseek_v3").save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    corpus = ffmem.Corpus(str(corpus_file), unit="line")
    return ffmem.index(str(root / "model"), corpus, root / "index", t=24, threads=1)


@pytest.fixture(params=["tiny_index", "ungated_index"])
def index(request):
    """Both kinds of index, one after the other."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def kind_index(index_of, corpus_file, tmp_path_factory):
    """Index of a model of ours by the kind of its memories, made once: `kind_index("lambda")`."""
    made = {}

    def index(kind):
        if kind not in made:
            corpus = ffmem.Corpus(str(corpus_file), unit="line")
            folder = tmp_path_factory.mktemp(kind) / "index"
            made[kind] = index_of(OURS[kind], corpus, folder)
        return made[kind]

    return index


@pytest.fixture(scope="session")
def index_of(tokenizer):
    """Index a tiny model over any corpus: `index_of(name, corpus, folder, **options)`."""
    return lambda name, corpus, folder, **options: indexed(
        name, tokenizer, corpus, folder, **options
    )


@pytest.fixture(scope="session")
def model_folder(tokenizer, tmp_path_factory):
    """A tiny llama as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("model") / "tiny-llama"
    text_model("llama").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
