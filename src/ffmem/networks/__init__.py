"""Language models whose layers hold memories of seven kinds."""
