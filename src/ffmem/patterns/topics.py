"""A space in which prefixes about the same things lie close: what topics are found in.

A space knows nothing of triggers. It gives a vector for what a prefix is about, when some of its
words are not looked at; which words those are depends on the list that asks.
"""

from jaxtyping import Float32, Int32, Int64
from numpy import ndarray

from ffmem.patterns.corpus_view import CorpusView

Arrays = dict[str, ndarray]


class TopicSpace:
    """Vectors for prefixes."""

    name: str

    def arrays(self) -> Arrays:
        """Return what another process needs to make the same space."""
        raise NotImplementedError

    def vectors(
        self,
        view: CorpusView,
        rows: Int64[ndarray, " prefix"],
        removed: Int32[ndarray, "prefix slot"],
    ) -> Float32[ndarray, "prefix axis"]:
        """Return unit vectors for rows of a view without the words removed (−1: none).

        A prefix of which nothing is left has the vector 0. Rows may come more than once.
        """
        raise NotImplementedError
