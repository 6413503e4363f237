"""Write a fact into an idle memory: a prompt as its key, a token as its value.

    s(x) = x · k / (x_p · k),    k = (C + λ)⁻¹ · x_p        1 at the prompt, small elsewhere
    m = f(a · s(x)) · s(x) if gated,  f(a · (s(x) − θ) / (1 − θ)) with a bias,  f(a · s(x)) without
    v = α · the smallest v with  ℓ_t(v) − ℓ_w(v) ≥ δ + max(0, z_w − z_t)  for every token w

x_p is the input of the layer at the prompt's last token, and C = mean of xᵀx over text: of all keys
with x_p · k = 1, this one answers least, on average, to anything else. λ is a share of C's mean
eigenvalue. z are the model's own logits after the prompt, ℓ those that v would add at the last
layer: the value promotes the token t by the margin δ, and makes up for what others lead by
(`redirect.py`). α is the smallest strength at which t does lead by the margin, or has a
probability, in exact passes with the new weights.

The memory that is overwritten should be idle (`idle.py`). Where you do not choose the layer, the
fact is written into the idlest memory of some layers in turn, and the one is kept that changes
other text least (KL). Measured (`drift.py`): paraphrases, neighboring prompts, text of a corpus;
and as a control, the same value behind random keys of equal norm, in other idle memories.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from ffmem.cells import Cell
from ffmem.corpus.corpus import Corpus
from ffmem.errors import FfmemError, ModelError, SelfCheckFailed
from ffmem.files import write_text
from ffmem.indexing.chunks import batches
from ffmem.indexing.store import Index
from ffmem.interventions.checkpoint import (
    EditResult,
    check_free,
    check_stored,
    edit_checkpoint,
    edit_weights,
    key_views,
)
from ffmem.interventions.edits import Edit, Edits, MemoryWeights
from ffmem.interventions.effect import read_predictions, read_prompt_file
from ffmem.interventions.forward import (
    BankRows,
    LoadedModel,
    find_target,
    note_unknown,
    open_model,
    post_norm_sigma,
    promoted_tokens,
    read_prompt,
)
from ffmem.interventions.idle import WritePlace, choose_places, idle_memories, router_weight
from ffmem.interventions.partial_forward import PartialForward, log_probabilities
from ffmem.interventions.redirect import Readings, as_numbers, nearest_value
from ffmem.interventions.side_effects import (
    BATCH_TOKENS,
    PromptChange,
    PromptIds,
    compare,
    first_sentences,
    measure_drift,
    predict,
    read_sentences,
    same_endings,
    side_effects_corpus,
)
from ffmem.interventions.written import TextChange, Trial, WriteResult
from ffmem.models.banks import Bank, DenseBank, ExpertBank
from ffmem.models.memories import Memories
from ffmem.models.modules import first_tensor
from ffmem.progress import Progress
from ffmem.signatures import check_arguments
from ffmem.stats import check_seed
from ffmem.text import pluralize

SCORE = 6.0
"""a: what the activation gets at the prompt, where it is nearly linear."""
THRESHOLD = 0.5
"""θ: below this share of the prompt's own score, a key with a bias stays silent."""
SHRINKAGE = 0.05
"""λ, of the mean eigenvalue of C."""
MARGIN = 1.0
"""How far the token should lead the next one by default, in nats."""

KNOWN_TOKENS = 4096
"""Tokens of text that C is measured on."""
KNOWN_SENTENCES = 20_000
"""Sentences of an index that are searched for neighboring prompts."""

WRITE_FILE = "write.json"


class Goal(NamedTuple):
    """When the token is predicted: it leads by a margin, or has a probability."""

    token: int
    margin: float
    probability: float | None

    def is_met(self, logs: Float[Tensor, "row vocab"]) -> Bool[Tensor, " row"]:
        """Return where log-probabilities meet the goal."""
        own = logs[:, self.token]
        if self.probability is not None:
            return own >= math.log(self.probability)
        others = logs.clone()
        others[:, self.token] = -math.inf
        return own - others.amax(dim=1) >= self.margin

    def __str__(self) -> str:
        if self.probability is not None:
            return f"probability {self.probability:g}"
        return f"a lead of {pluralize(self.margin, 'nats')}"


class Solution(NamedTuple):
    """A place, the new weights of its memory, and what they do at the prompt."""

    place: WritePlace
    edit: Edit
    memories: Memories
    """The model with these weights."""
    coefficient: float
    strength: float
    """|m| · ‖v‖, relative to the norm of the residual stream there."""


@check_arguments
def write(
    model_or_index: LoadedModel | Memories | Index | str | Path,
    prompt: str,
    token: str,
    out: str | Path,
    *,
    layer: int | None = None,
    cell: object | None = None,
    force: bool = False,
    margin: float = MARGIN,
    probability: float | None = None,
    paraphrases: str | Path | None = None,
    neighbours: str | Path | None = None,
    controls: int = 3,
    seed: int = 0,
    corpus: Corpus | str | Path | None = "wikitext-2:valid",
    start: str | None = None,
    model: Memories | str | Path | None = None,
    adapter: str | Path | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> WriteResult:
    """Write a fact into an idle memory: the model then continues a prompt with a token.

    Args:
        model_or_index: An index, which knows the idle memories; or a model, with `cell` and
            `force`.
        prompt: The text; its last token at the memory's layer becomes the key.
        token: The token to predict after it, with its leading space if it has one.
        out: Folder of the new model.
        layer: Layer to write into. Default: the best of four.
        cell: Memory to overwrite. Default: the most idle in the layer.
        force: Whether to overwrite a memory that is not idle, or not known to be.
        margin: How far the token should lead the next one, in nats.
        probability: What the token's probability should be, instead of a margin.
        paraphrases: File of prompts (.txt, .tsv, .jsonl) on which the fact should hold too.
        neighbours: File of prompts on which nothing should change. Default: text ending the same.
        controls: Other idle memories that get the same value and a random key, to compare with.
        seed: Random seed of the control.
        corpus: Corpus to measure side effects on; if given by name, its first 200 sentences. None
            measures none.
        start: "auto", "none", "bos", "eos", or a token. Default: as the index, or "auto".
        model: The model of an index, or where it is now. Default: the one that the index names.
        adapter: Adapter to merge into the model, or where that of an index is now.
        device: Where the model runs.
        progress: Where progress is shown. Default: nowhere.
    """
    folder, say = Path(out), progress or Progress(quiet=True)
    corpus = side_effects_corpus(corpus)
    for path in (paraphrases, neighbours):
        if path is not None:
            read_prompt_file(path)  # raises on a wrong file before the model is loaded
    check_free(folder)
    _check_numbers(margin, probability, controls)
    check_seed(seed)
    loaded = open_model(model_or_index, start, model, adapter, "auto", device, progress)
    memories = loaded.memories
    check_stored(memories)
    read = read_prompt(loaded, prompt)
    goal = Goal(find_target(memories, token), margin, probability)
    rewordings, others = (_read_prompts(loaded, path) for path in (paraphrases, neighbours))
    run = PartialForward(memories, read.ids, len(read.ids) - 1)
    before, _ = read_predictions(memories, run.output, goal.token)
    if goal.is_met(log_probabilities(memories.head, run.output))[0]:
        raise FfmemError(
            f"The model continues the prompt with {before.token!r} already, with {goal}"
            f" (probability {before.probability:.3f}). There is nothing to write."
        )
    places = choose_places(loaded, run, cell, layer, force)
    known, text = _read_text(loaded, corpus)
    if neighbours is None:
        others = same_endings(memories, known, read.ids, loaded.start)

    say.say(f"Trying {', '.join(str(place.cell) for place in places)}.")
    moments = second_moments(memories, [place.bank for place in places], known, loaded.start)
    best, trials, least = None, [], math.inf
    for place in places:
        found = solve(memories, run, place, goal, moments[place.bank])
        if found is None:
            trials.append(Trial(str(place.cell), place.cell.layer, None, None))
            continue
        kl, _ = measure_drift(memories, found.memories, known, loaded.start)
        trials.append(Trial(str(place.cell), place.cell.layer, found.strength, kl))
        if kl < least:
            best, least = found, kl
    if best is None:
        raise FfmemError(
            f"No strength gives {before.token!r} {goal} in"
            f" {', '.join(one.cell for one in trials)}: later layers undo it, or a norm limits it."
            " Choose another layer, or a smaller margin or probability."
        )

    questions = [(prompt, read.ids), *rewordings, *others]
    n = 1 + len(rewordings)
    models = {str(best.place.cell): best.memories}
    models |= random_keys(loaded, best, controls, seed)
    predictions = predict(memories, questions, goal.token)
    changes: dict[str, list[PromptChange]] = {}
    of_text: list[TextChange] = []
    for name, changed in models.items():
        kl, top1_changed = measure_drift(memories, changed, text, loaded.start)
        after = predict(changed, questions, goal.token)
        changes[name] = own = compare(memories, questions, predictions, after, goal.token)
        moved = [one.changed for one in own[n:]]
        share = float(np.mean(moved)) if moved else None
        of_text.append(TextChange(name, kl, top1_changed, own[0].holds, share))
    own = changes[str(best.place.cell)]
    result = WriteResult(
        folder=str(folder),
        model=memories.source,
        prompt=prompt,
        tokens=read.tokens,
        target=before,
        goal=str(goal),
        cell=str(best.place.cell),
        layer=best.place.cell.layer,
        activity=best.place.activity,
        coefficient=best.coefficient,
        strength=best.strength,
        value_top=_promoted(best),
        trials=trials,
        written=own[0],
        paraphrases=own[1:n],
        neighbours=own[n:],
        change=of_text[0],
        control=of_text[1:],
        notes=note_unknown(read.unknown) + _notes(best, own[0], controls, len(of_text) - 1),
    )
    saved: list[WriteResult] = []

    def add(edited: EditResult, temporary: Path) -> None:
        done = replace(
            result,
            side_effects=edited.side_effects,
            hash_before=edited.hash_before,
            hash_after=edited.hash_after,
            notes=[*result.notes, *edited.notes],
        )
        saved.append(done)
        content = {name: value for name, value in done.to_dict().items() if name != "folder"}
        text = json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False)
        write_text(temporary / WRITE_FILE, text + "\n")

    edit_checkpoint(loaded, folder, Edits((best.edit,)), corpus, progress, add)
    return saved[0]


def _check_numbers(margin: float, probability: float | None, controls: int) -> None:
    if not 0 < margin < math.inf:
        raise FfmemError(f"The margin must be a number above 0, in nats; got {margin!r}.")
    if probability is not None and not 0 < probability < 1:
        raise FfmemError(f"The probability must lie between 0 and 1; got {probability!r}.")
    if controls < 0:
        raise FfmemError(f"controls must be 0 or more; got {controls!r}.")


# Text


def _read_prompts(loaded: LoadedModel, path: str | Path | None) -> list[PromptIds]:
    """Return the prompts of a file; targets in it are not used."""
    if path is None:
        return []
    found = []
    for one in read_prompt_file(path)[1]:
        if not isinstance(one.prompt, str):
            raise FfmemError(f"{path}, line {one.line}: a fact needs texts, not conversations.")
        found.append((one.prompt, read_prompt(loaded, one.prompt).ids))
    return found


def _read_text(
    loaded: LoadedModel, corpus: Corpus | None
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the sentences that make the key, and others on which changes are measured.

    The first are those of the index; without one, the corpus is read further for them.
    """
    memories = loaded.memories
    longest = None if memories.context is None else memories.context - 1
    measured: list[list[int]] = []
    if corpus is not None:
        measured = [ids for _, ids in read_sentences(memories, corpus).sentences]
    if loaded.index is not None:
        stored = loaded.index.sentences
        rows = stored.rows(0, min(stored.n_sentences, KNOWN_SENTENCES))
        known = [row.ids[:longest] for row in rows]
    else:
        if corpus is None:
            raise FfmemError("The key is computed from text. Pass a corpus or an index.")
        further = replace(corpus, limit=None).sentences(memories.tokenizer)
        start = len(measured)
        known = [one.ids[:longest] for one in islice(further, start, start + KNOWN_SENTENCES // 10)]
    known, measured = known or measured, measured or known
    if not first_sentences(known, 1):
        raise FfmemError(
            "No sentence of the text has two tokens, so no key can be computed from it."
        )
    return known, measured


# The key


@torch.no_grad()
def second_moments(
    memories: Memories, banks: Sequence[Bank], sentences: Sequence[list[int]], start: int | None
) -> dict[Bank, Float64[Tensor, "width width"]]:
    """Return C = mean of xᵀx of some banks over text, the start token included."""
    sums: dict[Bank, Tensor] = {}
    n_tokens = 0
    with record_inputs(banks) as inputs:
        for batch in batches(first_sentences(sentences, KNOWN_TOKENS), start, BATCH_TOKENS):
            memories.forward(batch.tokens, layers=1 + max(bank.layer for bank in banks))
            n_tokens += int(batch.is_token.sum())
            for bank, x in inputs.items():
                rows = x[batch.is_token.flatten().to(x.device)].double()
                sums[bank] = sums.get(bank, 0.0) + rows.T @ rows
    return {bank: total / n_tokens for bank, total in sums.items()}


@contextmanager
def record_inputs(banks: Sequence[Bank]) -> Iterator[dict[Bank, Float[Tensor, "token width"]]]:
    """Give what the keys of some banks get, token by token, in the last pass."""
    found: dict[Bank, Tensor] = {}

    def read(bank: Bank, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[bank] = first_tensor(args, kwargs).flatten(0, -2)

    with ExitStack() as hooks:
        for bank in banks:
            hook = partial(read, bank)
            handle = input_module(bank).register_forward_pre_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield found


def input_module(bank: Bank) -> nn.Module:
    """Return the module whose input is what the keys of a bank are multiplied with."""
    return bank.keys if isinstance(bank, DenseBank) else bank.experts.module


@torch.no_grad()
def _prompt_input(memories: Memories, run: PartialForward, bank: Bank) -> Float64[Tensor, " width"]:
    """Return x at the prompt's last token, as the keys of a bank get it."""
    with record_inputs([bank]) as inputs:
        memories.forward(run.tokens, layers=bank.layer + 1)
    x = inputs[bank][-1].double()
    if isinstance(bank, ExpertBank) and bank.experts.scales_input:
        return x * router_weight(memories, run, bank)
    return x


def make_key(
    x: Float64[Tensor, " width"], moment: Float64[Tensor, "width width"]
) -> Float64[Tensor, " width"]:
    """Return k with x · k = 1 that answers least to other text."""
    identity = torch.eye(len(x), dtype=x.dtype, device=x.device)
    ridge = SHRINKAGE * moment.diagonal().mean()
    key: Tensor = torch.linalg.solve(moment + ridge * identity, x)
    return key / (key @ x)


def key_weights(memories: Memories, bank: Bank, key: Float64[Tensor, " width"]) -> dict[str, Any]:
    """Return the key of a memory, both if it is gated, with biases: the score is `SCORE` at 1."""
    names = key_views(memories, memories.model, bank)
    sharpness = 1 / (1 - THRESHOLD) if "key_bias" in names else 1.0
    numbers = partial(as_numbers, dtype=bank.dtype)
    found: dict[str, Any] = {"key": numbers((SCORE * sharpness * key).cpu().numpy())}
    if "key_bias" in names:
        found["key_bias"] = -SCORE * sharpness * THRESHOLD
    if "up" in names:
        found["up"] = numbers(key.cpu().numpy())
    if "up_bias" in names:
        found["up_bias"] = 0.0
    return found


# Value and strength


def solve(
    memories: Memories,
    run: PartialForward,
    place: WritePlace,
    goal: Goal,
    moment: Float64[Tensor, "width width"],
) -> Solution | None:
    """Return the weights of smallest strength that meet the goal; None if none does."""
    cell, bank = place.cell, place.bank
    key = make_key(_prompt_input(memories, run, bank), moment)
    direction = value_direction(memories, run, bank, goal)
    shown = memories.tokenizer.token_texts(memories.vocabulary)[goal.token]

    def edit(strength: float) -> Edit:
        value = as_numbers((strength * direction).cpu().numpy(), bank.dtype)
        weights = MemoryWeights(value=value, **key_weights(memories, bank, key))
        return Edit(str(cell), "write", 1.0, 0.0, token=shown, weights=weights)

    try:
        unit = with_edit(memories, edit(1.0))
        prompt = PartialForward(unit, run.tokens[0].tolist(), run.n_tokens - 1)
        m = float(prompt.layers[cell.layer].coefficients[0, cell.memory])
        strength = smallest_strength(prompt, cell, goal, m)
        if strength is None:
            return None
        edited = with_edit(memories, edit(strength))
    except SelfCheckFailed as error:
        raise ModelError(f"The new weights of {cell} break the model: {error}") from None
    to_stream = memories.to_directions(cell.layer)
    added = abs(m) * to_stream(bank.from_stored((strength * direction).float()[None])).norm()
    if memories.rows[cell.layer].post_norm is not None:
        after = PartialForward(edited, run.tokens[0].tolist(), run.n_tokens - 1)
        added = added / post_norm_sigma(edited, cell.layer, after.layers[cell.layer])
    residual = run.layers[cell.layer].residual.float().norm()
    return Solution(place, edit(strength), edited, m, float(added / residual))


def with_edit(memories: Memories, edit: Edit) -> Memories:
    """Return the model with an edit in its weights."""
    model = edit_weights(memories, Edits((edit,)), is_stored=True).model
    return Memories(model, memories.tokenizer, memories.source, None, "edited")


def value_direction(
    memories: Memories, run: PartialForward, bank: Bank, goal: Goal
) -> Float64[Tensor, " width"]:
    """Return the direction of the smallest stored value that makes the token lead by the margin.

    It is read at the last layer, where the final norm divides by what it does now. It promotes the
    token by itself, so that more of it never does less. If the head is not linear, or no value does
    so, it is the direction in which log p rises fastest.
    """
    head = memories.head
    sigma = head.denominator(run.output)
    if head.linear:
        readings = Readings.of(memories, bank)
        readings = readings._replace(scale=readings.scale / float(sigma[0]))
        logits = head.scale * head.unscaled(run.output)[0].cpu().double().numpy()
        origin = np.zeros(len(readings.to_inner))
        base = np.maximum(logits, logits[goal.token])
        found = nearest_value(origin, readings, goal.token, goal.margin, base)
        if found is not None:
            value = torch.from_numpy(found).to(memories.device)
            return torch.nn.functional.normalize(value, dim=0)
    to_stream = memories.to_directions(bank.layer)
    with torch.enable_grad():
        value = torch.zeros(bank.stored_values().shape[1], requires_grad=True)
        added = to_stream(bank.from_stored(value[None].to(memories.device)))
        logs = log_probabilities(head, run.output.float() + added, sigma)
        (gradient,) = torch.autograd.grad(logs[0, goal.token], value)
    return torch.nn.functional.normalize(gradient.double().to(memories.device), dim=0)


@torch.no_grad()
def smallest_strength(
    prompt: PartialForward, cell: Cell, goal: Goal, coefficient: float
) -> float | None:
    """Return the smallest factor of a memory's value that meets a goal; None if none does.

    The value has norm 1, and the factor the sign of the coefficient. Factors grow by √2 from a
    thousandth to a thousand times the stream's norm; the interval before the first that is enough
    is searched again, twice.
    """
    if not coefficient:
        return None
    layer = prompt.layers[cell.layer]
    unit = float(layer.residual.float().norm()) / coefficient

    def enough(factors: Float[Tensor, " row"]) -> list[bool]:
        found: list[bool] = []
        for part in factors.split(prompt.n_rows):

            def scale(rows: BankRows, part: Tensor = part) -> Tensor:
                own = cell.memory - rows.memories.start
                changed = rows.coefficients.clone()
                if 0 <= own < len(rows.memories):
                    by_row = part.to(changed)[rows.tokens // prompt.n_tokens]
                    changed[:, own] *= by_row
                return changed

            stream = prompt.run(cell.layer, len(part), {cell.layer: scale})
            logs = log_probabilities(prompt.memories.head, stream)
            found += goal.is_met(logs).tolist()
        return found

    factors = unit * 2.0 ** torch.arange(-10, 10.5, 0.5)
    low = 0.0
    for _ in range(3):
        met = enough(factors)
        if True not in met:
            return None
        first = met.index(True)
        low = float(factors[first - 1]) if first else low
        high = float(factors[first])
        factors = torch.linspace(low, high, 17)[1:]
    return high


def random_keys(loaded: LoadedModel, best: Solution, n: int, seed: int) -> dict[str, Memories]:
    """Return models with the same value behind random keys of equal norm, by idle memory."""
    memories, place = loaded.memories, best.place
    weights = best.edit.weights
    if loaded.index is None or weights is None or weights.key is None:
        return {}
    idle = [number for number, _ in idle_memories(loaded.index, memories, place.bank)]
    rng = np.random.default_rng(seed)
    others = [number for number in idle if number != place.cell.memory]
    found = {}
    for number in rng.permutation(others)[:n].tolist():
        cell = str(memories.layout.cell(place.cell.layer, number))
        direction = rng.normal(size=len(weights.key))
        direction /= np.linalg.norm(direction)
        new: dict[str, Any] = {
            "key": as_numbers(np.linalg.norm(weights.key) * direction, place.bank.dtype)
        }
        if weights.up is not None:
            new["up"] = as_numbers(np.linalg.norm(weights.up) * direction, place.bank.dtype)
        edit = replace(best.edit, cell=cell, weights=replace(weights, **new))
        found[cell] = with_edit(memories, edit)
    return found


def _promoted(found: Solution) -> list[str]:
    """Return the tokens that the new memory promotes at the prompt."""
    cell, bank = found.place.cell, found.place.bank
    weights = found.edit.weights
    assert weights is not None
    value = torch.tensor([weights.value], device=found.memories.device)
    direction = found.memories.to_directions(cell.layer)(bank.from_stored(value))
    return promoted_tokens(found.memories, direction, torch.tensor([found.coefficient]))[0]


def _notes(found: Solution, written: PromptChange, asked: int, controls: int) -> list[str]:
    """Return what a reader of the result should know."""
    notes = []
    activity = found.place.activity
    if activity is not None and not activity.is_idle:
        notes.append(f"{found.place.cell} was not idle ({activity}); what it did is lost.")
    if isinstance(found.place.bank, ExpertBank):
        notes.append("Only text that the router sends to this expert can reach the memory.")
    if not written.holds:
        notes.append(
            "Rounded to the dtype of the checkpoint, the fact does not hold. Use a larger margin."
        )
    if activity is None:
        notes.append("Without an index, idle memories are unknown, so there is no control.")
    elif controls < asked:
        notes.append(
            f"The control has {pluralize(controls, 'memories')}: not enough others are idle."
        )
    return notes
