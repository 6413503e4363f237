"""Where a model of unknown family has its memories: the search that needs no row of the table.

The model runs once on a few tokens. In each layer, every module's input and output is recorded, and
numbers decide what its modules are:

    m = f(x · Kᵀ),  f(x · Kᵀ) ⊙ (x · Uᵀ)     m is the input of the value map
    o = r + y,  norm(r + y)                   y is the value map's output, perhaps normed or scaled
    logits = s · U · N(o)                     o is the output of the last layer

Layers are searched one by one, so they may differ. A layer without such a map has no memories. The
result is a row of the families table for every layer; the self-check tests it like any other.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from ffmem.errors import ModelError
from ffmem.models.banks import find_banks
from ffmem.models.experts import find_experts, install
from ffmem.models.families import CLAMPED, FUSED, NOTHING, Family
from ffmem.models.head import Head, Norm
from ffmem.models.modules import clamped_glu, find_module, first_tensor

ACTIVATIONS = ("silu", "gelu", "gelu_new", "relu", "relu2", "quick_gelu", "tanh", "sigmoid")
"""What f may be if neither the config nor a module says it."""

CONTEXTS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "n_ctx")
"""Names of the longest input in configs."""

FLOAT_BOUND, HALF_BOUND = 1e-4, 2e-2
"""Largest relative difference of numbers that count as equal; as in the self-check."""


class Call(NamedTuple):
    """What went into a module and came out, one row per token."""

    input: Float[Tensor, "row _"]
    output: Float[Tensor, "row _"]


Calls = dict[str, Call]
"""Calls of a layer's modules by path; "" is the layer. Modules that ran twice are left out."""

Option = tuple[dict[str, Any], Tensor, Tensor]
"""Fields of a row, what they give, and what they should give."""


@dataclass
class Stack:
    """A list of modules that may be the layers of the model."""

    path: str
    blocks: list[nn.Module]
    runs: list[int] = field(default_factory=list)
    """How often each block ran."""
    rows: list[dict[str, Any] | None] = field(default_factory=list)
    """What was found in each block: fields of its row; None if it has no memories."""
    last_output: Float[Tensor, "row _"] | None = None
    """The output of the block that ran last."""


def find_rows(model: PreTrainedModel) -> list[Family]:
    """Return a row of the families table for every layer of a model; raise if there is none."""
    install(model)
    config = model.config.get_text_config()
    embeddings = getattr(model.get_input_embeddings(), "num_embeddings", config.vocab_size)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(min(embeddings, config.vocab_size), (2, 8), generator=generator)
    with torch.no_grad(), Recorder(model, config, tokens) as recorder:
        logits = model(tokens.to(model.device), use_cache=False).logits
    stack = _the_layers(recorder.stacks)
    head = _find_head(model, config, recorder, stack, logits.flatten(0, -2))
    some = next(row for row in stack.rows if row is not None)
    context = next((name for name in CONTEXTS if hasattr(config, name)), None)
    without = some | {"values": NOTHING}
    return [
        Family(blocks=stack.path, context=context, **head, **(without if row is None else row))
        for row in stack.rows
    ]


def _the_layers(stacks: list[Stack]) -> Stack:
    """Return the only list of modules that has memories; raise if there is not one."""
    found = [stack for stack in stacks if any(row is not None for row in stack.rows)]
    if not found:
        raise ModelError("no layer has a recognizable feed-forward part")
    if len(found) > 1:
        paths = ", ".join(stack.path for stack in found)
        raise ModelError(f"it has several stacks of layers ({paths}), not one residual stream")
    (stack,) = found
    values = {row["values"] for row in stack.rows if row is not None}
    for layer, (block, row) in enumerate(zip(stack.blocks, stack.rows, strict=True)):
        same = next((path for path in values if find_module(block, path) is not None), None)
        if row is None and stack.runs[layer] and same is not None:
            raise ModelError(
                f"in layer {layer}, the input of {same} is not an activation of its keys"
            )
    return stack


class Recorder:
    """Records modules while a model runs, and searches each layer as soon as it is done."""

    def __init__(self, model: PreTrainedModel, config: Any, tokens: Int[Tensor, "b p"]) -> None:
        self.model = model
        self.config = config
        self.tokens = tokens
        self.stacks = [
            Stack(path, list(module), [0] * len(module), [None] * len(module))
            for path, module in model.named_modules()
            if isinstance(module, nn.ModuleList) and not _is_inside_list(model, path)
        ]
        self.outer: Calls = {}
        """Calls of the modules outside of layers."""
        self._hooks = ExitStack()

    def __enter__(self) -> "Recorder":
        inside = tuple(f"{stack.path}." for stack in self.stacks)
        counts: dict[str, int] = {}
        for path, module in self.model.named_modules():
            if path and not f"{path}.".startswith(inside):
                self._record(self.outer, counts, path, module, keep_last=True)
        for stack in self.stacks:
            for number, block in enumerate(stack.blocks):
                self._hook_block(stack, number, block)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def _record(
        self,
        calls: Calls,
        counts: dict[str, int],
        path: str,
        module: nn.Module,
        keep_last: bool = False,
    ) -> None:
        inputs: list[Tensor | None] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[:] = [_copy(args, kwargs)]

        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            counts[path] = counts.get(path, 0) + 1
            found, copied = inputs.pop() if inputs else None, _copy(output, {})
            if found is not None and copied is not None and (keep_last or counts[path] == 1):
                calls[path] = Call(found, copied)
            else:
                calls.pop(path, None)

        add = self._hooks.callback
        add(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        add(module.register_forward_hook(after).remove)

    def _hook_block(self, stack: Stack, number: int, block: nn.Module) -> None:
        calls: Calls = {}
        counts: dict[str, int] = {}
        for path, module in block.named_modules():
            self._record(calls, counts, path, module)

        def finish(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            stack.runs[number] += 1
            if "" in calls:
                found = find_layer(block, calls, self.config)
                if found is not None:
                    _check_run(stack, number, calls[""].input, self.tokens)
                    stack.rows[number] = found
                stack.last_output = calls[""].output
            elif stack.rows[number] is not None:
                raise ModelError(
                    f"it runs its layers ({stack.path}) several times, so each position has several"
                    " sets of coefficients"
                )
            calls.clear()

        self._hooks.callback(block.register_forward_hook(finish).remove)


def _is_inside_list(model: nn.Module, path: str) -> bool:
    """Return whether a module is part of another list's element."""
    parents = [path[: i - 1] for i in range(1, len(path)) if path[i - 1] == "."]
    return any(isinstance(find_module(model, parent), nn.ModuleList) for parent in parents)


def _copy(values: Any, kwargs: dict[str, Any]) -> Float[Tensor, "row _"] | None:
    """Return a copy of a module's first tensor, one row per token; None if it is none."""
    try:
        tensor = first_tensor(values, kwargs)
    except (IndexError, KeyError, StopIteration, TypeError):
        return None
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not tensor.dim():
        return None
    return tensor.detach().clone().reshape(-1, tensor.shape[-1])


def _check_run(stack: Stack, number: int, rows: Tensor, tokens: Tensor) -> None:
    """Raise unless a block sees one vector per token."""
    if len(rows) != tokens.numel():
        raise ModelError(
            f"its layers ({stack.path}) see {len(rows)} vectors for {tokens.numel()} tokens, so"
            " positions are not tokens"
        )


# A layer


def find_layer(block: nn.Module, calls: Calls, config: Any) -> dict[str, Any] | None:
    """Return the fields of a layer's row from what its modules did; None without memories."""
    found = list(_feed_forwards(block, calls, config))
    if find_experts(block) is not None:
        way, values, places = _expert_layer(block, calls, config, found)
    elif not found:
        return None
    elif len({way["values"] for way in found}) > 1:
        paths = ", ".join(dict.fromkeys(way["values"] for way in found))
        raise ModelError(f"its layers have several feed-forward parts ({paths})")
    else:
        way, values = found[0], calls[found[0]["values"]].output
        places = [_parent(way["values"]), _parent(way["keys"]), way["keys"]]
    residual = _find_residual(block, calls, values, places)
    if residual is None:
        raise ModelError(
            f"“r + y = o” holds for no r of its layers, with y from {places[0] or way['values']}:"
            " the layer does something else with the sum"
        )
    return residual | way


def _expert_layer(
    block: nn.Module, calls: Calls, config: Any, shared: list[dict[str, Any]]
) -> tuple[dict[str, Any], Float[Tensor, "row hidden"], list[str]]:
    """Return the fields of a layer with experts, what they write, and where r may be."""
    activation = next((way["activation"] for way in shared), _named_activation(config))
    way = {"values": NOTHING, "keys": NOTHING, "activation": activation}
    row = Family(blocks="", values=NOTHING, keys=NOTHING)
    banks = find_banks(config.model_type, row, 0, block, calls[""].output.shape[-1])
    paths = {module: path for path, module in block.named_modules()}
    outputs = [paths[module] for module in banks.outputs]
    if any(path not in calls for path in outputs):
        raise ModelError("its layers run their experts in an unknown way")
    inside = [path for path in _norm_paths(block) if path.startswith(f"{outputs[0]}.")]
    for norm in inside:
        if norm in calls and _close(calls[norm].output, calls[outputs[0]].output):
            way["post_norm"] = norm
    return way, torch.stack([calls[path].output for path in outputs]).sum(0), outputs


def _named_activation(config: Any) -> str:
    """Return the config's name of the activation; SiLU if it names none."""
    names = (name for name, value in config.to_dict().items() if _is_activation(name, value))
    return next(names, "silu")


def _is_activation(name: str, value: Any) -> bool:
    return isinstance(value, str) and value in ACT2FN and "act" in name


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _feed_forwards(block: nn.Module, calls: Calls, config: Any) -> Iterator[dict[str, Any]]:
    """Yield every way to read a value map's input as coefficients: m = f(x · Kᵀ)."""
    hidden = calls[""].output.shape[-1]
    in_norms = tuple(f"{path}." for path in _norm_paths(block))
    linears = {
        path: call
        for path, call in calls.items()
        if isinstance(block.get_submodule(path), nn.Linear | Conv1D)
        and not path.startswith(in_norms)
    }
    for values, call in linears.items():
        if call.output.shape[-1] != hidden:
            continue
        for inner_norm, m in _before_inner_norm(block, calls, call.input):
            size = m.shape[-1]
            keys = [
                path
                for path, other in linears.items()
                if path != values
                and len(other.output) == len(m)
                and other.input.shape[-1] == hidden
                and other.output.shape[-1] in (size, 2 * size)
            ]
            for way in _match_keys(block, calls, config, keys, m):
                yield {"values": values, **way, "inner_norm": inner_norm}


def _before_inner_norm(
    block: nn.Module, calls: Calls, m: Float[Tensor, "row memory"]
) -> Iterator[tuple[str | None, Float[Tensor, "row memory"]]]:
    """Yield the coefficients, and what they were before a norm between keys and values."""
    yield None, m
    for path in _norm_paths(block):
        if path in calls and _close(calls[path].output, m):
            yield path, calls[path].input


def _match_keys(
    block: nn.Module, calls: Calls, config: Any, paths: list[str], m: Tensor
) -> Iterator[dict[str, Any]]:
    """Yield the key maps, and f, that give m."""
    size = m.shape[-1]
    scores = {path: calls[path].output for path in paths}
    halves = {path: s.split(size, dim=-1) for path, s in scores.items() if s.shape[-1] > size}
    pairs: list[tuple[str, str | None, Tensor, Tensor | None]] = [
        *((path, None, s, None) for path, s in scores.items() if s.shape[-1] == size),
        *((path, FUSED, gate, up) for path, (gate, up) in halves.items()),
        *(
            (one, two, scores[one], scores[two])
            for one, two in permutations(set(paths) - set(halves), 2)
        ),
    ]
    for keys, up, score, factor in sorted(pairs, key=lambda pair: paths.index(pair[0])):
        found = _best(_coefficients(block, calls, config, (keys, score, factor), m))
        if found is not None:
            yield {"keys": keys, "up": up, **found}
            return


def _coefficients(
    block: nn.Module,
    calls: Calls,
    config: Any,
    scores: tuple[str, Tensor, Tensor | None],
    m: Float[Tensor, "row memory"],
) -> Iterator[Option]:
    """Yield what m may be, given the path of the keys, x · Kᵀ and, if gated, x · Uᵀ."""
    path, score, up = scores
    if up is not None and getattr(config, "swiglu_limit", None) is not None:
        yield {"activation": CLAMPED}, clamped_glu(config, score, up), m
    for scale, number in [(None, 1.0), *_factors(block, _parent(path), score.shape[-1])]:
        for name, activated in _activations(block, calls, config, score * number):
            found = activated if up is None else activated * up
            yield {"activation": name, "key_scale": scale}, found, m


def _activations(
    block: nn.Module, calls: Calls, config: Any, score: Float[Tensor, "row memory"]
) -> Iterator[tuple[str, Float[Tensor, "row memory"]]]:
    """Yield what f may be, and f(score): as the config says, by a module, or a usual one."""
    for name, value in config.to_dict().items():
        if _is_activation(name, value):
            yield name, ACT2FN[value](score)
    for path, call in calls.items():
        module = block.get_submodule(path)
        is_function = path and not isinstance(module, nn.Linear | Conv1D) and not _is_norm(module)
        if is_function and _close(call.input, score) and call.output.shape == score.shape:
            yield path, call.output
    for name in ACTIVATIONS:
        yield name, ACT2FN[name](score)


def _find_residual(
    block: nn.Module, calls: Calls, values: Float[Tensor, "row hidden"], parts: list[str]
) -> dict[str, Any] | None:
    """Return how to read r and y so that they add up to the layer's output; the plainest way.

    `parts` are the paths of the feed-forward part: r may be its input.
    """
    o = calls[""].output
    norms = [path for path in _norm_paths(block) if path in calls]
    normed = [path for path in norms if calls[path].output.shape == o.shape]
    ys = [({"post_norm": None}, values)] + [
        ({"post_norm": path}, calls[path].output)
        for path in normed
        if _is_multiple(calls[path].input, values)
    ]
    rs = list(_possible_residuals(block, calls, norms, parts))
    pairs = [(one | other, y, r) for (one, y), (other, r) in product(ys, rs)]
    factors = list(_factors(block, parts[0], o.shape[-1]))

    def scaled() -> Iterator[Option]:
        for (scale, number), (fields, y, r) in product(factors, pairs):
            yield fields | {"multiplier": scale}, r + number * y, o
            yield fields | {"residual_scale": scale}, number * r + y, o
            yield fields | {"layer_scale": scale}, number * (r + y), o

    def with_another_part() -> Iterator[Option]:
        for path, (scale, number) in product(normed, [(None, 1.0), *factors]):
            for fields, y, r in pairs:
                if path != fields["post_norm"]:
                    added = {"added": path, "layer_scale": scale}
                    yield fields | added, number * (r + y + calls[path].output), o

    return (
        _best((fields, r + y, o) for fields, y, r in pairs)
        or _best(
            (fields | {"output_norm": path}, r + y, calls[path].input)
            for path in normed
            for fields, y, r in pairs
            if _close(calls[path].output, o)
        )
        or _best(scaled())
        or _best(with_another_part())
        or _best(_measure_numbers(*pair, o) for pair in pairs)
        or _best(_measure_gains(*pair, o) for pair in pairs)
    )


def _possible_residuals(
    block: nn.Module, calls: Calls, norms: list[str], parts: list[str]
) -> Iterator[tuple[dict[str, Any], Float[Tensor, "row hidden"]]]:
    """Yield what r may be: the input of a norm or part, or the layer's input + another output."""
    shape, order = calls[""].output.shape, list(calls)
    places = [*sorted(norms, key=order.index, reverse=True), *filter(None, parts)]
    for path in dict.fromkeys(places):
        if path in calls and calls[path].input.shape == shape:
            yield {"residual": path}, calls[path].input
    for path, child in block.named_children():
        is_other = path not in norms and not parts[0].startswith(path)
        has_weights = next(child.parameters(), None) is not None
        if is_other and has_weights and path in calls and calls[path].output.shape == shape:
            yield {"attention": path}, calls[""].input + calls[path].output


def _best(options: Iterable[Option]) -> dict[str, Any] | None:
    """Return the fields that give what they should; of several, the closest, then the first."""
    best: dict[str, Any] | None = None
    smallest = float("inf")
    for fields, found, expected in options:
        error, bound = _error(found, expected), _bound(expected)
        error = max(error, bound / 100)  # below this, it is rounding alone
        if error <= bound and error < smallest:
            best, smallest = fields, error
    return best


def _measure_numbers(fields: dict[str, Any], y: Tensor, r: Tensor, o: Tensor) -> Option:
    """Return the two numbers a and b with which a · r + b · y is nearest to o."""
    columns = torch.stack([r.flatten(), y.flatten()], dim=1).double().cpu()
    solution = torch.linalg.lstsq(columns, o.flatten()[:, None].double().cpu()).solution
    a, b = (float(number) for number in solution.flatten())
    return fields | {"residual_scale": a, "multiplier": b}, a * r + b * y, o


def _measure_gains(fields: dict[str, Any], y: Tensor, r: Tensor, o: Tensor) -> Option:
    """Return the gains a and b and the offset c with which a ⊙ r + b ⊙ y + c is nearest to o."""
    columns = torch.stack([r, y, torch.ones_like(r)], dim=-1).double().cpu()  # row, hidden, 3
    solution = torch.linalg.lstsq(columns.transpose(0, 1), o.T[..., None].double().cpu()).solution
    a, b, c = solution[..., 0].T.to(o)
    measured = {"residual_scale": a, "multiplier": b, "offset": c}
    return fields | measured, a * r + b * y + c, o


def _factors(block: nn.Module, path: str, width: int) -> Iterator[tuple[str, float | Tensor]]:
    """Yield numbers and gains that a layer, or its feed-forward part, multiplies something with."""
    parents = [path[:i] for i in range(len(path) + 1) if i in (0, len(path)) or path[i] == "."]
    for parent in dict.fromkeys(parents):
        module = block.get_submodule(parent)
        prefix = f"{parent}." if parent else ""
        for name, value in vars(module).items():
            if isinstance(value, float) and value not in (0.0, 1.0):
                yield prefix + name, value
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, tensor in tensors:
            if tensor.is_floating_point() and tensor.numel() in (1, width):
                yield prefix + name, tensor.flatten()


def _norm_paths(module: nn.Module) -> list[str]:
    """Return the paths of the norms in a module."""
    return [path for path, child in module.named_modules() if path and _is_norm(child)]


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _close(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors are the same but for rounding."""
    return found.shape == expected.shape and _error(found, expected) <= _bound(expected)


def _is_multiple(found: Tensor, vectors: Tensor) -> bool:
    """Return whether a tensor is a number times another."""
    if found.shape != vectors.shape:
        return False
    size = vectors.double().square().sum()
    factor = (found.double() * vectors.double()).sum() / size
    return _close((factor * vectors.double()).to(found.dtype), found)


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest number expected."""
    largest = expected.abs().max().float().clamp_min(torch.finfo(torch.float32).tiny)
    return float((found.float() - expected.float()).abs().max() / largest)


def _bound(expected: Tensor) -> float:
    return FLOAT_BOUND if expected.dtype in (torch.float32, torch.float64) else HALF_BOUND


# The head


def _find_head(
    model: PreTrainedModel,
    config: Any,
    recorder: Recorder,
    stack: Stack,
    logits: Float[Tensor, "row vocab"],
) -> dict[str, Any]:
    """Return the fields of the head: what leads from the last layer's output to the logits."""
    o, output = stack.last_output, model.get_output_embeddings()
    assert o is not None
    if not isinstance(output, nn.Linear | nn.Embedding) or len(logits) != len(o):
        raise ModelError(f"it predicts more than one token per position ({type(output).__name__})")
    calls, hidden = recorder.outer, o.shape[-1]
    norms = [path for path in _norm_paths(model) if path in calls and _close(calls[path].input, o)]
    for final_norm in [*norms, None]:
        normed = o if final_norm is None else calls[final_norm].output
        after = [
            path
            for path, call in calls.items()
            if _close(call.input, normed)
            and call.output.shape[-1] == output.weight.shape[1]
            and model.get_submodule(path) is not output
            and path not in norms
            and not isinstance(model.get_submodule(path), nn.Dropout)
        ]
        for step in [None, *after]:
            module = find_module(model, step)
            is_linear = isinstance(module, nn.Linear)
            fields = {
                "final_norm": final_norm,
                "project_out": step if is_linear else None,
                "head_transform": None if is_linear else step,
            }
            if step is None and hidden != output.weight.shape[1]:
                continue
            head = Head(
                output,
                Norm(find_module(model, final_norm), hidden),
                module if is_linear else None,
                transform=None if is_linear else module,
            )
            numbers = _head_numbers(head.logits(o).to(logits.dtype), logits, config)
            if numbers is not None:
                return fields | numbers
    raise ModelError("“head(o) = the model's logits” holds for none of its norms")


def _head_numbers(z: Tensor, logits: Tensor, config: Any) -> dict[str, Any] | None:
    """Return the names of the numbers in the config that make logits of z; None if none do."""
    if _close(z, logits):
        return {}
    numbers = {
        name: float(value)
        for name, value in config.to_dict().items()
        if isinstance(value, float | int) and not isinstance(value, bool) and value > 0
    }

    def options() -> Iterator[Option]:
        for name in sorted(numbers, key=lambda name: not ("logit" in name or "head" in name)):
            number = numbers[name]
            yield {"scale": name}, z * number, logits
            yield {"divisor": name}, z / number, logits
            if "cap" in name:
                yield {"cap": name}, number * torch.tanh(z / number), logits

    return _best(options())
