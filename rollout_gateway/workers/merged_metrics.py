"""Merges the metrics pages of all workers into one. Every series gets the label `worker`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    """Collects the series of all pages. `pages`: the metrics text of each worker by its label."""

    def __init__(self, pages: Mapping[str, bytes]) -> None:
        self._pages = pages

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for worker, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page.decode()):
                into = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = (
                        sample.labels if "worker" in sample.labels else {"worker": worker, **sample.labels}
                    )
                    into.samples.append(sample._replace(labels=labels))
        yield from families.values()


def merge_pages(pages: Mapping[str, bytes]) -> bytes:
    """Return one page in Prometheus' text format. `pages`: the page of each worker by its label.

    A series that already has the label `worker` keeps it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(pages))
    return generate_latest(registry)
