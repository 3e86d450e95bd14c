"""`python -m store --config <toml>`: the store service."""

from pipeline.running.service import main
from store.service import check, serve

main("store", serve, check)
