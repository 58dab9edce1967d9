"""The page that every report is: one HTML file, whole in itself; no script, font or picture comes from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from string import Template
from typing import NamedTuple

__all__ = ["Figure", "figures", "page", "table"]


class Figure(NamedTuple):
    title: str
    note: str
    svg: str


def page(
    *,
    title: str,
    headline: str,
    warnings: Iterable[str],
    body: str,
    setup: Mapping[str, object],
    method: Iterable[str],
) -> str:
    """`body` is HTML; everything else is text."""
    return _PAGE.substitute(
        title=escape(title),
        headline=escape(headline),
        warnings="".join(f'<p class="warning">{escape(warning)}</p>' for warning in warnings),
        body=body,
        setup=_definitions(setup),
        method="".join(f"<li>{escape(line)}</li>" for line in method),
    )


def table(columns: Sequence[str], rows: Iterable[str]) -> str:
    """`rows` are HTML."""
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def figures(drawn: Iterable[Figure]) -> str:
    return "".join(
        f"<section><h2>{each.title}</h2><p>{each.note}</p><figure>{each.svg}</figure></section>" for each in drawn
    )


def _definitions(setup: Mapping[str, object]) -> str:
    return "".join(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{_text(value)}</dd>" for name, value in setup.items())


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{escape(str(name)).replace('_', ' ')} {_text(part)}" for name, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(part) for part in value)
    return escape(str(value))


_PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Warmroute: $title</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5d6673; --rule: #dde1e6; --page: #fff; --warn: #fff4e5; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e7eb; --soft: #98a2b0; --rule: #343a43; --page: #14171b; --warn: #3a2c17; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 3rem 1.5rem 4rem; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header small { letter-spacing: .08em; text-transform: uppercase; color: var(--soft); font-weight: 600; }
h1 { font-size: 1.65rem; line-height: 1.3; font-weight: 650; margin: .4rem 0 1.6rem; text-wrap: balance; }
h2 { font-size: 1.1rem; margin: 2.8rem 0 .3rem; }
section p, ul, dl { color: var(--soft); margin: .2rem 0 1rem; max-width: 46rem; font-size: .94rem; }
figure { margin: 0; }
svg { width: 100%; max-width: 60rem; height: auto; display: block; color: var(--ink); font-family: inherit; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .5rem .45rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
th:first-child { text-align: left; white-space: nowrap; }
thead th { font-weight: 500; color: var(--soft); font-size: .8rem; }
td { white-space: nowrap; }
td small { display: block; color: var(--soft); font-size: .76rem; }
th i { display: inline-block; width: .65rem; height: .65rem; border-radius: 2px; margin-right: .5rem; }
.wide { overflow-x: auto; }
ul { padding-left: 1.1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; }
dt { color: var(--soft); } dd { margin: 0; color: var(--ink); overflow-wrap: anywhere; }
.warning { background: var(--warn); border-radius: 6px; padding: .6rem .9rem; font-size: .92rem; }
</style>
<header><small>Warmroute $title</small><h1>$headline</h1></header>
$warnings
$body
<section><h2>Setup</h2><dl>$setup</dl></section>
<section><h2>Method</h2><ul>
$method
</ul></section>
</html>
""")
