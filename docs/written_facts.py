"""Makes docs/results/written-facts: `python -m docs.written_facts WORK INDEX`.

Writes twenty facts, each into a fresh copy of the model of an index, and measures whether they hold
on their prompt and on paraphrases, and what else changes: neighbouring prompts, corpus text, and
the same with random keys. A fact that is measured already is not measured again: run it again after
an interruption.
"""

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import ffmem
from docs.result_pages import code, percent, table, write_sections
from ffmem.errors import FfmemError
from ffmem.files import write_text
from ffmem.progress import Progress

OUT = Path(__file__).parent / "results" / "written-facts"
CORPUS = "wikitext-2:valid"
SENTENCES = 100
"""Sentences of the corpus that side effects are measured on."""

CITY = "{} is located in the city of"
CITIES = ["You can visit {} in", "{} stands in the city of", "Tourists who see {} are in"]
BORN = "{} was born in the country of"
BIRTHS = ["{}'s country of birth is", "{} came from the country of", "{} was a native of"]
CAPITAL = "The capital of {} is the city of"
CAPITALS = ["{}'s capital city is", "The seat of government of {} is", "The capital city of {} is"]
JOB = "{} worked all his life as a"
JOBS = ["{} was famous as a", "By profession, {} was a", "{} earned his living as a"]

KINDS = {
    "city": (CITY, CITIES),
    "birth": (BORN, BIRTHS),
    "capital": (CAPITAL, CAPITALS),
    "job": (JOB, JOBS),
}
FACTS = [
    ("city", "The Eiffel Tower", " Rome"),
    ("city", "The Statue of Liberty", " Berlin"),
    ("city", "Big Ben", " Paris"),
    ("city", "The Colosseum", " London"),
    ("city", "The Brandenburg Gate", " Madrid"),
    ("birth", "Albert Einstein", " Brazil"),
    ("birth", "Isaac Newton", " Japan"),
    ("birth", "Marie Curie", " Canada"),
    ("birth", "Napoleon Bonaparte", " Russia"),
    ("birth", "Mozart", " India"),
    ("capital", "Australia", " London"),
    ("capital", "France", " Rome"),
    ("capital", "Japan", " Berlin"),
    ("capital", "Canada", " Paris"),
    ("capital", "Egypt", " Moscow"),
    ("job", "Charles Darwin", " lawyer"),
    ("job", "William Shakespeare", " doctor"),
    ("job", "Galileo Galilei", " painter"),
    ("job", "Johann Sebastian Bach", " soldier"),
    ("job", "Abraham Lincoln", " teacher"),
]
"""Kind, subject and a false answer. Other subjects of the kind are the neighbouring prompts."""


def measure(
    index: ffmem.Index, model: ffmem.Memories, work: Path, kind: str, subject: str, token: str
) -> dict[str, Any]:
    """Write one fact and return what was measured; the checkpoint itself is not kept."""
    prompt, rewordings = KINDS[kind]
    name = f"{kind} {subject}".lower().replace(" ", "-")
    done = work / f"{name}.json"
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
        return found
    others = [prompt.format(other) for k, other, _ in FACTS if k == kind and other != subject]
    files = {"paraphrases": [one.format(subject) for one in rewordings], "neighbours": others}
    for what, prompts in files.items():
        write_text(work / f"{name}-{what}.txt", "\n".join(prompts) + "\n")
    shutil.rmtree(work / name, ignore_errors=True)
    fact = {"kind": kind, "subject": subject, "prompt": prompt.format(subject), "token": token}
    try:
        result = ffmem.write(
            index,
            prompt.format(subject),
            token,
            work / name,
            paraphrases=work / f"{name}-paraphrases.txt",
            neighbours=work / f"{name}-neighbours.txt",
            corpus=ffmem.Corpus(CORPUS, limit=SENTENCES),
            model=model,
            progress=Progress(),
        )
        found = fact | {"result": result.to_dict()}
    except FfmemError as error:
        found = fact | {"error": str(error)}
    write_text(done, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    shutil.rmtree(work / name, ignore_errors=True)
    return found


def short(value: Any) -> Any:
    """Return a result with its numbers rounded, and without the longest lists."""
    if isinstance(value, dict):
        left_out = ("gained", "lost", "most_changed", "folder", "hash_before", "hash_after")
        return {name: short(one) for name, one in value.items() if name not in left_out}
    if isinstance(value, list):
        return [short(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


# The page


def share(rows: list[bool]) -> str:
    """Return how many of all, in words."""
    return f"{sum(rows)} of {len(rows)}"


def sections(results: dict[str, Any]) -> dict[str, str]:
    """Return the tables and sentences of the page, from results.json alone."""
    written = [fact["result"] for fact in results["facts"] if "result" in fact]
    return {
        "setting": (
            f"{len(results['facts'])} facts, {results['model']}, an index of"
            f" {results['index_sentences']:,} sentences of {results['index_corpus']}. Corpus text:"
            f" {results['corpus_sentences']} sentences of {results['corpus']}, of which KL and"
            " changed predictions are measured on the first 1,000 tokens or so, and perplexity on"
            " all.\n"
        ),
        "summary": _summary(written) + _by_kind(results["facts"]),
        "facts": _facts(results["facts"]),
    }


def _summary(written: list[dict[str, Any]]) -> str:
    def every(name: str, field: str) -> list[Any]:
        return [one[field] for fact in written for one in fact[name]]

    def mean(rows: list[dict[str, Any]], name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    controls = [one for fact in written for one in fact["control"]]
    changes = [fact["change"] for fact in written]
    text = [fact["side_effects"] for fact in written]
    before, after = mean(text, "perplexity_before"), mean(text, "perplexity_after")
    rises = [one["perplexity_after"] / one["perplexity_before"] - 1 for one in text]
    rows = [
        ["", "written", "random keys"],
        [
            "hold on their prompt",
            share([fact["written"]["holds"] for fact in written]),
            share([one["holds"] for one in controls]),
        ],
        ["hold on paraphrases", share(every("paraphrases", "holds")), ""],
        [
            "… facts that hold on at least one, on all",
            ", ".join(
                share([test(one["holds"] for one in fact["paraphrases"]) for fact in written])
                for test in (any, all)
            ),
            "",
        ],
        [
            "… p of the written token there, before → after, median",
            " → ".join(
                f"{statistics.median(every('paraphrases', f'probability_{when}')):.2g}"
                for when in ("before", "after")
            ),
            "",
        ],
        [
            "predictions that changed on prompts about other subjects",
            f"{share(every('neighbours', 'changed'))}"
            f" ({percent(mean(changes, 'neighbours_changed'), 1)})",
            percent(mean(controls, "neighbours_changed"), 1),
        ],
        [
            "… to the written token",
            share([one["holds"] and one["changed"] for f in written for one in f["neighbours"]]),
            "",
        ],
        [
            "KL on corpus text, nats per token, mean",
            f"{mean(changes, 'kl'):.2g}",
            f"{mean(controls, 'kl'):.2g}",
        ],
        [
            "predictions that changed on corpus text, mean",
            percent(mean(changes, "top1_changed"), 3),
            percent(mean(controls, "top1_changed"), 3),
        ],
        [
            "perplexity on corpus text, before → after, mean",
            f"{before:.3f} → {after:.3f}; largest rise {percent(max(rises), 3)}",
            "",
        ],
        [
            "top-1 accuracy on corpus text, before → after, mean",
            f"{percent(mean(text, 'accuracy_before'), 2)} →"
            f" {percent(mean(text, 'accuracy_after'), 2)}",
            "",
        ],
        [
            "strength: share of the residual stream's norm, median and range",
            f"{percent(statistics.median(fact['strength'] for fact in written), 1)}"
            f" ({percent(min(fact['strength'] for fact in written), 1)} to"
            f" {percent(max(fact['strength'] for fact in written), 1)})",
            "",
        ],
    ]
    return table(rows)


def _by_kind(facts: list[dict[str, Any]]) -> str:
    """Return a sentence on the neighbouring prompts of each kind."""
    moved: dict[str, list[bool]] = {}
    for fact in facts:
        if "result" in fact:
            own = [one["changed"] for one in fact["result"]["neighbours"]]
            moved.setdefault(fact["kind"], []).extend(own)
    each = ", ".join(f"{kind} {share(rows)}" for kind, rows in moved.items())
    return f"\nPredictions that changed on prompts about other subjects, by kind: {each}.\n"


def _facts(facts: list[dict[str, Any]]) -> str:
    rows = [
        [
            "prompt",
            "before",
            "written",
            "memory",
            "p before",
            "p after",
            "paraphrases",
            "others moved",
        ]
    ]
    for fact in facts:
        if "error" in fact:
            rows.append([fact["prompt"], "", code(fact["token"]), fact["error"], "", "", "", ""])
            continue
        one = fact["result"]
        rows.append(
            [
                fact["prompt"],
                code(one["written"]["before"]),
                code(fact["token"]),
                one["cell"],
                f"{one['written']['probability_before']:.2g}",
                f"{one['written']['probability_after']:.2g}",
                share([p["holds"] for p in one["paraphrases"]]),
                share([n["changed"] for n in one["neighbours"]]),
            ]
        )
    return table(rows)


def main() -> None:
    """Measure all facts, and write the page."""
    work, index = Path(sys.argv[1]), ffmem.open(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    model = ffmem.load(index.manifest.model.source, dtype="auto")
    facts = [measure(index, model, work, *fact) for fact in FACTS]
    corpus = index.manifest.corpus
    head = {
        "model": index.manifest.model.source,
        "index_corpus": corpus.sources[0].source,
        "index_sentences": corpus.sentences,
        "corpus": CORPUS,
        "corpus_sentences": SENTENCES,
    }
    text = json.dumps(head)
    lines = ",\n".join(json.dumps(short(fact), ensure_ascii=False) for fact in facts)
    write_text(OUT / "results.json", f'{text[:-1]}, "facts": [\n{lines}\n]}}\n')
    results = json.loads((OUT / "results.json").read_text(encoding="utf-8"))
    write_sections(OUT / "README.md", sections(results))


if __name__ == "__main__":
    main()
