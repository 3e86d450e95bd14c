"""`journeywork.art` costs a program little more than `openai`, which it needs anyway."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "litellm", "nats", "msgspec", "numpy", "pyarrow", "tqdm", "langchain_core", "rich")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_it_loads_nothing_heavy() -> None:
    code = f"""
import sys, openai
before = set(sys.modules)
import journeywork.art, journeywork.art.rewards, journeywork.art.mcp, journeywork.art.langgraph
import journeywork.art.utils.litellm
more = {{name.partition('.')[0] for name in set(sys.modules) - before}}
print(sorted(more & set({HEAVY!r})))
"""
    done = run(code)
    assert done.stdout.strip() == "[]", done.stderr


def test_without_openai_it_says_what_to_install() -> None:
    done = run("import sys; sys.modules['openai'] = None; import journeywork.art")
    assert "pip install './journeywork[art]'" in done.stderr
