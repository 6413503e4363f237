"""Makes docs/results/written-facts: `python docs/written_facts.py INDEX WORK`.

Writes twenty facts, each into a fresh copy of the model of an index, and measures whether they hold
on their prompt and on paraphrases, and what else changes: neighbouring prompts, corpus text, and
the same with random keys. A fact that is measured already is not measured again: run it again after
an interruption.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ffmem
from ffmem.errors import FfmemError
from ffmem.files import write_text
from ffmem.progress import Progress

OUT = Path(__file__).parent / "results" / "written-facts"
SENTENCES = 100
"""Sentences of the validation set that side effects are measured on."""

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
            corpus="wikitext-2:valid",
            limit=SENTENCES,
            model=model,
            progress=Progress(),
        )
        found = fact | {"result": result.to_dict() | {"folder": None}}
    except FfmemError as error:
        found = fact | {"error": str(error)}
    write_text(done, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
    shutil.rmtree(work / name, ignore_errors=True)
    return found


def share(rows: list[bool]) -> str:
    """Return how many of all, in words."""
    return f"{sum(rows)} of {len(rows)}"


def page(facts: list[dict[str, Any]], index: ffmem.Index) -> str:
    """Return the README: a summary, and one row per fact."""
    written = [fact for fact in facts if "result" in fact]
    results = [fact["result"] for fact in written]
    controls = [one for result in results for one in result["control"]]

    def mean(rows: list[Any], name: str) -> float:
        return float(np.mean([row[name] for row in rows])) if rows else float("nan")

    paraphrases = [one["holds"] for result in results for one in result["paraphrases"]]
    neighbours = [one["changed"] for result in results for one in result["neighbours"]]
    leaks = [one["holds"] for result in results for one in result["neighbours"]]
    changes = [result["change"] for result in results]
    perplexity = [
        result["side_effects"]["perplexity_after"] / result["side_effects"]["perplexity_before"]
        for result in results
    ]
    lines = [
        "# Twenty written facts",
        "",
        f"`ffmem write` puts {len(facts)} false facts into {index.manifest.model.source}, one at a"
        f" time, each into one idle memory ([how](../../editing.md#write-a-fact)). The index has"
        f" {index.manifest.corpus.sentences:,} sentences; side effects are measured on"
        f" {SENTENCES} sentences of WikiText-2's validation set. Made by"
        " `python docs/written_facts.py INDEX WORK`; all numbers: [results.json](results.json).",
        "",
        "| | written | random keys |",
        "|---|---|---|",
        f"| facts that hold on their prompt | {share([r['written']['holds'] for r in results])} |"
        f" {share([one['holds'] for one in controls])} |",
        f"| hold on paraphrases | {share(paraphrases)} | |",
        f"| predictions changed on prompts about other subjects | {share(neighbours)} |"
        f" {mean(controls, 'neighbours_changed'):.1%} |",
        f"| … to the written token | {share(leaks)} | |",
        f"| KL on corpus text, nats per token | {mean(changes, 'kl'):.2g} |"
        f" {mean(controls, 'kl'):.2g} |",
        f"| predictions changed on corpus text | {mean(changes, 'top1_changed'):.2%} |"
        f" {mean(controls, 'top1_changed'):.2%} |",
        f"| perplexity, after / before | {np.mean(perplexity) if perplexity else 1:.4f} | |",
        "",
        "| prompt | token | memory | strength | p before | p after | paraphrases | others moved |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for fact in facts:
        if "error" in fact:
            lines.append(f"| {fact['prompt']} | {fact['token']} | {fact['error']} | | | | | |")
            continue
        one = fact["result"]
        lines.append(
            f"| {fact['prompt']} | {fact['token']} | {one['cell']} | {one['strength']:.1%} |"
            f" {one['written']['probability_before']:.2g} |"
            f" {one['written']['probability_after']:.2g} |"
            f" {share([p['holds'] for p in one['paraphrases']])} |"
            f" {share([n['changed'] for n in one['neighbours']])} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all facts, and write the page."""
    index, work = ffmem.open(sys.argv[1]), Path(sys.argv[2])
    work.mkdir(parents=True, exist_ok=True)
    model = ffmem.load(index.manifest.model.source, dtype="auto")
    facts = [measure(index, model, work, *fact) for fact in FACTS]
    OUT.mkdir(parents=True, exist_ok=True)
    write_text(OUT / "results.json", json.dumps(facts, ensure_ascii=False, indent=1) + "\n")
    write_text(OUT / "README.md", page(facts, index))


if __name__ == "__main__":
    main()
