"""A memory as people see it: on a terminal and in a notebook."""

from html.parser import HTMLParser

from ffmem.cells import Cell
from ffmem.indexing.memory import (
    Keys,
    Kind,
    Memory,
    MemoryStats,
    Trigger,
    Value,
    ValueToken,
    from_visible,
    visible,
    visible_token,
)

HOSTILE = "<script>alert('x')</script>&\"\n\x1b[31m"


def memory(text="the river", n=12, gate=None):
    triggers = [
        Trigger(rank, 1 / rank, 7, 2, text, text[-5:], None if rank == 2 else text, text, gate)
        for rank in range(1, n + 1)
    ]
    tokens = [ValueToken(f"{text}{id}", id, 0.5, 1.0) for id in range(15)]
    stats = MemoryStats(0.25, 1.0, -0.5, 0.1, {"0.5": 0.0})
    kind = Kind(gated=gate is not None)
    value, keys = Value("folded", tokens, tokens), Keys([], {}, None)
    return Memory(Cell(5, 3), triggers, [], value, stats, kind, keys)


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_a_notebook_shows_hostile_text_as_text():
    page = Tags()
    page.feed(memory(HOSTILE)._repr_html_())
    assert page.tags == {"h4", "p", "br", "code", "table", "tr", "td", "b", "span"}
    assert "<script>alert('x')</script>&\"↵" in page.text
    assert "\x1b" not in page.text


def test_a_notebook_marks_the_last_token_of_each_trigger():
    shown = memory("the river")._repr_html_()
    assert "the <b>river</b><span" in shown
    assert "<h4>L5N3   layer 5, memory 3</h4>" in shown
    assert "active on 25.0% of prefixes" in shown


def test_a_terminal_shows_ten_triggers_a_line_each_without_control_characters():
    lines = str(memory(HOSTILE)).split("\n")
    assert lines[0] == "L5N3   layer 5, memory 3"
    assert len([line for line in lines if line.lstrip()[:1].isdigit()]) == 10
    assert "\x1b" not in str(memory(HOSTILE))
    assert "∎" in next(line for line in lines if line.startswith("   2 "))


def test_a_memory_that_nothing_triggers_says_so():
    assert "No prefix of the corpus triggers this memory." in str(memory(n=0))


def test_a_list_that_is_cut_says_so():
    assert "The first 10 of 12 triggers; for more, --top N or .format(N)." in str(memory())
    assert "triggers; for more" not in memory().format(12)
    assert "for more" not in str(memory(n=10))


def test_a_gated_memory_is_read_for_the_sign_of_its_coefficient():
    shown = str(memory(gate=1))
    assert "gate open on 25.0% of prefixes" in shown
    assert "m > 0 promotes" in shown
    assert "suppresses" not in shown
    page = memory(gate=1)._repr_html_()
    assert page.count("<h5>m &gt; 0 promotes") == page.count("<h5>m &lt; 0 promotes") == 1


def test_a_notebook_shows_where_it_shortens():
    page = memory("a" * 300 + " end")._repr_html_()
    assert "<td style='text-align:left'>…aaa" in page
    assert "aaa…</span>" in page
    assert "The first 10 of 12 triggers." in page
    assert "The first" not in memory(n=10)._repr_html_()
    assert "No prefix of the corpus triggers it." in memory(n=0)._repr_html_()


def test_what_is_copied_from_the_screen_is_the_token_again():
    for token in (" in", "\n\t", "a b"):
        assert from_visible(visible_token(token)) == token


def test_a_long_prefix_is_cut_on_the_left():
    line = next(line for line in str(memory("a" * 300 + " end")).split("\n") if line[:4] == "   1")
    assert "…" in line
    assert "aaa end → " in line
    assert line.count("a") < 300 + 80


def test_white_space_is_visible():
    assert visible("a\nb\tc\r\0") == "a↵b⇥c␍⟨00⟩"
    assert visible_token(" in") == "␣in"
    assert visible_token(None) == "∎"


def test_only_a_gated_model_has_gates():
    assert "gate" not in memory().triggers[0].to_dict()
    assert memory(gate=-1).triggers[0].to_dict()["gate"] == -1
