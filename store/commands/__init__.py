"""Commands over the history: `journeywork replay`, `journeywork diff` and `journeywork calibrate`.

| module | what lives there |
| --- | --- |
| `replay` | publishes groups of the history on a branch |
| `diff` | compares two sets of verdicts |
| `calibrate` | fits a judge's scores to people's labels; labelled groups as anchors |
"""
