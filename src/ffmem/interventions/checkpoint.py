"""Edits written into a model's weights, and saved as a Hugging Face checkpoint.

    off    v → 0        scale    v → a · v        set, mean    v → 0,  b → b + c · v

A coefficient acts through its value alone, m · v, so what an edit does to m can be done to v, and
its constant part to b, the bias of the value map. That is exact for every activation and family:
post-norms and multipliers come later, and a softmax comes before. A lambda layer has no v: there
the static key is rewritten, in which m is linear. The model in memory is never changed.

    edit(model, out)  =  edit(model, edits = out/edits.json)

The folder appears complete or not at all: it is written beside its place, read back with
`transformers`, compared by its hash, and renamed.
"""

import copy
import json
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ffmem.corpus.corpus import Corpus
from ffmem.errors import ModelError, SelfCheckFailed, StoreError
from ffmem.files import check_writable, storage_errors, sync, write_text
from ffmem.indexing.start import choose_start
from ffmem.interventions.edits import EDITS_FILE, Edits, EditsFile
from ffmem.interventions.prompts import LoadedModel
from ffmem.interventions.side_effects import SideEffects, measure_side_effects, read_sentences
from ffmem.models.arguments import model_path
from ffmem.models.checkpoint import NO_REMOTE_CODE, silence_transformers
from ffmem.models.memories import Memories, fingerprint
from ffmem.models.modules import get_module, is_split, linear_bias, linear_weight
from ffmem.models.tokenizer import SubwordTokenizer, WordTokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.memories import FactoredLinear
from ffmem.progress import Progress
from ffmem.text import pluralize
from ffmem.training.data import WordVocabulary

OUR_MODEL = (
    "To load it with transformers, `import ffmem.networks.model` first: it registers the type."
)
NO_COUNTS = "Word counts are not known; dict.txt says 0 for each."


@dataclass(frozen=True)
class EditResult:
    """An edited model on disk."""

    folder: Path
    model: str
    edits: Edits
    flag: str | None
    """The setting of the config that was switched on, to give the value maps a bias."""
    hash_before: str
    """SHA-256 of the weights."""
    hash_after: str
    rounding: float
    """The largest error of a rewritten number, relative to the largest of its tensor."""
    notes: list[str]
    side_effects: SideEffects | None

    def to_dict(self) -> dict[str, Any]:
        """Return what `edit --json` prints."""
        return {
            "folder": str(self.folder),
            "model": self.model,
            "edits": [edit.to_dict() for edit in self.edits],
            "config": {} if self.flag is None else {self.flag: True},
            "hash_before": self.hash_before,
            "hash_after": self.hash_after,
            "rounding": self.rounding,
            "notes": self.notes,
            "side_effects": None if self.side_effects is None else self.side_effects.to_dict(),
        }

    def __str__(self) -> str:
        report = "" if self.side_effects is None else f"\n{self.side_effects.to_markdown()}"
        return f"{self.folder}: {self.model} with {self.edits}.{report}".rstrip()

    def write_side_effects(self, folder: Path) -> None:
        """Write side-effects.json and side-effects.md."""
        assert self.side_effects is not None
        content = {key: value for key, value in self.to_dict().items() if key != "folder"}
        text = json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False)
        write_text(folder / "side-effects.json", text + "\n")
        notes = "".join(f"{note}\n\n" for note in self.notes)
        page = f"# Side effects of {self.edits}\n\n{notes}{self.side_effects.to_markdown()}"
        write_text(folder / "side-effects.md", page)


def edit_checkpoint(
    loaded: LoadedModel,
    folder: Path,
    edits: Edits | EditsFile,
    corpus: Corpus | None = None,
    progress: Progress | None = None,
) -> EditResult:
    """Write an edited model to a new folder; measure side effects on a corpus if one is given."""
    memories, say = loaded.memories, progress or Progress(quiet=True)
    before = memories.fingerprint()
    recorded = edits if isinstance(edits, EditsFile) else None
    if recorded is not None and recorded.hash_before not in (None, before):
        raise StoreError(
            f"{EDITS_FILE} is for a model with the hash {recorded.hash_before}; this one has"
            f" {before}. Use that model, or remove hash_before from the file."
        )
    wanted = edits.to_edits() if isinstance(edits, EditsFile) else edits
    edited = edit_weights(memories, wanted)
    after = fingerprint(edited.model)
    try:  # the self-check holds for the edited model too
        other = Memories(edited.model, memories.tokenizer, str(folder), None, after)
    except SelfCheckFailed as error:
        raise ModelError(
            "With this edit the model fails its self-check: its numbers may be too large for its"
            f" dtype. Use smaller ones. ({str(error).partition(' ffmem will not')[0]})"
        ) from None
    tokens = _tokenizer_to_save(memories)
    notes = _notes(memories, edited, before == after)
    if isinstance(tokens, WordVocabulary) and not any(count for _, count in tokens.counts):
        notes.append(NO_COUNTS)
    if recorded is not None and recorded.hash_after not in (None, after):
        notes.append(
            f"The edited weights have the hash {after}; {EDITS_FILE} records {recorded.hash_after}."
        )
    for note in notes:
        say.say(note)
    result = EditResult(
        *(folder, memories.source, edited.edits, edited.flag, before, after),
        *(edited.rounding, notes, _side_effects(loaded, other, corpus, say)),
    )

    def add(temporary: Path) -> None:
        record = EditsFile.of_edits(edited.edits, memories.source, before, after)
        write_text(temporary / EDITS_FILE, record.to_json())
        if result.side_effects is not None:
            result.write_side_effects(temporary)

    save_checkpoint(edited.model, tokens, folder, after, add)
    return result


def _notes(memories: Memories, edited: "EditedModel", unchanged: bool) -> list[str]:
    """Return what a user of the checkpoint should know."""
    found = []
    if edited.flag is not None:
        found.append(
            f"{edited.flag} is switched on in the config, because the value maps had no bias. All"
            " other new biases are zero."
        )
    if memories.dtype not in (torch.float32, torch.float64) and edited.rounding:
        dtype = str(memories.dtype).removeprefix("torch.")
        found.append(
            f"The checkpoint is stored in {dtype}: rewritten numbers are rounded, by up to"
            f" {edited.rounding:.1e} of the largest of their tensor."
        )
    for edit in edited.edits:
        rows = _rows(_edited_map(memories, memories.model, edit.cell.layer))
        if not rows[edit.cell.memory].any():
            what = "value" if memories.has_values else "key"
            found.append(f"The {what} of {edit.cell} was all zeros: {edit} has no effect.")
    if memories.family == AdaptiveConfig.model_type:
        found.append(OUR_MODEL)
    if unchanged:
        found.append("The weights do not change.")
    return found


def _side_effects(
    loaded: LoadedModel, other: Memories, corpus: Corpus | None, progress: Progress
) -> SideEffects | None:
    """Measure both models on a corpus, after the index's start token or the best one."""
    if corpus is None:
        progress.say("Side effects were not measured.")
        return None
    memories = loaded.memories
    text = read_sentences(memories, corpus)
    start = None
    if loaded.index is None and loaded.requested_start is None:
        start = choose_start(memories, [ids for _, ids in text.sentences], "auto")[0].id
    else:
        start = loaded.start
    progress.say(f"Measuring side effects on {pluralize(len(text.sentences), 'sentences')}.")
    return measure_side_effects(memories, other, text, start, progress)


# Weights


class EditedModel(NamedTuple):
    """A model that shares the tensors of another, except the edited ones."""

    model: PreTrainedModel
    edits: Edits
    flag: str | None
    rounding: float


@torch.no_grad()
def edit_weights(memories: Memories, edits: Edits) -> EditedModel:
    """Return a copy of the model with edits written into its weights."""
    edits = edits.resolve(memories.layout)
    _check_edits(memories, edits)
    flag = _needed_bias_flag(memories, edits)
    model = _share_weights(memories.model, flag)
    rounding = [0.0]
    for layer, of_layer in edits.by_layer().items():
        linear = _edited_map(memories, model, layer)
        linear.register_parameter("weight", _frozen(linear.get_parameter("weight").clone()))
        rows, cells = _rows(linear), [edit.cell.memory for edit in of_layer]
        # In float64 on the CPU, so that an edit rounds once, to the dtype of the weights.
        before = rows[cells].cpu().double()
        factor = torch.tensor([edit.factor for edit in of_layer], dtype=torch.float64)[:, None]
        constant = torch.tensor([edit.constant for edit in of_layer], dtype=torch.float64)
        exact = torch.where(factor == 0, 0.0, factor * before)  # 0 · v may be −0
        rows[cells] = exact.to(rows)
        rounding.append(_check_rounding(layer, rows[cells], exact))
        if constant.any():
            old = linear_bias(linear)
            exact = old.cpu().double() + constant @ before
            linear.register_parameter("bias", _frozen(exact.to(old)))
            rounding.append(_check_rounding(layer, linear_bias(linear), exact))
    return EditedModel(model, edits, flag, max(rounding))


def _edited_map(memories: Memories, model: PreTrainedModel, layer: int) -> nn.Module:
    """Return the linear map of a layer into which edits are written: values, or lambda keys."""
    row = memories.row
    return get_module(model, f"{row.blocks}.{layer}.{row.keys if row.input_values else row.values}")


def _rows(linear: nn.Module) -> Float[Tensor, "memory width"]:
    """Return a view of the weights with one row per memory."""
    return linear.weight if isinstance(linear, FactoredLinear) else linear_weight(linear).T


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _check_rounding(layer: int, rounded: Tensor, exact: Tensor) -> float:
    """Return the largest relative rounding error; raise if a number overflowed."""
    if not torch.isfinite(rounded).all():
        raise ModelError(
            f"The edits of layer {layer} give numbers that {rounded.dtype} cannot hold. Use"
            " smaller numbers."
        )
    largest = exact.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((rounded.cpu().double() - exact).abs().max() / largest)


def _check_edits(memories: Memories, edits: Edits) -> None:
    """Raise if weights cannot hold the edits."""
    if not edits:
        raise ModelError("There is nothing to edit. Give off, set, scale or mean.")
    if edits.positions is not None:
        raise ModelError(
            "Weights act at every position, so an edit at some positions cannot be written. Leave"
            " out the positions, or try the edit on a prompt with trace."
        )
    if is_split(memories.model):
        raise ModelError(
            "Cannot write edits into a model that is split over devices. Load it on one device,"
            " such as --device cpu."
        )
    if fingerprint(memories.model) != memories.fingerprint():
        raise ModelError(
            f"The weights in memory are {memories.dtype}, which is not how they are stored. Load"
            " the model as it is stored: load(model, dtype='auto')."
        )
    names: dict[int, list[str]] = {}
    for name, tensor in memories.model.named_parameters(remove_duplicate=False):
        names.setdefault(tensor.data_ptr(), []).append(name)
    for layer in edits.by_layer():
        weight = _edited_map(memories, memories.model, layer).get_parameter("weight")
        if len(same := names[weight.data_ptr()]) > 1:
            what = "values" if memories.has_values else "keys"
            raise ModelError(
                f"The {what} of layer {layer} are shared: {', '.join(same)} are one tensor. An edit"
                " would change all of them; try it on a prompt with trace."
            )


def _needed_bias_flag(memories: Memories, edits: Edits) -> str | None:
    """Return the setting of the config that gives the value maps a bias, if one is needed."""
    flag = None
    for edit in edits:
        values = memories.bank(edit.cell.layer).values
        if edit.constant and getattr(values, "bias", None) is None:
            flag = memories.row.bias_flag
            if flag is None:
                raise ModelError(
                    f"Cannot write {edit}: a fixed coefficient needs a bias in the value map, and"
                    f" this {memories.family!r} model has none, nor a setting for one. off and"
                    " scale can be written; for set and mean use trace."
                )
    return flag


def _share_weights(model: PreTrainedModel, flag: str | None) -> PreTrainedModel:
    """Return a second model of the same tensors; `flag` in its config adds biases of zeros."""
    shared: dict[int, object] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    other = copy.deepcopy(model, shared)
    if flag is None:
        return other
    setattr(other.config.get_text_config(), flag, True)
    with torch.device("meta"):
        built = type(model)(copy.deepcopy(other.config))
    there = {name for name, _ in other.named_parameters()}
    for name, tensor in built.named_parameters():
        if name in there:
            continue
        path, _, leaf = name.rpartition(".")
        if leaf != "bias":
            raise ModelError(
                f"With {flag} this model would get new weights ({name}), not only biases. off and"
                " scale can be written without it."
            )
        owner = other.get_submodule(path)
        zeros = owner.get_parameter("weight").new_zeros(tensor.shape)
        owner.register_parameter("bias", _frozen(zeros))
    return other


# Files


def check_free(folder: Path) -> None:
    """Raise unless a folder can be written, before any work is done for it."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise StoreError(f"{folder} exists and is not empty. Choose another folder.")
    check_writable(folder.absolute().parent)


def save_checkpoint(
    model: PreTrainedModel,
    tokens: SubwordTokenizer | WordVocabulary,
    folder: Path,
    expected: str,
    add: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Save a model with an expected hash; `add` writes further files beside it."""
    with _new_folder(folder) as temporary, silence_transformers():
        try:
            model.save_pretrained(temporary)
            if isinstance(tokens, WordVocabulary):
                tokens.save(temporary)
            else:
                tokenizer = copy.copy(tokens.tokenizer)
                local = ("is_local", "local_files_only")  # where it was loaded from
                kept = {k: v for k, v in tokenizer.init_kwargs.items() if k not in local}
                tokenizer.init_kwargs = kept
                tokenizer.save_pretrained(temporary)
        except ValueError as error:  # such as a contradictory generation config
            reason = " ".join(str(error).split())[:300]
            raise ModelError(f"transformers cannot save this model: {reason}") from error
        add(temporary)
        # safetensors makes its files readable by the owner only.
        mode = (temporary / "config.json").stat().st_mode
        for path in temporary.iterdir():
            path.chmod(mode)
        found = fingerprint(
            AutoModelForCausalLM.from_pretrained(temporary, dtype="auto", **NO_REMOTE_CODE)
        )
        if found != expected:
            raise ModelError(
                f"transformers would load the checkpoint {folder} with other weights: their hash is"
                f" {found}, not {expected}. Nothing was written; please report this model."
            )


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """Give a folder to write to; rename it to `folder` if the block ends without an error."""
    check_free(folder)
    place = folder.absolute()
    # mkdtemp would make a folder that nobody else can read.
    temporary = place.with_name(f".{place.name}.{secrets.token_hex(8)}.tmp")
    with storage_errors(folder):
        try:
            temporary.mkdir()
            yield temporary
            for path in temporary.iterdir():
                sync(path)
            sync(temporary)
            temporary.replace(place)  # replaces an empty folder, and nothing else
            sync(place.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _tokenizer_to_save(memories: Memories) -> SubwordTokenizer | WordVocabulary:
    """Return what writes the files of a model's tokenizer.

    Word counts of a fairseq dictionary come from the file beside the model, if its words are those
    of the tokenizer; else they are 0.
    """
    tokenizer = memories.tokenizer
    if isinstance(tokenizer, SubwordTokenizer):
        return tokenizer
    if not isinstance(tokenizer, WordTokenizer):
        raise ModelError(f"Cannot save a {type(tokenizer).__name__} with a model.")
    counts: dict[str, int] = {}
    place = model_path(memories.source)
    path = (place if place.is_dir() else place.parent) / "dict.txt"
    is_own = place.exists() and path.is_file()
    if is_own and WordTokenizer.from_file(path).fingerprint == tokenizer.fingerprint:
        with path.open(encoding="utf-8", newline="\n") as lines:
            rows = [line.rstrip("\r\n").rpartition(" ") for line in lines]
        counts = {word: int(count) for word, _, count in rows}
    words = tokenizer.words[len(WordTokenizer.SPECIAL) :]
    return WordVocabulary([(word, counts.get(word, 0)) for word in words])
