"""Pages of docs/results say what the committed JSON beside them says."""

import json
import re

import pytest

from docs.claims import BEGIN, COMPARISON, END, PARTS, RESULTS, report_folders
from ffmem.experiments.base import find_all
from ffmem.experiments.comparison import ReportComparison, read_report
from ffmem.experiments.render import comparison_markdown, escape_markdown
from ffmem.experiments.report import section_of

each_report = pytest.mark.parametrize("folder", report_folders(), ids=lambda path: path.name)


def page_of(folder):
    return (folder / "report.md").read_text(encoding="utf-8")


def test_the_comparison_is_made_from_the_reports_as_they_are():
    comparison = ReportComparison([read_report(folder) for folder in report_folders()])
    page = (COMPARISON / "comparison.md").read_text(encoding="utf-8")
    drawn = [path.stem for path in COMPARISON.glob("*.svg")]
    assert page == comparison_markdown(comparison, COMPARISON, drawn)
    assert json.loads((COMPARISON / "comparison.json").read_text()) == comparison.to_dict()
    drawn = {path.name for path in COMPARISON.glob("*.svg")}
    assert drawn == {f"{experiment.name}.svg" for experiment in find_all()}
    assert set(re.findall(r"\]\((.*?\.svg)\)", page)) == drawn


@pytest.mark.parametrize("name", PARTS)
def test_the_marked_part_of_a_page_is_made_from_the_reports(name):
    text = (RESULTS / name).read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == PARTS[name]()


@each_report
def test_the_claims_of_a_report_are_those_of_its_json(folder):
    page = page_of(folder)
    for claims in read_report(folder).claims.values():
        for one in claims:
            cells = map(escape_markdown, (one.paper, one.model, one.n))
            assert f"| {' | '.join(cells)} | **{one.verdict}** |" in page


@each_report
def test_every_sentence_and_number_of_a_reports_sections_comes_from_its_json(folder):
    page = page_of(folder)
    for name, result in read_report(folder).results.items():
        part = page.split(f'<a id="{name}"></a>')[1].split("</details>")[0]
        section = section_of(result)
        assert f"**This model.** {escape_markdown(section.shows)}\n" in part
        rows = [line for line in part.splitlines() if line.startswith("| ")][2:]
        assert rows == [
            f"| {' | '.join(escape_markdown(one.text) for one in entries)} |"
            for entries in section.entries
        ]


# Prose: each phrase below is computed from the JSON, and must stand in the page as it is


def share(number, digits=0):
    return f"{100 * number:.{digits}f} %"


def mean(numbers):
    numbers = list(numbers)
    return sum(numbers) / len(numbers)


class Results:
    """What the prose about a model asks of its results."""

    def __init__(self, name):
        self.by_name = read_report(RESULTS / name).results

    def rows(self, name, **values):
        return self.by_name[name].rows_with(**values)

    def column(self, name, field, layers=None, **values):
        """Return a column, of layers from a to b counted from 1."""
        first, last = layers or (1, 1000)
        rows = self.rows(name, **values)
        return [row[field] for row in rows if first <= row["layer"] + 1 <= last]

    def also(self, name):
        return self.by_name[name].also

    def cases(self):
        """Return kept, own and composed predictions, layer by layer."""
        kept = [row["residual"] + row["agreement"] for row in self.rows("prediction-cases")]
        return kept, *(self.column("prediction-cases", name) for name in ("ffn", "composition"))

    def removed(self, token, layers=None, how="removed"):
        """Return how much a coefficient falls, mean over layers of the median."""
        return -mean(self.column("token-removal", "median", layers, token=token, how=how))

    def covered(self):
        rows = self.rows("patterns")
        return sum(row["covered"] * row["n"] for row in rows) / sum(row["n"] for row in rows)


def smollm2():
    """Yield what docs/results/README.md says about SmolLM2-135M in numbers."""
    found = Results("smollm2-135m-wikitext-2")
    yield f"coefficient falls by {share(found.removed('last'))}"
    first, random = (share(found.removed(token)) for token in ("first", "random"))
    yield f"without the first or a random token it falls by {first} and {random}"
    yield f"gives the same result ({share(found.removed('last', how='replaced'))})"
    lower, upper = (share(found.removed("last", layers), 1) for layers in ((1, 17), (18, 30)))
    yield f"{lower} in layers 1–17, {upper} in layers 18–30"
    rates = found.column("agreement", "rate")
    low, high = (
        share(mean(found.column("agreement", "rate", layers)), 1) for layers in ((1, 19), (20, 30))
    )
    yield f"{low} of memories in layers 1–19, {high} in layers 20–30"
    yield f"at most {share(max(rates), 1)} (layer {rates.index(max(rates)) + 1})"
    yield f"would be right {share(found.rows('agreement')[0]['unigram'], 1)} of the time"
    (last_token,) = found.column("agreement", "last_token_rate", (27, 27))
    yield f"the rate of layer 27 is {share(last_token, 1)}"
    shuffled = mean(found.column("agreement", "permutation", (20, 30)))
    yield f"Shuffled next tokens would give {share(shuffled, 2)} in layers 20–30"
    yield f"(AUC {found.also('max-probability')['auc']:.2f})"
    predictive = found.also("predictive-values")
    yield f"{predictive['with_agreeing_trigger']} of them have an agreeing trigger"
    control = predictive["random_control"]["with_agreeing_trigger"]
    yield f"compared with {control} of 100 random values"
    kept, own, composed = found.cases()
    yield f"in {share(mean(kept))} of examples on average"
    yield f"in more than half in {sum(one > 0.5 for one in kept)} of 30 layers"
    yield f"({share(sum(composed) / (sum(own) + sum(composed)))} compositions"
    yield f"keeps {share(kept[0], 1)} and puts its own token first in {share(own[0])}"
    zero = found.column("zero-agreement", "share", target="y", memories="all")
    chance = found.column("zero-agreement", "chance", target="y", memories="all")
    yield f"in {100 * (1 - max(zero)):.0f}–{share(1 - min(zero))} of examples"
    yield f"zero agreement is {100 * min(zero):.0f}–{share(max(zero))}"
    yield f"would give {100 * min(chance):.0f}–{share(max(chance))}"
    active = found.column("zero-agreement", "share", target="y", memories="active")
    yield f"zero agreement is {100 * min(active):.0f}–{share(max(active))}"
    early = found.column("residual-prediction", "residual_share", (1, 8))
    yield f"At most {share(max(early), 1)} in layers 1–8"
    gate = found.column("active-memories", "median", definition="gate")
    yield f"fewest in layer {gate.index(min(gate)) + 1} of 30 ({share(min(gate))})"
    effect = found.column("active-memories", "median", definition="effect")
    yield f"takes {100 * min(effect):.0f}–{share(max(effect))} of the memories"
    ranks = found.column("next-token-rank", "median")
    best = ranks.index(min(ranks))
    yield f"median {ranks[0]:,.0f} of 49,152 in layer 1"
    yield f"lowest ({ranks[best]:,.0f}) in layer {best + 1}, {ranks[-1]:,.0f} in layer 30"
    agreeing, every = found.rows("stop-words")
    for field in ("stop_word_share", "short_prefix_share"):
        yield f"in {share(agreeing[field])}"
        yield f"(all cases: {share(every[field])}"
    each = found.column("patterns", "covered")
    yield f"{share(found.covered())} of the first 25 triggers"
    yield f"by layer {share(min(each))} to {share(max(each))}"
    rows = found.rows("patterns")
    memories = sum(row["keys"] for row in rows)
    with_pattern, patterns = (
        sum(row[name] * row["keys"] for row in rows) / memories
        for name in ("with_pattern", "patterns_per_key")
    )
    yield f"in {share(with_pattern)} of the {memories:,} memories"
    yield f"Patterns per memory: {patterns:.2f}"
    semantic = [row["semantic"] + row["both"] for row in rows]
    yield f"({share(semantic[0])} in layer 1, {share(semantic[1])} in layer 2)"
    yield f"at {share(semantic[6])} in layer 7 and at {share(semantic[27])} in layer 28"
    yield f"a low of {share(semantic[18])} in layers 19 and 20"
    related = found.also("last-layer-composition")["related_share"]
    yield f"({100 * (1 - related):.0f} of 100)"


def mini_wiki():
    """Yield what docs/results/mini-wiki/README.md says about its report in numbers."""
    found = Results("mini-wiki")
    rates = found.column("agreement", "rate")
    yield f"From {share(rates[0], 1)} in layer 1"
    low, high = (
        share(mean(found.column("agreement", "rate", layers)), 1) for layers in ((1, 10), (11, 16))
    )
    yield f"({low} on average in layers 1–10, {high} in 11–16"
    yield f"would be right {share(found.rows('agreement')[0]['unigram'], 1)} of the time"
    ranks = found.column("next-token-rank", "median")
    yield f"falls from {ranks[0]:.0f} (median, layer 1) to {ranks[-1]:.0f} (layer 16)"
    yield f"with an AUC of {found.also('max-probability')['auc']:.2f}"
    upper = found.also("predictive-values")["upper_share"]
    yield f"and {100 * upper:.0f} of the 100 most predictive values are in layers 11–16"
    lower, upper = found.removed("last", (1, 9)), found.removed("last", (10, 16))
    yield f"falls by {share(lower, 1)} in layers 1–9 and by {share(upper)} in layers 10–16"
    active = found.column("active-memories", "median", definition="positive")
    few, most = active.index(min(active)), active.index(max(active))
    fewest, largest = share(active[few], 1), share(active[most], 1)
    yield f"{fewest} (layer {few + 1}) to {largest} (layer {most + 1})"
    semantic = found.column("patterns", "semantic")
    yield f"({share(semantic[0], 1)} in layer 1, {share(semantic[-1], 1)} in layer 16"
    yield f"{share(found.covered())} of triggers show a pattern"
    kept, own, composed = found.cases()
    yield f"compositions in {share(sum(composed) / (sum(own) + sum(composed)))} of cases"
    yield f"in {share(kept[0])} (layer 1) to {share(max(kept))} of examples"
    early = max(found.column("residual-prediction", "residual_share", (1, 4)))
    yield f"and {share(early)} of predictions are already present in one of the bottom four layers"
    related = found.also("last-layer-composition")["related_share"]
    yield f"{100 * (1 - related):.0f} go to a distant word"
    for memories, said in (
        ("all", "{low} (layers 1 and 16) to"),
        ("active", "{low} (layer 16) to"),
    ):
        zero = found.column("zero-agreement", "share", target="y", memories=memories)
        yield f"in {said.format(low=share(min(zero)))} {share(max(zero))} (layer 12"


def gemma():
    """Yield what docs/results/README.md says about Gemma 3 270M in numbers."""
    found = Results("gemma-3-270m-wikitext-2")
    made = json.loads((RESULTS / "gemma-3-270m-wikitext-2" / "index.json").read_text())
    losses = made["start"]["losses"]
    yield f"`<bos>`, loss {losses['<bos>']:.2f} per token; without one, {losses['none']:.2f}"
    yield f"{made['corpus']['tokens']:,} tokens"
    yield f"a trigger's coefficient falls by {share(found.removed('last'))}"
    lower, upper = (share(found.removed("last", layers), 1) for layers in ((1, 11), (12, 18)))
    yield f"{lower} in layers 1–11, {upper} in layers 12–18"
    rates = found.column("agreement", "rate")
    yield f"at most {share(max(rates), 1)} (layer {rates.index(max(rates)) + 1} of 18)"
    low, high = (
        share(mean(found.column("agreement", "rate", layers)), 1) for layers in ((1, 12), (13, 18))
    )
    yield f"{low} of memories in layers 1–12 and {high} in layers 13–18"
    predictive = found.also("predictive-values")
    yield f"{100 * predictive['upper_share']:.0f} of the 100 most predictive values"
    in_best = sum(row["cell"].startswith("L11N") for row in found.rows("predictive-values"))
    yield f"{in_best} of them are in layer 12"
    yield f"{predictive['with_agreeing_trigger']} have an agreeing trigger"
    control = predictive["random_control"]["with_agreeing_trigger"]
    yield f"compared with {control} of 100 random values of its upper layers"
    zero = found.column("zero-agreement", "share", target="y", memories="all")
    reached = sum(one >= 0.68 for one in zero)
    yield f"zero agreement is {100 * min(zero):.0f}–{share(max(zero))}"
    yield f"{reached} of 18 layers reach the paper's 68 %"
    early = found.column("residual-prediction", "residual_share", (1, 5))
    yield f"at most {share(max(early), 1)} of predictions in layers 1–5"
    kept, own, composed = found.cases()
    yield f"keep the residual's token in {share(mean(kept))} of examples"
    yield f"compositions in {share(sum(composed) / (sum(own) + sum(composed)))} of the changes"
    gate = found.column("active-memories", "median", definition="gate")
    yield f"fewest open gates in layer {gate.index(min(gate)) + 1} ({share(min(gate))})"
    agreeing, every = found.rows("stop-words")
    yield f"a stop word in {share(agreeing['stop_word_share'])} of cases with an agreeing memory"
    yield f"(all cases: {share(every['stop_word_share'])})"
    each = found.column("patterns", "covered")
    yield f"{share(found.covered())} of the first 25 triggers show a pattern"
    yield f"by layer {share(min(each))} to {share(max(each))}"


def small_models():
    """Yield what docs/results/small-models/README.md says about its ReLU model in numbers."""
    found = Results("small-relu")
    yield f"leaves {sum(found.column('patterns', 'keys')):,} of 2,048 ReLU memories"
    examined = found.column("agreement", "n")
    layer = examined.index(min(examined)) + 1
    yield f"{min(examined)} of 256 with a trigger that has a next token in layer {layer}"
    kinds = {"relu": "ReLU", "gelu": "GELU", "swiglu": "SwiGLU", "moe": "experts"}
    models = {name: Results(f"small-{kind}") for kind, name in kinds.items()}
    covered = [f"{share(one.covered())} ({name})" for name, one in models.items()]
    yield f"in {', '.join(covered[:3])} and {covered[3]}"
    kept = [f"{share(one.cases()[0][-1])} ({name})" for name, one in models.items()]
    yield f"token in {', '.join(kept[:3])} and {kept[3]}"
    per_memory = []
    for one in models.values():
        rows = one.rows("patterns")
        keys = sum(row["keys"] for row in rows)
        per_memory.append(sum(row["patterns_per_key"] * row["keys"] for row in rows) / keys)
    yield "{:.2f}, {:.2f}, {:.2f} and {:.2f} patterns per memory".format(*per_memory)


def front_page():
    """Yield what docs/index.md says about SmolLM2-135M in numbers."""
    found = Results("smollm2-135m-wikitext-2")
    yield f"a trigger's coefficient falls by {share(found.removed('last'))}"
    low = mean(found.column("agreement", "rate", (1, 19)))
    high = max(found.column("agreement", "rate", (20, 30)))
    yield f"**holds**: {share(low, 1)} of memories in lower layers, up to {share(high, 1)} in upper"
    yield f"**holds**: {share(mean(found.cases()[0]))} of examples keep it"
    zero = found.column("zero-agreement", "share", target="y", memories="all")
    yield f"some memory does in {100 * (1 - max(zero)):.0f}–{share(1 - min(zero))} of examples"
    early = found.column("residual-prediction", "residual_share", (1, 8))
    yield f"**does not hold**: at most {share(max(early), 1)}"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("README.md", smollm2),
        ("README.md", gemma),
        ("mini-wiki/README.md", mini_wiki),
        ("small-models/README.md", small_models),
        ("../index.md", front_page),
    ],
)
def test_numbers_in_prose_are_those_of_the_json(name, facts):
    text = " ".join((RESULTS / name).read_text(encoding="utf-8").split())
    assert [fact for fact in facts() if fact not in text] == []
