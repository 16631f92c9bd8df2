"""The study as tables for people and as JSON for scripts. Measures nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tidelog.bench.acks.contest import BROKERS, Measurements
from tidelog.bench.acks.settings import Setting, Study, laws
from tidelog.bench.compare import OURS, THEIRS
from tidelog.bench.figures import number
from tidelog.bench.peers import KAFKA_VERSION
from tidelog.bench.report import machine

_ACKS_STYLE = {"all": "bold", "1": "", "0": "dim"}


def table(study: Study, measured: Measurements) -> Table:
    """One line per setting: records a second and the median latency of each broker, the ratio, the reference."""
    out = Table(title=f"{study.number}. {study.title}: records a second", title_justify="left")
    for heading in ("acks", "replicas", "min.insync"):
        out.add_column(heading, justify="right")
    ours, theirs = measured.rates(OURS), measured.rates(THEIRS)
    names = [(name, rates) for name, rates in ((OURS, ours), (THEIRS, theirs)) if name in measured.rounds]
    for name, _ in names:
        out.add_column(name, justify="right")
        out.add_column("p50, us", justify="right", style="dim")
    if len(names) > 1:
        out.add_column("ratio", justify="right")
    out.add_column("Kafka 0.10.1, 4 x 24 cores", justify="right", style="dim")
    for place, setting in enumerate(study.settings):
        cells = [f"[{style}]{setting.acks_name}[/]" if (style := _ACKS_STYLE[setting.acks_name]) else setting.acks_name]
        cells += [str(setting.replicas), str(setting.min_insync)]
        for name, rates in names:
            cells += [number(rates.get(setting)), number(measured.latency_us(name, setting, 50))]
        if len(names) > 1:
            both = setting in ours and setting in theirs
            cells.append(f"{ours[setting] / theirs[setting]:.1f}" if both else "-")
        cells.append(number(study.reference.get(setting)))
        following = study.settings[place + 1 : place + 2]
        out.add_row(*cells, end_section=bool(following) and following[0].acks != setting.acks)
    return out


def law_table(measured: Measurements) -> Table:
    """Each law for each broker: whether it held, and the figures."""
    out = Table(title="The laws", title_justify="left")
    for heading in ("law", "broker", "held", "records a second"):
        out.add_column(heading)
    for name in measured.rounds:
        for law in laws(measured.rates(name)):
            out.add_row(law.statement, name, "[green]yes[/]" if law.holds else "[red]no[/]", law.evidence)
    return out


def as_json(studies: Sequence[Study], settings: Sequence[Setting], measured: Measurements) -> str:
    """Every setting's rates per round, medians and latencies, the laws, and the machine they were taken on."""
    return json.dumps(
        {
            "brokers": BROKERS,
            "kafka": KAFKA_VERSION,
            "machine": machine(),
            "settings": [_entry(setting, studies, measured) for setting in settings],
            "laws": [
                {"broker": name, "law": law.statement, "held": law.holds, "evidence": law.evidence}
                for name in measured.rounds
                for law in laws(measured.rates(name))
            ],
            "failures": measured.failures,
        },
        indent=2,
    )


def _entry(setting: Setting, studies: Sequence[Study], measured: Measurements) -> dict[str, Any]:
    return {
        "studies": [study.number for study in studies if setting in study.settings],
        "partitions": setting.partitions,
        "acks": setting.acks_name,
        "replicas": setting.replicas,
        "min_insync": setting.min_insync,
        "reference_records_per_s": studies[0].reference.get(setting) if studies else None,
        **{
            name: {
                "records_per_s": measured.rates(name).get(setting),
                "rounds": [round(sent.rate, 1) for sent in rounds[setting]],
                "p50_us": measured.latency_us(name, setting, 50),
                "p99_us": measured.latency_us(name, setting, 99),
            }
            for name, rounds in measured.rounds.items()
        },
    }
