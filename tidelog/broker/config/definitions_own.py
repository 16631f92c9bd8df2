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
     "The format of the log's lines on standard error."),
    ("log.scrub.bytes.per.second", LONG, "8388608", at_least(0), INTERNAL,
     "The rate at which the scrubber reads the logs in the background to find damage; 0 turns it off."),
    ("log.scrub.interval.ms", LONG, "86400000", at_least(1), INTERNAL,
     "The time from the start of one pass of the scrubber over all logs to the start of the next."),
    ("log.level", STRING, "INFO", one_of("DEBUG", "INFO", "WARNING", "ERROR", any_case=True), INTERNAL,
     "The lowest level of events that the log contains."),
    ("metrics.host", STRING, "127.0.0.1", ANY, INTERNAL,
     "The address of the HTTP server for metrics and health; empty for every interface."),
    ("metrics.port", INT, None, between(0, 65535), INTERNAL,
     "The HTTP port for /metrics, /healthz and /readyz; without it there is no HTTP server, 0 takes a free port."),
    ("metrics.topics.max", INT, "200", at_least(0), INTERNAL,
     "The number of topics with metrics of their own; the metrics of all other topics are added up."),
)
# fmt: on
