"""The guide's small practice: eight texts of our own, and what to mark in them.

The texts are invented for this page. Nothing is kept of what a reader tries.
"""

from typing import NamedTuple

ASKED = "baking and bread"
"""The pattern that the reader is asked to mark."""

KIND = "semantic"


class Practice(NamedTuple):
    """A text, whether it shows the pattern, and why."""

    before: str
    last: str
    shows: bool
    why: str


PRACTICE = (
    Practice("Leave the dough under a cloth until it has", " doubled", True, "Dough is for bread."),
    Practice("The tram was late again, so we", " walked", False, "A tram, a walk: no baking."),
    Practice(
        "Every crust in the shop window was dusted with",
        " flour",
        True,
        "Crust and flour: a baker’s window, though nobody says “bread”.",
    ),
    Practice(
        "She signed the letter and sealed the",
        " envelope",
        False,
        "A letter: no baking.",
    ),
    Practice("Our oven is small, and three loaves are its", " limit", True, "An oven, loaves."),
    Practice(
        "The bakery of ideas, as he called his office, was",
        " closed",
        False,
        "The word is there, but it is an office: the text is not about baking.",
    ),
    Practice(
        "Salt goes in last, after the yeast has been", " stirred", True, "Yeast, salt: dough."
    ),
    Practice("By noon the harbour had filled with", " sails", False, "A harbour: no baking."),
)


class Checked(NamedTuple):
    """What a reader marked, against what is so."""

    right: bool
    says: list[str]


def checked(marks: list[int], kind: str | None) -> Checked:
    """Return what to tell a reader who marked these texts, and called the pattern so."""
    says = []
    for rank, text in enumerate(PRACTICE, start=1):
        if text.shows and rank not in marks:
            says.append(f"Text {rank} shows it too. {text.why}")
        if not text.shows and rank in marks:
            says.append(f"Text {rank} does not show it. {text.why}")
    if kind is None:
        says.append("Is it shallow or semantic? Choose one.")
    elif kind != KIND:
        says.append("It is semantic: the texts share a topic, and no word or ending.")
    return Checked(not says, says)
