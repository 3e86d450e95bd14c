"""Types of event fields. Those with a `column` say how the field is stored in Parquet.

Tokens and their logprobs are packed: the bytes of a field are the numbers one after the other, which is smaller and
faster to decode than a list."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Micros = Annotated[int, msgspec.Meta(extra={"column": "timestamp_us"})]
"""Microseconds since the Unix epoch, UTC."""

TokenIds = Annotated[bytes, msgspec.Meta(extra={"column": "list<int32>"})]
"""Packed little-endian int32, one per token."""

Logprobs = Annotated[bytes, msgspec.Meta(extra={"column": "list<float32>"})]
"""Packed little-endian float32, natural logarithm, one per token."""

TokenMask = Annotated[bytes, msgspec.Meta(extra={"column": "list<uint8>"})]
"""One byte per token: 1 or 0. The field's docstring says what an empty mask means."""

StreamSeqs = Annotated[bytes, msgspec.Meta(extra={"column": "list<int64>"})]
"""Packed little-endian int64 stream sequences."""

Json = Annotated[bytes, msgspec.Meta(extra={"column": "json"})]
"""A JSON document, UTF-8, as it went over the wire."""

REWARD_TOLERANCE = 1e-6
"""Rewards that differ by at most this are equal: sums of a judge's scores carry rounding errors."""

MAX_NUMBER = 1e15
"""Largest absolute value of a reward or metric. Sums and products of a few such numbers are finite."""

Number = Annotated[float, msgspec.Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
"""A reward or a metric as a client sends it."""

Outcome = Literal["scored", "no_result", "masked"]
Split = Literal["train", "val"]
