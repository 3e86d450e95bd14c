"""The process side of `judge.sandbox`; run as a script, with the standard library alone.

Arguments: `package.module:function`, the address space in MB, and whether to confine the process (`off`, `auto`, `require`).
One JSON trajectory a line on stdin, one JSON answer a line on stdout: `{"reward": 0.5}` or `{"error": "…"}`; first of all
`{"missing": […]}` once the function is there, with the limits that the kernel did not permit. What the function prints goes
to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys


def main() -> None:
    """Answer until stdin ends."""
    entry, memory_mb, isolate = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    confine = importlib.import_module("confine").confine  # beside this script

    # The script's folder holds modules of the judge's, which must not shadow the function's own imports.
    sys.path.pop(0)
    missing = confine() if isolate != "off" else []
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def answer(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    if missing and isolate == "require":
        answer(error=f"the process can't be confined: {'; '.join(missing)}")
        return
    module, _, name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - the edge between their code and ours
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer(missing=missing)
    for line in sys.stdin:
        try:
            answer(reward=function(json.loads(line)))
        except Exception as error:  # noqa: BLE001 - as above
            answer(error=f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    main()
