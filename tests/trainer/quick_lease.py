"""Leases that expire soon, for processes that import this module."""

from trainer import lease

lease._TTL_S, lease._RENEW_S = 4.0, 1.0
