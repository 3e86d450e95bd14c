"""What `journeywork status` shows of the history: what apprentices are worth, and of each model whether its training
reward moved and what bounds its speed.

python -m store.showing.pages.status RUN_DIR      prints a sentence a line
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing

from pipeline.running.installations import installation_settings
from store.showing.pages.history import History
from store.showing.pages.summary import reward_text_of, utilization_texts
from store.showing.pages.takeover import takeover_texts


def sentences(history: History) -> Iterator[str]:
    """Yield the sentences about the models of the settings, on branch `main`."""
    yield from takeover_texts(history)
    for model in history.config.models:
        selection = {"model": model.name, "branch": "main"}
        for text in (reward_text_of(history, selection), *utilization_texts(history, selection)):
            yield f"{model.name}: {text}"


if __name__ == "__main__":
    with closing(History(installation_settings(sys.argv[1], sections=("store", "models", "outside")))) as opened:
        sys.stdout.writelines(f"{sentence}\n" for sentence in sentences(opened))
