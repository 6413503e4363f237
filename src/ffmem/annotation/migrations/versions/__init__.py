"""One file per step; the number of the newest is `schema.VERSIONS[-1]`."""
