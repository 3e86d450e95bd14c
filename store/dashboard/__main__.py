"""`python -m store.dashboard --config <toml>`: the dashboard as a service."""

from pipeline.running.service import main
from store.dashboard.service import check, serve

main("ui", serve, check)
