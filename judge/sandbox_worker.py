"""The process side of `judge.sandbox`; run as a script, with the standard library alone.

Arguments: `package.module:function` and the address space in MB. One JSON trajectory a line on stdin, one JSON answer
a line on stdout: `{"reward": 0.5}` or `{"error": "…"}`; first of all one `{}` once the function is there. What the
function prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys


def main() -> None:
    """Answer until stdin ends."""
    entry, memory_mb = sys.argv[1], int(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The script's folder holds modules of the judge's, which must not shadow the function's own imports.
    sys.path.pop(0)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def answer(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    module, _, name = entry.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - the edge between their code and ours
        answer(error=f"{type(error).__name__}: {error}")
        return
    answer()
    for line in sys.stdin:
        try:
            answer(reward=function(json.loads(line)))
        except Exception as error:  # noqa: BLE001 - as above
            answer(error=f"{type(error).__name__}: {error}"[:2000])


if __name__ == "__main__":
    main()
