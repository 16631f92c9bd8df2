"""ISO 8601 durations, in the form that Java's `Duration.parse` reads."""

from __future__ import annotations

import re

_DURATION = re.compile(
    r"([+-])?P(?=[\dT+-])(?:([+-]?\d{1,18})D)?"
    r"(?:T(?=[\d+-])(?:([+-]?\d{1,18})H)?(?:([+-]?\d{1,18})M)?(?:([+-]?\d{1,18}(?:[.,]\d{1,9})?)S)?)?",
    re.IGNORECASE,
)


def duration_ms(text: str) -> int | None:
    """`P1DT2H3M4.5S` as milliseconds; None for other text."""
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    sign, days, hours, minutes, seconds = match.groups()
    total_s = int(days or 0) * 86400 + int(hours or 0) * 3600 + int(minutes or 0) * 60
    total_ms = total_s * 1000 + round(float((seconds or "0").replace(",", ".")) * 1000)
    return -total_ms if sign == "-" else total_ms
