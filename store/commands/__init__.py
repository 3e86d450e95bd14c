"""Commands over the history: `journeywork replay`, `what-if` and `diff`.

| module | what lives there |
| --- | --- |
| `replay` | publishes groups of the history on a branch |
| `what_if` | trains and evaluates a part of the history under other settings |
| `question` | what `what_if` is asked: groups, and variants of the settings |
| `diff` | compares two sets of verdicts |
"""
