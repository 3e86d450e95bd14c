"""What the examples share: a small base model, a running installation, and recorded learning curves.

| module | what lives there |
| --- | --- |
| `packaged` | a small language model from a package |
| `running` | `journeywork up` around an example, its flags, the version that is served |
| `history`, `invariants` | SQL over its run; what must never be in its history |
| `late_results` | learning on the job: its settings, and the program that reports results a while after a run |
| `stand_in` | programs in place of models |
| `curve` | from a run to its report, from reports to a picture with intervals |
"""
