"""Merges the metrics of all workers into one page: every series has the label `worker`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    """The series of all pages, by the labels of their workers."""

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


def merged(pages: Mapping[str, bytes]) -> bytes:
    """One page in Prometheus' text format of the pages of all workers, by their labels.

    A series that has a label `worker` already keeps it."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Merged(pages))
    return generate_latest(registry)
