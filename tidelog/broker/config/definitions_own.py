"""Tidelog's own configuration keys, unknown to Kafka: the format of its log,
and the address of its metrics.

A table without code. `DescribeConfigs` does not list these keys, which clients of Kafka do not
know.
"""

from __future__ import annotations

from tidelog.broker.config.definition_types import ANY, INT, INTERNAL, LONG, STRING, Row, at_least, between, one_of

# fmt: off
OWN: tuple[Row, ...] = (
    ("log.format", STRING, "text", one_of("text", "json"), INTERNAL,
     "How a line of the log on standard error looks."),
    ("log.scrub.bytes.per.second", LONG, "8388608", at_least(0), INTERNAL,
     "How fast the logs are read in the background to find damage; 0 reads them never."),
    ("log.scrub.interval.ms", LONG, "86400000", at_least(1), INTERNAL,
     "How long after a look at all logs the next one begins."),
    ("log.level", STRING, "INFO", one_of("DEBUG", "INFO", "WARNING", "ERROR", any_case=True), INTERNAL,
     "The least severe events that are logged."),
    ("metrics.host", STRING, "127.0.0.1", ANY, INTERNAL,
     "The address on which metrics and health are served; empty for every interface."),
    ("metrics.port", INT, None, between(0, 65535), INTERNAL,
     "The HTTP port for /metrics, /healthz and /readyz; none serves them nowhere, 0 takes a free one."),
    ("metrics.topics.max", INT, "200", at_least(0), INTERNAL,
     "Topics with metrics of their own; those of all others are added up."),
)
# fmt: on
