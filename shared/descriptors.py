"""How many connections and files this process may have open. The usual limit, 1,024, is meant for terminals."""

from __future__ import annotations

__all__ = ["allow_descriptors"]


def allow_descriptors(wanted: int) -> int:
    """Ask the system for so many, which it grants up to its hard limit; returns how many of them there may be now."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    except (ValueError, OSError):  # some systems allow less than they say
        return soft
    return granted
