"""The names of all experiments, for those who must not load torch to know them."""

FROM_FOLDER = ("patterns",)
"""They read the index alone, without its model."""

FROM_INDEX = (
    *FROM_FOLDER,
    "token-removal",
    "agreement",
    "next-token-rank",
    "max-probability",
    "predictive-values",
)
"""They read the index and, those of FROM_FOLDER aside, its model."""

FROM_SAMPLE = (
    "active-memories",
    "zero-agreement",
    "stop-words",
    "residual-prediction",
    "residual-probability",
    "prediction-cases",
    "last-layer-composition",
    "neural-memory",
)
"""They look at the model at work on prefixes of a further corpus."""

NAMES = (*FROM_INDEX, *FROM_SAMPLE)

FROM_VALUES = (
    "agreement",
    "next-token-rank",
    "max-probability",
    "predictive-values",
    "zero-agreement",
    "stop-words",
    "neural-memory",
)
"""They read static values, which memories of a lambda layer do not have."""

NO_STATIC_VALUES = "memories of a lambda layer have no static values"
