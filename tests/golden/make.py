"""Write golden records: `python -m tests.golden.make [--again] [NAME …]`.

They define what "as before" means. So only those that are missing are made, unless you ask to make
some again, because their numbers are meant to change.
"""

import argparse
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.golden import records


def main():
    """Make the missing records, or those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.golden.make", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="Models; all if none is named.")
    parser.add_argument("--again", action="store_true", help="Overwrite records that exist.")
    given = parser.parse_args()
    for group, (names, _) in records.GROUPS.items():
        for name in names:
            if given.names and name not in given.names:
                continue
            if records.path(group, name).exists() and not given.again:
                continue
            began = time.perf_counter()
            with TemporaryDirectory() as folder:
                records.write(group, name, records.compute(group, name, Path(folder)))
            print(f"{group}/{name}: {time.perf_counter() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
