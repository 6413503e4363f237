"""Detection of patterns for all memories of an index: seconds, memory, and what chance finds.

`FFMEM_BENCH_INDEX` names one index or several (separated as in PATH) of one model over corpora of
different size: time per memory must not grow with the corpus. Every index is copied first, without
what is not needed: nothing is written into it.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 120
"""All memories of SmolLM2-135M on two cores may take so long."""

SHUFFLED_SHARE = 0.001
"""Of shuffled lists may have a pattern."""

SCRIPT = """
import json, resource, sys, time
from ffmem.indexing.store import Index
from ffmem.patterns.detect import detect
from ffmem.progress import Progress

if __name__ == "__main__":
    begin = time.perf_counter()
    found = detect(
        Index(sys.argv[1]),
        workers=int(sys.argv[2]),
        shuffled=sys.argv[3] == "shuffled",
        progress=Progress(quiet=True),
    )
    seconds = time.perf_counter() - begin
    peaks = [resource.getrusage(who).ru_maxrss // 1024
             for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(json.dumps({"seconds": seconds, "peak_mib": peaks, "found": found.to_dict()}))
"""


def patterns(workers: int = 2) -> dict[str, Any]:
    """Seconds and memory of a detection, and of its shuffled control, for each index."""
    folders = (os.environ.get("FFMEM_BENCH_INDEX") or "demo").split(os.pathsep)
    results = {Path(folder).name: _measured(Path(folder), workers) for folder in folders}
    each = [one["milliseconds_per_memory"] for one in results.values()]
    return {
        "workers": workers,
        "most_seconds": SECONDS,
        "most_shuffled_share_of_lists": SHUFFLED_SHARE,
        "indexes": results,
        "milliseconds_per_memory_last_over_first": each[-1] / each[0],
    }


def _measured(folder: Path, workers: int) -> dict[str, Any]:

    import ffmem

    index = ffmem.open(folder)
    measured: dict[str, Any] = {
        "memories": len(index),
        "sentences": index.manifest.corpus.sentences,
        "tokens": index.manifest.corpus.tokens,
    }
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "index"
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("search.sqlite", "patterns"))
        script = Path(scratch) / "measure.py"
        script.write_text(SCRIPT)
        for name in ("found", "shuffled"):
            before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
            command = [sys.executable, str(script), str(copy), str(workers), name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            said = json.loads(done.stdout)
            used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            measured[name] = said["found"]
            if name == "found":
                measured |= {
                    "seconds": said["seconds"],
                    "with_start_seconds": time.perf_counter() - begin,
                    "processor_seconds": used,
                    "peak_mib_of_main_and_of_one_worker": said["peak_mib"],
                    "milliseconds_per_memory": 1000 * said["seconds"] / len(index),
                }
    shuffled = measured["shuffled"]
    measured["shuffled_share_of_lists"] = shuffled["share_of_lists"]
    return measured
