"""Addresses as text, in the form in which every command and option takes them. Pure."""

from __future__ import annotations


def address_text(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets: `[::1]:9092`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
