"""Edits written into a model's weights, and saved as a Hugging Face checkpoint.

    off    v → 0        scale    v → a · v        set, mean    v → 0,  b → b + c · v
    redirect    v → v′        write    k, v → k′, v′

A coefficient acts through its value alone, m · v, so what an edit does to m can be done to v, and
its constant part to b, the bias of the value map. That is exact for every activation and family:
post-norms and multipliers come later, and a softmax comes before. A lambda layer has no v: there
the static key is rewritten, in which m is linear. In an expert b is multiplied by the router's
weight, so no constant can be written; an expert that is off has values and bias of zeros.
The model in memory is never changed.

    edit(model, out)  =  edit(model, edits = out/edits.json)

The folder appears complete or not at all: it is written under a temporary name, read back
with `transformers`, compared by its hash, and renamed.
"""

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from ffmem.cells import Cell, Expert
from ffmem.corpus.corpus import Corpus
from ffmem.errors import ModelError, SelfCheckFailed, StoreError
from ffmem.files import check_writable, committing_folder, write_text
from ffmem.interventions.edits import EDITS_FILE, ROUTES, Edit, Edits, EditsFile
from ffmem.interventions.forward import LoadedModel
from ffmem.interventions.redirect import solve_redirects
from ffmem.interventions.results import as_json
from ffmem.interventions.side_effects import SideEffects, measure_on_corpus
from ffmem.models.arguments import model_path
from ffmem.models.banks import Bank, ExpertBank
from ffmem.models.checkpoint import NO_REMOTE_CODE, silence_transformers
from ffmem.models.experts import routed_experts
from ffmem.models.memories import Memories, fingerprint
from ffmem.models.modules import is_split, linear_bias, linear_weight
from ffmem.models.tokenizer import SubwordTokenizer, WordTokenizer
from ffmem.networks.config import AdaptiveConfig
from ffmem.networks.memories import FactoredLinear
from ffmem.progress import Progress
from ffmem.text import format_share
from ffmem.training.data import WordVocabulary


@dataclass(frozen=True)
class EditResult:
    """An edited model on disk."""

    folder: str
    model: str
    edits: list[Edit]
    config: dict[str, bool]
    """Settings that were switched on to give the value maps a bias."""
    hash_before: str
    """SHA-256 of the weights."""
    hash_after: str
    rounding: float
    """The largest error of a rewritten number, relative to the largest of its tensor."""
    notes: list[str]
    side_effects: SideEffects | None

    def to_dict(self) -> dict[str, Any]:
        """Return what `edit --json` prints; new weights of memories are in edits.json."""
        found: dict[str, Any] = as_json(self)
        for edit in found["edits"]:
            del edit["weights"]
        return found

    def __str__(self) -> str:
        edits = ", ".join(map(str, self.edits))
        report = "" if self.side_effects is None else f"\n{self.side_effects.to_markdown()}"
        return f"{self.folder}: {self.model} with {edits}.{report}".rstrip()


def edit_checkpoint(
    loaded: LoadedModel,
    folder: Path,
    edits: Edits | EditsFile,
    corpus: Corpus | None = None,
    progress: Progress | None = None,
    add_files: Callable[[EditResult, Path], None] = lambda result, folder: None,
) -> EditResult:
    """Write an edited model to a new folder; measure side effects on a corpus if one is given.

    `add_files` writes further files beside the weights, before the folder gets its name.
    """
    memories, say = loaded.memories, progress or Progress(quiet=True)
    before, recorded_hash = memories.fingerprint(), None
    if isinstance(edits, EditsFile):
        if edits.hash_before not in (None, before):
            raise StoreError(
                f"{EDITS_FILE} is for a model with the hash {edits.hash_before}; this one has"
                f" {before}. Use that model, or remove hash_before from the file."
            )
        recorded_hash = edits.hash_after
        edits = edits.to_edits()
    edits = solve_redirects(memories, edits)
    edited = edit_weights(memories, edits)
    after = fingerprint(edited.model)
    try:  # the self-check holds for the edited model too
        other = Memories(edited.model, memories.tokenizer, str(folder), None, after)
    except SelfCheckFailed as error:
        raise ModelError(
            "With this edit, the model fails its self-check: numbers may be too large for its"
            f" dtype. Use smaller ones. ({str(error).partition(' ffmem will not')[0]})"
        ) from None
    tokens = _tokenizer_to_save(memories)
    notes = _notes(memories, edited, before == after)
    if isinstance(tokens, WordVocabulary) and not any(count for _, count in tokens.counts):
        notes.append("Word counts are unknown; dict.txt lists 0 for each.")
    if recorded_hash not in (None, after):
        notes.append(
            f"The edited weights have the hash {after}; {EDITS_FILE} records {recorded_hash}."
        )
    for note in notes:
        say.say(note)
    result = EditResult(
        folder=str(folder),
        model=memories.source,
        edits=list(edited.edits),
        config={} if edited.flag is None else {edited.flag: True},
        hash_before=before,
        hash_after=after,
        rounding=edited.rounding,
        notes=notes,
        side_effects=measure_on_corpus(loaded, other, corpus, say),
    )

    def add(temporary: Path) -> None:
        record = EditsFile(
            edits=result.edits, model=memories.source, hash_before=before, hash_after=after
        )
        write_text(temporary / EDITS_FILE, record.to_json())
        add_files(result, temporary)
        if result.side_effects is not None:
            content = {name: value for name, value in result.to_dict().items() if name != "folder"}
            text = json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False)
            write_text(temporary / "side-effects.json", text + "\n")
            title = f"# Side effects of {edited.edits}\n\n"
            page = title + "".join(f"{note}\n\n" for note in notes)
            write_text(temporary / "side-effects.md", page + result.side_effects.to_markdown())

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
    what = "value" if memories.has_values else "key"
    for layer, of_layer in edited.edits.by_layer(memories.layout).items():
        for bank, of_bank in _by_bank(memories, layer, of_layer).items():
            rows, _ = _rows_and_bias(memories, memories.model, bank)
            for memory, edit in of_bank:
                row = rows[memory - bank.offset]
                if edit.how == "redirect":
                    found.append(_redirect_note(edit, row))
                elif edit.how != "write" and isinstance(edit.target, Cell) and not row.any():
                    found.append(f"The {what} of {edit.cell} was all zeros: {edit} has no effect.")
    if memories.family == AdaptiveConfig.model_type:
        found.append(
            "To load it with transformers, first `import ffmem.networks.model`, which registers"
            " the type."
        )
    if unchanged:
        found.append("The weights do not change.")
    return found


def _redirect_note(edit: Edit, row: Float[Tensor, " width"]) -> str:
    """Return how far a value was moved to promote another token."""
    assert edit.weights is not None
    before = row.cpu().double()
    after = torch.tensor(edit.weights.value, dtype=torch.float64)
    moved = float((after - before).norm() / before.norm())
    cosine = float(torch.nn.functional.cosine_similarity(before, after, dim=0))
    return f"{edit}: its value moved by {format_share(moved)} of its norm (cosine {cosine:.3f})."


# Weights


class EditedModel(NamedTuple):
    """A model that shares the tensors of another, except the edited ones."""

    model: PreTrainedModel
    edits: Edits
    flag: str | None
    rounding: float


@torch.no_grad()
def edit_weights(memories: Memories, edits: Edits, is_stored: bool = False) -> EditedModel:
    """Return a copy of the model with edits written into its weights.

    `is_stored` says that the weights in memory are known to be those of the file.
    """
    edits = edits.resolve(memories.layout)
    by_layer = edits.by_layer(memories.layout)
    _check_edits(memories, edits, is_stored)
    flag = _needed_bias_flag(memories, edits)
    model = _share_weights(memories.model, flag)
    rounding = [_edit_layer(memories, model, layer, by_layer[layer]) for layer in by_layer]
    return EditedModel(model, edits, flag, max(rounding))


def _edit_layer(
    memories: Memories, model: PreTrainedModel, layer: int, edits: list[tuple[int, Edit]]
) -> float:
    """Write the edits of a layer into a model's weights; return the largest rounding error.

    Weights change here and nowhere else.
    """
    for name in _parameter_names(memories, layer, edits):
        path, _, leaf = name.rpartition(".")
        own = _frozen(model.get_parameter(name).clone())
        model.get_submodule(path).register_parameter(leaf, own)
    rounding = []
    for bank, of_bank in _by_bank(memories, layer, edits).items():
        rows, bias = _rows_and_bias(memories, model, bank)
        numbers = [number - bank.offset for number, _ in of_bank]
        # In float64 on the CPU, so that an edit rounds once, to the dtype of the weights.
        before = rows[numbers].cpu().double()
        factor = torch.tensor([edit.factor for _, edit in of_bank], dtype=torch.float64)[:, None]
        constant = torch.tensor([edit.constant for _, edit in of_bank], dtype=torch.float64)
        exact = torch.where(factor == 0, 0.0, factor * before)  # 0 · v may be −0
        for place, (_, edit) in enumerate(of_bank):
            if edit.weights is not None:
                exact[place] = _new_numbers(edit, "value", exact[place])
        rows[numbers] = exact.to(rows)
        rounding.append(_check_rounding(layer, rows[numbers], exact))
        if bias is not None and any(isinstance(edit.target, Expert) for _, edit in of_bank):
            bias.zero_()
        if constant.any():
            assert bias is not None
            exact = bias.cpu().double() + constant @ before
            bias.copy_(exact.to(bias))
            rounding.append(_check_rounding(layer, bias, exact))
        for number, edit in of_bank:
            if edit.how == "write":
                for name, view in key_views(memories, model, bank).items():
                    exact = _new_numbers(edit, name, view[number - bank.offset])
                    view[number - bank.offset] = exact.to(view)
                    rounding.append(_check_rounding(layer, view[number - bank.offset], exact))
    return max(rounding)


def _new_numbers(edit: Edit, name: str, old: Tensor) -> Tensor:
    """Return the new value, key or bias of a memory in float64; if none is given, the old one."""
    numbers = getattr(edit.weights, name)
    new = old.cpu().double() if numbers is None else torch.tensor(numbers, dtype=torch.float64)
    if new.shape != old.shape:
        raise ModelError(
            f"{edit}: the new {name.replace('_', ' ')} has {new.numel()} numbers, but the model"
            f" stores {old.numel()}. Use the model that the edit was made for."
        )
    return new


def _rows_and_bias(
    memories: Memories, model: PreTrainedModel, bank: Bank
) -> tuple[Float[Tensor, "memory width"], Float[Tensor, " width"] | None]:
    """Return views of the weights of a model, or a copy of it, into which edits are written.

    One row per memory: values, or lambda keys; and the bias that is added to them.
    """
    module = model.get_submodule(_module_name(memories, _edited_module(memories, bank)))
    if isinstance(bank, ExpertBank):
        experts = routed_experts(module)
        assert experts is not None
        has_bias = experts.value_bias is not None
        return experts.values(bank.number), experts.bias(bank.number) if has_bias else None
    bias = getattr(module, "bias", None)
    if isinstance(module, FactoredLinear):
        return module.weight, bias
    return linear_weight(module).T, bias


def key_views(memories: Memories, model: PreTrainedModel, bank: Bank) -> dict[str, Tensor]:
    """Return views of the keys of a bank and their biases, if it has them, one row per memory."""
    if isinstance(bank, ExpertBank):
        experts = routed_experts(model.get_submodule(_module_name(memories, bank.experts.module)))
        assert experts is not None
        maps = {"key": (experts.keys, experts.key_bias), "up": (experts.up_keys, experts.up_bias)}
        found = {}
        for name in ("key", "up") if experts.gated else ("key",):
            rows, biases = maps[name]
            found[name] = rows(bank.number)
            if experts.input_bias is not None:
                found[f"{name}_bias"] = biases(bank.number)
        return found
    found = {}
    for name, map, own in (
        ("key", bank.keys, slice(None, bank.size)),
        ("up", bank.up, slice(-bank.size, None)),
    ):
        if map is not None:
            module = model.get_submodule(_module_name(memories, map))
            found[name] = linear_weight(module)[own]
            if getattr(module, "bias", None) is not None:
                found[f"{name}_bias"] = linear_bias(module)[own]
    return found


def _edited_module(memories: Memories, bank: Bank) -> nn.Module:
    """Return the module that has the weights which edits of a bank's values change."""
    if isinstance(bank, ExpertBank):
        return bank.experts.module
    return bank.keys if memories.rows[bank.layer].input_values else bank.values


def _module_name(memories: Memories, module: nn.Module) -> str:
    names: dict[nn.Module, str] = {one: name for name, one in memories.model.named_modules()}
    return names[module]


def _parameter_names(memories: Memories, layer: int, edits: list[tuple[int, Edit]]) -> list[str]:
    """Return the names of the parameters that the edits of a layer change."""
    changed: list[Tensor] = []
    for bank, of_bank in _by_bank(memories, layer, edits).items():
        rows, bias = _rows_and_bias(memories, memories.model, bank)
        changed.append(rows)
        if bias is not None and any(
            edit.constant or isinstance(edit.target, Expert) for _, edit in of_bank
        ):
            changed.append(bias)
        if any(edit.how == "write" for _, edit in of_bank):
            changed += key_views(memories, memories.model, bank).values()
    begins = {view.data_ptr() for view in changed}
    found = []
    for name, tensor in memories.model.named_parameters():
        first = tensor.data_ptr()
        if any(first <= begin < first + tensor.nbytes for begin in begins):
            found.append(name)
    return found


def _by_bank(
    memories: Memories, layer: int, edits: list[tuple[int, Edit]]
) -> dict[Bank, list[tuple[int, Edit]]]:
    found: dict[Bank, list[tuple[int, Edit]]] = {}
    for number, edit in edits:
        found.setdefault(memories.banks[layer].at(number), []).append((number, edit))
    return found


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _check_rounding(layer: int, rounded: Tensor, exact: Tensor) -> float:
    """Return the largest relative rounding error; raise if a number overflowed."""
    if not torch.isfinite(rounded).all():
        raise ModelError(
            f"The edits of layer {layer} lead to numbers that overflow {rounded.dtype}. Use"
            " smaller numbers."
        )
    largest = exact.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float((rounded.cpu().double() - exact).abs().max() / largest)


def _check_edits(memories: Memories, edits: Edits, is_stored: bool) -> None:
    """Raise if weights cannot hold the edits."""
    if not edits:
        raise ModelError("There is nothing to edit. Pass off, set, scale, mean or redirect.")
    if routes := [str(edit) for edit in edits if edit.how in ROUTES]:
        raise ModelError(
            f"Cannot write {', '.join(routes)}: router weights cannot express it. Use trace, or"
            " switch the expert off, which can be written."
        )
    if edits.positions is not None:
        raise ModelError(
            "Weights act at every position, so an edit at some positions cannot be written. Drop"
            " the positions, or try the edit on a prompt with trace."
        )
    if not is_stored:
        check_stored(memories)
    if memories.row.repeats:
        raise ModelError(
            f"The layers of a {memories.family!r} model run several times with the same weights. An"
            " edit would change all runs; try it on a prompt with trace."
        )
    names: dict[int, list[str]] = {}
    for name, tensor in memories.model.named_parameters(remove_duplicate=False):
        names.setdefault(tensor.data_ptr(), []).append(name)
    for layer, of_layer in edits.by_layer(memories.layout).items():
        for name in _parameter_names(memories, layer, of_layer):
            same = names[memories.model.get_parameter(name).data_ptr()]
            if len(same) > 1:
                what = "values" if memories.has_values else "keys"
                raise ModelError(
                    f"The {what} of layer {layer} are shared: {', '.join(same)} are one tensor. An"
                    " edit would change all of them; try it on a prompt with trace."
                )


def check_stored(memories: Memories) -> None:
    """Raise unless the weights in memory are those of the checkpoint, on one device."""
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


def _needed_bias_flag(memories: Memories, edits: Edits) -> str | None:
    """Return the setting of the config that gives the value maps a bias, if one is needed."""
    flag = None
    for edit in edits:
        if not edit.constant:
            continue
        cell = memories.layout.resolve(edit.cell)
        bank = memories.banks[cell.layer].at(cell.memory)
        if isinstance(bank, ExpertBank) or bank.is_weighted:
            raise ModelError(
                f"Cannot write {edit}: an expert's output is multiplied by its weight, which"
                " depends on the token, so weights cannot express a fixed coefficient. off and"
                " scale"
                " can be written; for set and mean use trace."
            )
        if getattr(bank.values, "bias", None) is None:
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
    names = {name for name, _ in other.named_parameters()}
    for name, tensor in built.named_parameters():
        if name in names:
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
    check_free(folder)
    with committing_folder(folder) as temporary, silence_transformers():
        try:
            model.save_pretrained(temporary)
            if isinstance(tokens, WordVocabulary):
                tokens.save(temporary)
            else:
                tokenizer = copy.copy(tokens.tokenizer)
                local = ("is_local", "local_files_only")  # where it was loaded from
                init = {k: v for k, v in tokenizer.init_kwargs.items() if k not in local}
                tokenizer.init_kwargs = init
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
                f"transformers would load the checkpoint {folder} with different weights: their"
                " hash is"
                f" {found}, not {expected}. Nothing was written; please report this model."
            )


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
