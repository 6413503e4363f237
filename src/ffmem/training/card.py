"""The model card of a trained model, `README.md`: what it is, what it was trained on, how well."""

from ffmem.training.record import Trained
from ffmem.training.telling import matching, memories, summary


def card(trained: Trained) -> str:
    """Return the card as Markdown, with the head that the Hub reads."""
    asked, prepared = trained.asked, trained.prepared
    settings = asked.settings
    held_out = "its last sentences, held out"
    valid = held_out if asked.valid is None else f"`{asked.valid['source']}`"
    facts = {
        "each layer has": memories(settings, prepared),
        "layers, width, heads": f"{settings.layers}, {settings.width}, {settings.n_heads}",
        "parameters": f"{prepared.parameters:,}{matching(settings, prepared)}",
        "vocabulary": f"{prepared.vocabulary:,} {_tokens(settings.tokenizer)}",
        "bands end at": ", ".join(f"{end:,}" for end in settings.bands or []) or "one band",
        "context": f"{settings.context} tokens",
        "trained on": f"`{asked.corpus['source']}`: {prepared.train.sentences:,} sentences,"
        f" {prepared.train.tokens:,} tokens, {prepared.train.unknown_share:.2%} `<unk>`",
        "validation": f"{valid}: {prepared.valid.tokens:,} tokens,"
        f" {prepared.valid.unknown_share:.2%} `<unk>`",
        "steps": f"{trained.steps:,} of {settings.blocks_of_a_step * settings.context:,} tokens"
        f" ({trained.epochs:.2f} epochs)",
        "AdamW": f"learning rate {settings.learning_rate:g}, {prepared.warmup:,} steps warm-up,"
        f" cosine to a tenth, weight decay {settings.weight_decay:g}, dropout {settings.dropout:g}",
        "numbers": f"{settings.dtype}, seed {settings.seed}, {asked.threads} threads,"
        f" {asked.device}",
        "versions": ", ".join(f"{name} {number}" for name, number in asked.versions.items()),
        "**validation perplexity**": f"**{trained.valid_perplexity:,.2f}**"
        f" after step {trained.best_step:,}",
    }
    rows = "\n".join(f"| {name} | {fact} |" for name, fact in facts.items())
    return _CARD.format(
        memory=settings.memory, rows=rows, summary=summary(trained).replace("<unk>", "`<unk>`")
    )


def _tokens(tokenizer: str) -> str:
    return "words" if tokenizer == "words" else "tokens of a byte-level BPE"


_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags: [ffmem, key-value-memories]
---

# A language model with {memory} memories

{summary}

| | |
|---|---|
{rows}

Perplexity is per token of this vocabulary, over the whole validation text in blocks of the
context above; the tokens that open sentences count. It does not compare models of different
vocabularies.

![Loss and validation over tokens read](curve.svg)

Made by `ffmem train`. `training.json` holds every setting and figure, `curve.jsonl` the curve.

```python
import ffmem

memories = ffmem.load("THIS FOLDER")
```

With plain transformers: `import ffmem.networks.model`, which registers the model, then
`AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.
"""
