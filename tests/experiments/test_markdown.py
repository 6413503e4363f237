import html
import re

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markupsafe import Markup

from ffmem.experiments.render import escape_markdown as markdown
from ffmem.experiments.render import fenced

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
CHARACTERS = st.sampled_from(list("ab *_`[]()<>&|~#!\\/:.\"'-+=1@$\u05d0␣"))


@given(st.text(CHARACTERS, max_size=25))
def test_any_text_in_a_table_is_shown_and_does_nothing(text):
    rendered = PARSER.render(f"| a | b |\n|---|---|\n| x{markdown(text)}x | y |\n")
    cells = re.findall(r"<td>(.*?)</td>", rendered)
    assert len(cells) == 2
    assert "<" not in cells[0]
    assert html.unescape(cells[0]) == f"x{text}x"


def test_addresses_do_not_become_links():
    assert markdown("http://a.b www.c.d") == "http\\://a.b www\\.c.d"


def test_what_is_markdown_already_stays():
    assert markdown(Markup("<br>")) == "<br>"
    assert markdown(3) == "3"


@given(st.text(st.sampled_from("`~a \n"), max_size=12))
@example("```")
def test_a_fence_is_never_closed_from_within(text):
    rendered = PARSER.render(f"```sh\n{fenced(text)}\n```\nend\n")
    assert rendered.endswith("</code></pre>\n<p>end</p>\n")
