"""The card of a dataset: what the index is of, how it was made, how to open it, one memory.

The block of YAML at its top tells the Hub's viewer which Parquet files are one table.
"""

import json
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np

from ffmem.cells import Cell
from ffmem.hub import hub_address
from ffmem.indexing.memory import is_flat, visible
from ffmem.indexing.sentences import NO_PREFIX
from ffmem.indexing.store import Index
from ffmem.text import format_number, pluralize

TABLES = {
    "sentences": "sentences.parquet",
    "triggers": "triggers/*.parquet",
    "values": "values/*.parquet",
    "stats": "stats/*.parquet",
    "samples": "samples/layer-*.parquet",
    "vocabulary": "vocabulary.parquet",
    "patterns": "patterns/*/found/*.parquet",
}
"""Tables that the viewer shows, by the files that they consist of; the first is shown first."""

_TEMPLATE = """\
---
{metadata}
---

# Memories of {model}

The feed-forward layers of {model} as key-value memories
([Geva et al., EMNLP 2021](https://arxiv.org/abs/2012.14913)). For each of its {memories}: the
prefixes of a text that trigger it, the tokens that its value promotes, and the statistics of its
coefficient. Made with ffmem {version}.

## Open it

    pip install 'ffmem[hub]'
    ffmem show {address} {cell}
    ffmem pull {repository} DIR{option}

`show` downloads only the parts it needs. Pull the index to search, serve and trace it.

```python
import ffmem

index = ffmem.open("{address}")
index["{cell}"].triggers[0].prefix
```

Every file is Parquet or JSON; nothing here is code. `manifest.json` has the SHA-256 of every other
file, which `ffmem pull` checks.

## One memory

{example}

## How it was built

| | |
|---|---|
{facts}

License of the text: {license}. The index contains its corpus (`sentences.parquet`), so the license
of the corpus applies to the dataset.
"""


def write_card(
    index: Index, repository: str, revision: str | None, license: str, files: Sequence[str]
) -> str:
    """Return the README.md of a dataset with these files."""
    manifest, model = index.manifest, index.manifest.model
    cell = example_cell(index)
    name = _short(model.source)
    return _TEMPLATE.format(
        metadata="\n".join(_metadata(name, license, files)),
        model=_plain(name),
        memories=pluralize(len(index), "memories"),
        version=manifest.versions.get("ffmem", ""),
        address=hub_address(repository, revision),
        repository=repository,
        option=f" --revision {revision}" if revision else "",
        cell=cell,
        example=_indent(str(index[cell])),
        facts="\n".join(f"| {what} | {said} |" for what, said in _facts(index)),
        license="not known" if license == "unknown" else _code(license),
    )


def _metadata(name: str, license: str, files: Sequence[str]) -> list[str]:
    """Return the lines of YAML; a string in JSON is a string in YAML."""
    lines = [
        f"license: {license}",
        f"pretty_name: {json.dumps(f'Memories of {name}', ensure_ascii=False)}",
        "tags:",
        "- ffmem",
        "- interpretability",
        "- key-value-memories",
        "configs:",
    ]
    for table, pattern in TABLES.items():
        if any(fnmatchcase(file, pattern) for file in files):
            lines += [f"- config_name: {table}", f"  data_files: {json.dumps(pattern)}"]
            lines += ["  default: true"] if table == "sentences" else []
    return lines


def _facts(index: Index) -> list[tuple[str, str]]:
    """Return what was indexed and how, as rows of a table."""
    manifest = index.manifest
    model, corpus = manifest.model, manifest.corpus
    revision = f", revision {_code(model.revision)}" if model.revision else ""
    start = "none" if manifest.start.token is None else f"{_code(manifest.start.token)}"
    facts = [
        ("model", f"{_code(_short(model.source))}{revision}, family {_code(model.family)}"),
        ("memories", index.layout.shown),
        ("hash of the weights", f"`{model.hash}`"),
    ]
    for source in corpus.sources:
        size = f"{pluralize(source.sentences, 'sentences')}, {pluralize(source.tokens, 'tokens')}"
        cut = "" if source.limit is None else f", limit {source.limit:,}"
        facts.append(
            ("corpus", f"{_code(_short(source.source))}, unit {_code(source.unit)}{cut}: {size}")
        )
        if source.perplexity is not None:
            per_token = format_number(source.perplexity.per_token)
            facts.append(("perplexity per token", f"{per_token}, on a sample of it"))
    facts += [
        ("triggers", f"{manifest.t} per memory and sign; prefixes: {manifest.prefixes}"),
        ("coefficient", _plain(manifest.coefficient)),
        ("projection of values", manifest.projection),
        ("start token", start),
        ("number format", manifest.dtype),
        ("versions", ", ".join(f"{name} {number}" for name, number in manifest.versions.items())),
    ]
    return facts


def example_cell(index: Index) -> Cell:
    """Return a memory that is worth a look: its value promotes one token most clearly.

    Without static values it is the first memory with a trigger.
    """
    best = (-1.0, index.layout.cell(index.layout.memory_layers[0], 0))
    for layer in index.layout.memory_layers:
        first = index.columns("triggers", layer, ["prefix"])["prefix"][:, 0] != NO_PREFIX
        clear = first.astype(np.float64)
        if index.manifest.model.has_values:
            names = ["top_probabilities", "top_logits", "bottom_logits"]
            values = index.columns("values", layer, names)
            listed = ~is_flat(values["top_logits"], values["bottom_logits"])
            clear *= values["top_probabilities"][:, 0] * listed
        memory = int(clear.argmax())
        if clear[memory] > best[0]:
            best = float(clear[memory]), index.layout.cell(layer, memory)
    return best[1]


def _short(source: str) -> str:
    """Return a source without the folders of this machine."""
    return Path(source).name if Path(source).is_absolute() else source


def _plain(text: str) -> str:
    """Return text that Markdown and HTML show as it is, in a table too."""
    return re.sub(r"[^\w\s.,:;()/=+-]", lambda found: f"&#{ord(found[0])};", visible(text))


def _code(text: str) -> str:
    """Return text as code."""
    return f"<code>{_plain(text)}</code>"


def _indent(text: str) -> str:
    """Return text as a block of code, which nothing in it can end."""
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())
