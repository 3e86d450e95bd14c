"""The metrics of all workers on one page."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from rollout_gateway.workers import merged_metrics

PAGE = b"""# HELP calls_total Calls.
# TYPE calls_total counter
calls_total{status="200"} %d
# HELP took_seconds Time.
# TYPE took_seconds histogram
took_seconds_bucket{le="+Inf"} %d
took_seconds_count %d
took_seconds_sum 1.5
"""


def test_every_series_names_its_worker_and_a_family_is_described_once() -> None:
    owner = b'# HELP up Up.\n# TYPE up gauge\nup{worker="1"} 1\nup{worker="2"} 0\n'
    page = merged_metrics.merge_pages({"2": PAGE % (5, 5, 5), "1": PAGE % (3, 3, 3), "owner": owner}).decode()
    families = {f.name: f for f in text_string_to_metric_families(page)}
    found = {(s.name, s.labels["worker"]): s.value for f in families.values() for s in f.samples}
    assert found["calls_total", "1"] == 3
    assert found["calls_total", "2"] == 5
    assert found["took_seconds_bucket", "2"] == 5
    assert (found["up", "1"], found["up", "2"]) == (1, 0)
    assert page.count("# TYPE calls_total counter") == page.count("# TYPE took_seconds histogram") == 1
