"""The public interface of openpipe-art 0.5, as programs use it.

The same files run against `journeywork.art` and, in an environment of its own, against `art` itself: see docs/art.md.
So they import nothing of this repository but each other, and use no fixture of it.

| module | contents |
| --- | --- |
| `kit` | the package under test, values that programs pass, a model behind OpenAI's API |
| `test_played` | trajectories, groups, and what plays many of them |
| `test_models` | models, helpers |
| `test_judged` | RULER, scenarios of tools, agents of LangGraph |
"""
