"""Commands over the history: `journeywork replay`, `what-if`, `diff` and `calibrate`.

| module | what lives there |
| --- | --- |
| `replay` | publishes groups of the history on a branch |
| `what_if` | trains and evaluates a part of the history under other settings |
| `question` | what `what_if` is asked: groups, and variants of the settings |
| `diff` | compares two sets of verdicts |
| `calibrate` | fits a judge's scores to people's labels; labelled groups as anchors |
"""
