"""The commands that make an index and a report like this one."""

import shlex
from collections.abc import Sequence

from ffmem.experiments.result import Result, Row
from ffmem.indexing.manifest import SourceRecord
from ffmem.indexing.store import Index
from ffmem.models.arguments import IN_MEMORY


def report_command(results: Sequence[Result]) -> str:
    """Return the command that measures all this again."""
    words = ["ffmem", "report", "DIR"]
    samples = [one.settings["sample"] for one in results if one.settings.get("sample")]
    if samples and samples[0].get("corpus"):
        sample = samples[0]
        words += ["--corpus", str(sample["corpus"]), "--out", "OUT"]
        words += ["--sample", str(sample.get("asked", "all"))]
        if sample.get("draw", "sentences") != "sentences":
            words += ["--draw", str(sample["draw"])]
        for name in ("unit", "column", "limit"):  # where they are not the index's own
            words += [f"--{name}", str(sample[name])] if sample.get(name) is not None else []
    else:
        words += ["--corpus", "VALID", "--out", "OUT"]
    words += ["--seed", str(results[0].settings.get("seed", 0))]
    for result in results:
        for name in ("per_layer", "triggers"):  # of token removal
            if name in result.settings:
                words += [f"--{name.replace('_', '-')}", str(result.settings[name])]
    ran = [one.settings["dtype"] for one in results if one.settings.get("dtype")]
    if ran:
        words += ["--dtype", str(ran[-1])]  # the first is Figure 2, which no model ran for
    return shlex.join(words)


def index_commands(settings: Row, index: Index | None) -> list[str]:
    """Return the commands that make the index: one for each source of its corpus."""
    if index is None:
        corpus = settings.get("corpus")
        sources = corpus.get("sources", []) if isinstance(corpus, dict) else [corpus or "CORPUS"]
        model = str(settings.get("model", "MODEL"))
        first = shlex.join(["ffmem", "index", model, str(sources[0] if sources else "CORPUS")])
        return [f"{first} --out DIR", *(f"ffmem extend DIR {shlex.quote(s)}" for s in sources[1:])]
    manifest = index.manifest
    first_source, *others = manifest.corpus.sources
    model = "MODEL" if manifest.model.source == IN_MEMORY else manifest.model.source
    words = ["ffmem", "index", model, first_source.source, "--out", "DIR"]
    words += ["-t", str(manifest.t), "--prefixes", manifest.prefixes, "--dtype", manifest.dtype]
    words += ["--start", manifest.start.asked, *_reading(first_source)]
    if manifest.compat:
        words += ["--compat", manifest.compat]
    return [
        shlex.join(words),
        *(shlex.join(["ffmem", "extend", "DIR", one.source, *_reading(one)]) for one in others),
    ]


def _reading(source: SourceRecord) -> list[str]:
    words = ["--unit", source.unit]
    return [*words, "--limit", str(source.limit)] if source.limit is not None else words
