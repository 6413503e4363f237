"""Writes the session of docs/guides/agents.md: `python docs/agent_session.py DIR`.

A program in place of a language model talks to `ffmem mcp DIR` through the real client: it finds a
memory, checks it on texts of its own, and switches it off. Every answer is what the server said,
cut to a few lines. The page's DIR was made by

    ffmem index smollm2-135m wikitext-2:train --limit 400 --out DIR
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client

PAGE = Path(__file__).parent / "guides" / "agents.md"
BEGIN, END = "<!-- docs/agent_session.py writes from here -->\n", "<!-- to here -->"

PROMPT = "In the last election the party won 48"
OTHER = "In the last election the party won the"


class Session:
    """Calls tools and keeps what was said, as Markdown."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        """Add what the agent thinks."""
        self.lines += [text, ""]

    async def call(self, tool: str, keep: Any = None, **arguments: Any) -> dict[str, Any]:
        """Call a tool; `keep` picks the part of the answer that the page shows."""
        answer = await self.client.call_tool(tool, arguments)
        (content,) = answer.content
        text = getattr(content, "text", "")
        shown = text
        if not answer.is_error and keep is not None:
            shown = _format(keep(answer.structured_content))
        given = ", ".join(
            f"{name}={json.dumps(one, ensure_ascii=False)}" for name, one in arguments.items()
        )
        self.lines += ["```", f"→ {tool}({given})", shown, "```", ""]
        return answer.structured_content or {}


def _format(rows: list[Any]) -> str:
    """Return one line of JSON per row, with short numbers."""
    return "\n".join(json.dumps(_short(row), ensure_ascii=False) for row in rows)


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.3g}")
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, str) and len(value) > 70:
        return "…" + value[-69:]
    return value


def _pick(rows: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    return [{name: row[name] for name in names} for row in rows]


async def explore(session: Session) -> None:
    """Find a memory, check it, switch it off."""
    session.say("**Find.** Which memories promote “percent”?")
    found = await session.call(
        "search",
        lambda answer: _pick(
            answer["values"]["hits"], "cell", "matches", "rank", "side", "snippet"
        ),
        query="percent",
        place="values",
        limit=3,
    )
    cell = found["values"]["hits"][0]["cell"]

    session.say(f"**Read.** {cell} comes first. What triggers it?")
    await session.call(
        "show",
        lambda answer: [
            {"promotes": [token["token"] for token in answer["value"]["top"]]},
            *_pick(answer["triggers"], "rank", "coefficient", "prefix", "next_token"),
            {"gate_open_on": answer["stats"]["active_share"]},
        ],
        cell=cell,
        triggers=4,
        tokens=6,
    )

    session.say(
        "**Check.** It seems to promote percent signs where a quantity is given. Its coefficient on"
        " two texts, one of which ends in such a number:"
    )
    for prompt in (PROMPT, OTHER):
        await session.call(
            "coefficients",
            lambda answer: [
                [
                    list(pair)
                    for pair in zip(answer["tokens"], answer["coefficients"][cell], strict=True)
                ]
            ],
            prompt=prompt,
            cells=[cell],
        )

    session.say("**Ablate.** How much does the next token depend on it, exactly?")
    await session.call(
        "effect",
        lambda answer: [
            {"target": answer["target"]["token"], "probability": answer["target"]["probability"]},
            *_pick(answer["memories"], "cell", "change", "coefficient", "value_top"),
        ],
        prompt=PROMPT,
        target="%",
        cells=[cell],
        top=4,
    )
    session.say("And with the memory off, what does the model predict, and write?")
    await session.call(
        "trace",
        lambda answer: [
            *_pick(answer["output_changes"], "token", "probability", "edited_probability")[:4],
            {"continues": answer["generated"]},
            {"without it": answer["edited_generated"]},
        ],
        prompt=PROMPT,
        off=[cell],
        top=4,
        layers=[],
        generate=8,
    )
    session.say(
        "**Too much.** A request that exceeds the limit is rejected, and the error says why:"
    )
    await session.call("search", query="the", limit=10_000_000)


async def main(folder: str) -> None:
    """Run the session and write it into the page."""
    command = [sys.executable, "-m", "ffmem", "mcp", folder]
    server = StdioServerParameters(command=command[0], args=command[1:], env=_environment())
    async with Client(stdio_client(server)) as client:
        session = Session(client)
        await explore(session)
    written = "\n".join(session.lines).rstrip() + "\n"
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{written}{END}{after}", encoding="utf-8")
    print(re.sub(r"^", "  ", written, flags=re.M))


def _environment() -> dict[str, str]:
    """Return what the server needs to import the same ffmem as this program."""
    import ffmem

    return {"PYTHONPATH": str(Path(ffmem.__file__).parent.parent)}


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
