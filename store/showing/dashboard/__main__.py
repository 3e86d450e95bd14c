"""`python -m store.showing.dashboard --config <toml>`: the dashboard as a service."""

from pipeline.running.service import main
from store.showing.dashboard.service import check, serve

main("ui", serve, check)
