"""What the golden records hold, computed through the public contract alone.

A record is one line of a file: a name, and a small piece of JSON. Prose, hashes, versions and
paths are left out, so that a rewrite may change them; numbers, ids, tokens, cells and cases stay.
"""

import io
import json
import runpy
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from unittest.mock import patch

import pyarrow.parquet as pq

import ffmem
from tests.golden import setup
from tests.texts import LINES
from tests.tiny import TINY

GOLDEN = Path(__file__).parent

PROMPT = "The press of the river ="
"""No line has its last token: where a layer sees nothing else, its percentiles have no ties."""

FULL = ("llama", "gpt2")
"""Models whose records hold every field, and how they read under other options."""

VARIANTS = {
    "all prefixes": ({"prefixes": "all"}, "line"),
    "as ff-layers": ({"compat": "ff-layers", "start": "eos"}, "line"),
    "without a start token": ({"start": "none"}, "line"),
    "sentences": ({}, "sentence"),
    "windows": ({}, "window:16"),
}
"""Other ways to index: options, and the unit of the corpus."""


EXPERIMENTS = (
    "token-removal",
    "agreement",
    "next-token-rank",
    "max-probability",
    "predictive-values",
    "active-memories",
    "zero-agreement",
    "stop-words",
    "residual-prediction",
    "residual-probability",
    "prediction-cases",
    "last-layer-composition",
    "neural-memory",
)
"""Those of the paper that need no detected patterns."""

WITHOUT_VALUES = (
    "token-removal",
    "active-memories",
    "residual-prediction",
    "residual-probability",
    "prediction-cases",
    "last-layer-composition",
)
"""Those of memories that have no static values."""

SAMPLED = ("quantiles", "mean_quantiles", "percentile", "random_control")
"""What depends on which prefixes the index samples, where it has more than 512."""


# The two names that no contract fixes


def as_json(result):
    """Return what `--json` prints of a result."""
    return json.loads(json.dumps(result.to_dict()))


def detect(index):
    """Do what `ffmem patterns detect` does."""
    ffmem.detect(index)


def command(*arguments):
    """Return what `ffmem … --json` prints, run in this process."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    arguments = ["ffmem", *map(str, arguments), "--json"]
    # What the command printed tells whether it succeeded: it ends in SystemExit either way.
    with patch.object(sys, "argv", arguments), redirect_stdout(printed), suppress(SystemExit):
        runpy.run_module("ffmem", run_name="__main__")
    printed.seek(0)
    return json.load(printed)


# What is left of a result


def kept(item, *names):
    """Return some fields of a dictionary, those that it has."""
    return {name: item[name] for name in names if name in item}


def shown(memory, full):
    """Return what is recorded of `show --json`."""
    text = ("rank", "prefix", "rest", "last_token", "next_token") if full else ()
    fields = ("coefficient", "sentence", "length", "gate", *text)
    record = kept(memory, "cell", "layer", "memory", "stats")
    for sign in ("triggers", "negative_triggers"):
        record[sign] = [kept(trigger, *fields) for trigger in memory[sign][:6]]
    value = memory["value"]
    record["value"] = value and {
        "projection": value["projection"],
        "top": tokens(value["top"][:5], full),
        "bottom": tokens(value["bottom"][:5], full),
    }
    return record


def tokens(items, full):
    """Return tokens with their numbers; the id says which where the text is not needed."""
    text = ("token",) if full else ()
    return [kept(item, "id", "probability", "logit", *text) for item in items]


def traced(trace, full):
    """Return what is recorded of `trace --json`."""
    record = kept(trace, "tokens", "position", "saturation", "generated", "edited_generated")
    record["layers"] = [
        kept(layer, "layer", "case", "active")
        | {name: tokens(layer[name][:3], full) for name in ("residual_top", "ff_top", "output_top")}
        | {
            "contributing": [
                kept(one, "cell", "coefficient", "contribution", "share", "percentile")
                | {"value_top": one["value_top"][:3]}
                for one in layer["memories"][:3]
            ]
        }
        for layer in trace["layers"]
    ]
    for name in ("output_top", "edited_output_top"):
        if trace.get(name) is not None:
            record[name] = tokens(trace[name][:5], full)
    return record


def ablated(effect, full):
    """Return what is recorded of `effect --json`."""
    record = kept(effect, "position", "candidates", "correlation", "sum")
    record["target"] = kept(effect["target"], "id", "token", "log_probability", "rank")
    record["top"] = tokens(effect["top"][:5], full)
    record["ablated"] = [
        kept(one, "cell", "change", "gradient", "direct", "integrated", "coefficient")
        | {"value_top": one["value_top"][:3]}
        for one in effect["memories"][:5]
    ]
    return record


# An index folder


def layers(folder):
    """Return the memories of every layer by number, as the Parquet layout lists them."""
    files = sorted((Path(folder) / "triggers").glob("layer-*.parquet"))
    return [pq.read_table(file, columns=["memory"])["memory"].to_pylist() for file in files]


def prefixes(folder):
    """Return how many prefixes an index is of: one for each token."""
    ids = pq.read_table(Path(folder) / "sentences.parquet", columns=["ids"])["ids"]
    return sum(len(sentence) for sentence in ids.to_pylist())


def start(folder):
    """Return the start token that was chosen, the losses, and the perplexity that it gives."""
    manifest = json.loads((Path(folder) / "manifest.json").read_text(encoding="utf-8"))
    perplexity = [source["perplexity"]["per_token"] for source in manifest["corpus"]["sources"]]
    return kept(manifest["start"], "token", "id", "losses") | {"perplexity": perplexity}


def layer_statistics(memories, n_prefixes):
    """Return sums and extremes over all memories of a layer, of every number that is shown."""
    stats = [memory["stats"] for memory in memories]
    n = len(stats)
    values = [memory["value"] for memory in memories if memory["value"]]
    return {
        "memories": n,
        # A float: one of a hundred thousand coefficients may be noise around zero.
        "active": float(round(sum(one["active_share"] for one in stats) * n_prefixes)),
        "mean": sum(one["mean"] for one in stats) / n,
        "mean_size": sum(abs(one["mean"]) for one in stats) / n,
        "max": max(one["max"] for one in stats),
        "min": min(one["min"] for one in stats),
        "mean_max": sum(one["max"] for one in stats) / n,
        "mean_min": sum(one["min"] for one in stats) / n,
        "mean_quantiles": {
            q: sum(one["quantiles"][q] for one in stats) / n for q in stats[0]["quantiles"]
        },
        **{
            name: {
                "n": float(sum(len(memory[name]) for memory in memories)),
                "coefficient_sum": sum(
                    trigger["coefficient"] for memory in memories for trigger in memory[name]
                ),
            }
            for name in ("triggers", "negative_triggers")
        },
        **{
            f"{side}_logit_sum": sum(value[side][0]["logit"] for value in values)
            for side in ("top", "bottom")
        },
    }


def triggered(memories, n=2):
    """Return n memories that have triggers, evenly spread over the layer."""
    found = [one for one in memories if one["stats"]["max"] > 1e-3]
    return [found[(2 * place + 1) * len(found) // (2 * n)] for place in range(n)] if found else []


def read(index, full=False, only=None):
    """Return what is recorded of an index: every layer as a whole, and some memories."""
    record = {"start": start(index.folder)}
    n_prefixes = prefixes(index.folder)
    for layer, numbers in enumerate(layers(index.folder)):
        if not numbers or (only is not None and layer not in only):
            continue
        memories = [as_json(index[layer, number]) for number in numbers]
        record[f"layer {layer}"] = layer_statistics(memories, n_prefixes)
        for memory in triggered(memories):
            record[memory["cell"]] = shown(memory, full)
    return record


# Records of tiny models


def index(memories, corpus, out, **options):
    """Index a model as every record is made."""
    return ffmem.index(memories, corpus, out, **({"t": 6, "threads": 1} | options))


def family(name, folder):
    """Return the record of a tiny model: its index, a trace, an edited one, an effect."""
    full = name in FULL
    memories = setup.load(name)
    made = index(memories, setup.corpus(folder), folder / "index")
    record = {"index": read(made, full)}
    edit = {"set": {"L0N3": 2.0}}
    record["trace"] = traced(as_json(ffmem.trace(made, PROMPT, model=memories, top=3)), full)
    edited = as_json(ffmem.trace(made, PROMPT, model=memories, top=3, **edit))
    record["edited trace"] = {"edited_output_top": tokens(edited["edited_output_top"], full)}
    effect = ffmem.effect(made, PROMPT, model=memories, top=5)
    record["effect"] = ablated(as_json(effect), full)
    return record | (variants(memories, folder) if full else {})


def variants(memories, folder):
    """Return how a model reads under other options, in parts, and at other positions."""
    record = {}
    for name, (options, unit) in VARIANTS.items():
        corpus = setup.corpus(folder, unit=unit)
        record[name] = read(index(memories, corpus, folder / name, **options))
    record["trace at 2"] = traced(
        as_json(
            ffmem.trace(
                memories, PROMPT, top=3, position=2, generate=5, off=["L0N5"], scale={"L1N2": -1.5}
            )
        ),
        full=True,
    )
    record["effect at 2"] = ablated(
        as_json(
            ffmem.effect(
                memories, PROMPT, top=5, positions=[2], target=" city", integrated=True, steps=5
            )
        ),
        full=True,
    )
    return record | parts(memories, folder)


def parts(memories, folder, options=None):
    """Return the record of an index in two parts, extended and merged."""
    options = {"start": "eos"} | (options or {})
    first, second = setup.corpus(folder, LINES[:15]), setup.corpus(folder, LINES[15:])
    made = [
        index(memories, corpus, folder / name, **options).folder
        for name, corpus in (("first", first), ("second", second), ("extended", first))
    ]
    merged = ffmem.merge(made[:2], folder / "merged")
    extended = ffmem.extend(made[2], second, model=memories)
    return {
        "merged": read(merged),
        "extended equals merged": same_tables(extended.folder, merged.folder),
    }


def same_tables(one, other):
    """Return whether two index folders hold the same tables."""
    kinds = ("triggers", "values", "stats")
    names = [
        {path.relative_to(folder) for kind in kinds for path in (folder / kind).glob("*.parquet")}
        for folder in map(Path, (one, other))
    ]
    return names[0] == names[1] and all(
        pq.read_table(Path(one) / name).equals(pq.read_table(Path(other) / name))
        for name in names[0]
    )


# Experiments


def measured(index, memories, corpus, folder, names=EXPERIMENTS, **options):
    """Return what is recorded of some experiments, as their files hold it."""
    ffmem.experiment(names, index, folder, model=memories, corpus=corpus, **options)
    return {
        name: rows_and_numbers(json.loads((folder / f"{name}.json").read_text(encoding="utf-8")))
        for name in names
    }


def rows_and_numbers(result):
    """Return the rows of an experiment and the numbers beside them, without its prose."""
    texts = ("unigram_token", "replacement", "keys")
    elsewhere = ("rows", "settings", "quoted", "sources", "agreement")
    record = {
        key: value
        for key, value in result.items()
        if key in texts or not (isinstance(value, str) or key in elsewhere)
    }
    if "sample" in result["settings"]:
        record["sample"] = kept(result["settings"]["sample"], "prefixes", "sentences", "cut")
    rows = result["rows"]
    if result["experiment"] == "predictive-values":
        record["predictive"] = rows[:10]
    elif result["experiment"] == "last-layer-composition":
        texts = ("prefix", "next_token", "residual_top", "ff_top", "output_top")
        record["rows"] = [
            {f"{name} token" if name.endswith("_top") else name: row[name] for name in texts}
            | kept(row, "sentence", "length", "similarity", "related")
            for row in rows[:10]
        ]
        record["similarity_sum"] = float(sum(row["similarity"] or 0.0 for row in rows))
    else:
        record["rows"] = rows
    return record


def experiments(name, folder):
    """Return the record of every experiment on a tiny model, over every prefix of five lines."""
    memories = setup.load(name)
    made = index(memories, setup.corpus(folder), folder / "index")
    corpus = setup.corpus(folder, LINES[:5])
    names = WITHOUT_VALUES if name.endswith("lambda") else EXPERIMENTS
    sizes = {"sample": "all", "per_layer": 4, "triggers": 6}
    record = measured(made, memories, corpus, folder / "all", names, **sizes)
    if name in FULL:
        for draw in ("sentences", "tokens"):
            out = folder / draw
            options = {"sample": 10, "draw": draw, "seed": 1}
            chosen = ("prediction-cases", "residual-probability")
            corpus = setup.corpus(folder)
            record[f"drawn {draw}"] = measured(made, memories, corpus, out, chosen, **options)
    return record


MEASURED = (
    "llama",
    "gpt2",
    "gemma2",
    "olmo2",
    "gptj",
    "opt post-norm",
    "bloom",
    *(name for name in TINY if name.startswith("ffmem_adaptive")),
)
"""Gated, ungated, output-normed, parallel and post-norm blocks, and every kind of ours."""


def mini_wiki(name, folder):
    """Return the record of the model that comes with ffmem, over corpora that do."""
    memories = ffmem.load(name)
    train = ffmem.Corpus(f"{name}:train", limit=120)
    valid = ffmem.Corpus(f"{name}:valid", limit=12)
    made = index(memories, train, folder / "index", t=50)
    record = {"index": read(made, full=True, only=(0, 5, 10, 15))}
    cells = [cell for cell in record["index"] if cell.startswith("L")]
    record["show"] = {cell: shown(command("show", made.folder, cell), True) for cell in cells[:2]}
    prompt = "The river is the longest in the"
    run = {"model": memories, "top": 3}
    record["trace"] = traced(as_json(ffmem.trace(made, prompt, **run, generate=5)), True)
    off = [one["cell"] for one in record["trace"]["layers"][10]["contributing"]]
    edited = as_json(ffmem.trace(made, prompt, **run, generate=5, off=off))
    record["edited trace"] = {
        "edited_output_top": tokens(edited["edited_output_top"], True),
        **kept(edited, "edited_generated"),
    }
    effect = ffmem.effect(made, prompt, model=memories, top=5, candidates=100)
    record["effect"] = ablated(as_json(effect), True)
    sizes = {"sample": "all", "per_layer": 3, "triggers": 5}
    detect(made)
    names = ("patterns", *EXPERIMENTS)
    record |= measured(made, memories, valid, folder / "out", names, **sizes)
    extended = ffmem.extend(made.folder, valid, model=memories)
    record["extended"] = read(extended, only=(15,))
    sampled = {}
    return sample_aside(record, "", sampled) | {"sampled": sampled}


def sample_aside(record, path, sampled):
    """Move what depends on the index's sample of prefixes from a record to one of its own."""
    if isinstance(record, list):
        names = [one.get("cell", n) if isinstance(one, dict) else n for n, one in enumerate(record)]
        pairs = zip(names, record, strict=True)
        return [sample_aside(one, f"{path}/{name}", sampled) for name, one in pairs]
    if not isinstance(record, dict):
        return record
    for name in SAMPLED:
        if name in record:
            sampled[f"{path}/{name}"] = record[name]
    return {
        name: sample_aside(one, f"{path}/{name}", sampled)
        for name, one in record.items()
        if name not in SAMPLED
    }


# Files


GROUPS = {
    "families": (tuple(TINY), family),
    "experiments": (MEASURED, experiments),
    "mini-wiki": (("mini-wiki",), mini_wiki),
}
"""The records of each folder: the models, and the function that computes one."""


def path(group, name):
    """Return the file of a record."""
    return GOLDEN / group / f"{name.replace(' ', '_')}.json"


def compute(group, name, folder):
    """Return a record as its file holds it."""
    record = GROUPS[group][1](name, folder)
    return json.loads(json.dumps(rounded(record), ensure_ascii=False, allow_nan=False))


def rounded(value):
    """Return a record with its numbers to seven digits."""
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def compact(value):
    """Return JSON on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def lines(record, depth=0):
    """Return a record as JSON, one line for each entry of the first two levels."""
    inner = " " * (depth + 1)
    entries = []
    for key, value in record.items():
        nested = (
            depth == 0
            and isinstance(value, dict)
            and all(isinstance(one, dict) for one in value.values())
        )
        text = lines(value, 1) if nested else compact(value)
        entries.append(f"{inner}{compact(key)}: {text}")
    return "{\n" + ",\n".join(entries) + "\n" + " " * depth + "}"


def write(group, name, record):
    """Write the file of a record."""
    file = path(group, name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(lines(record) + "\n", encoding="utf-8")


def recorded(group, name):
    """Return what the file of a record holds."""
    return json.loads(path(group, name).read_text(encoding="utf-8"))
