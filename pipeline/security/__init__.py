"""Permissions on the log, and signatures of checkpoints.

| module | what lives there |
| --- | --- |
| `nkey` | Ed25519 keys of NATS: seeds in files, signatures, their verification |
| `users` | the table of NATS users and their permissions |
| `signing` | signatures of checkpoints |
"""
