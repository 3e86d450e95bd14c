"""What the examples share: small base models, a running installation, and recorded learning curves.

| module | what lives there |
| --- | --- |
| `packaged` | a small language model from a package |
| `running` | `journeywork up` around an example, its flags, the version that is served |
| `history` | SQL over its run |
| `stand_in` | programs in place of models |
| `curve` | from a run to its report, from reports to a picture with intervals |
"""
