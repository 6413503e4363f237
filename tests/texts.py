"""Lines with what text can hold: other scripts, emoji, quotes, operators, tags."""

LINES = [
    "The river runs through the old city of Prague.",
    "In the summer of 1990 she went to the river again.",
    'He said "never OR always" and left; NOT a word* more.',
    "<script>alert('x')</script> & <b>bold</b> claims",
    "Smile 😀 and wave 👋🏽 at the café in the naïve city.",
    "העיר של העיתון",
    "शहर में प्रेस है",
    "price: 5 € a,b;c\tand tabs",
    "the THE The river River RIVER",
    "one",
    "!!! ???",
    "In the city of the press, the press said that the base was in the city.",
    *(f"Sentence {n} of the river and the base number {n * 7 % 13}." for n in range(12)),
]
