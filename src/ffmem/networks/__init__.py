"""Language models whose layers hold memories of six kinds."""
