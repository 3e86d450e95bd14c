"""Permissions on the log, signatures of checkpoints, and names of hosts.

| module | what lives there |
| --- | --- |
| `nkey` | Ed25519 keys of NATS: seeds in files, signatures, their verification |
| `users` | the table of NATS users and their permissions |
| `signing` | signatures of checkpoints |
| `key_file` | the file of API keys |
| `server_key` | the API key of the inference servers |
| `host_names` | the name in a `Host` header, and what is of the loopback interface |
"""
