"""Commands over the history: `journeywork replay` and `journeywork diff`.

| module | what lives there |
| --- | --- |
| `replay` | publishes groups of the history on a branch |
| `diff` | compares two sets of verdicts |
"""
