"""One HTML page that needs no other file: style and frame of all our reports."""

from __future__ import annotations

from html import escape

_STYLE = """
:root { color-scheme: light dark; --paper: #fbfaf7; --card: #fff; --ink: #1d1f21; --soft: #62666d; --line: #e2dfd8;
  --good: #2e7d4f; --bad: #c23b2e; --tie: #b7791f; --mark-good: #d5ecdd; --mark-bad: #f8d9d4; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --card: #1e2125; --ink: #e6e4df; --soft: #9aa0a8;
  --line: #33373d; --good: #58b883; --bad: #f0776a; --tie: #e0ad52; --mark-good: #1f4a33; --mark-bad: #5c2620; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2.5rem 1.5rem 4rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--soft); margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .8rem; }
h3 { font-size: .95rem; margin: 0; overflow-wrap: anywhere; }
.verdict { font-size: 2.4rem; font-weight: 700; letter-spacing: -.02em; margin: .2rem 0 0; line-height: 1.2; }
.good { color: var(--good); } .bad { color: var(--bad); }
.soft { color: var(--soft); }
.bar { display: block; width: 100%; height: 8px; margin: 1rem 0 0; border-radius: 4px; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; background: var(--card); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .5rem .8rem; border-top: 1px solid var(--line); vertical-align: top; }
thead th { border-top: 0; font-size: .8rem; font-weight: 600; color: var(--soft); white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
.settings th { width: 11rem; font-weight: 500; color: var(--soft); }
.settings td { overflow-wrap: anywhere; }
.settings tr:first-child > * { border-top: 0; }
svg .good { fill: var(--good); } svg .bad { fill: var(--bad); } svg .tie { fill: var(--tie); }
svg .unknown { fill: var(--bad); opacity: .6; } svg .none { fill: var(--line); }
img { max-width: 100%; margin: .5rem 0; }
td svg { display: block; margin-top: .3rem; }
article { border: 1px solid var(--line); border-radius: 8px; background: var(--card); padding: 1rem 1.2rem;
  margin: 1rem 0; }
header { display: flex; gap: .8rem; align-items: baseline; flex-wrap: wrap; }
.tag { font-size: .75rem; font-weight: 700; text-transform: uppercase; letter-spacing: .04em; padding: .1rem .55rem;
  border-radius: 99px; color: var(--card); background: var(--bad); }
.tag.tie { background: var(--tie); }
article p { margin: .5rem 0; }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .4rem 1rem; margin: .8rem 0 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; }
.text { font: 13px/1.55 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
mark { color: inherit; border-radius: 3px; padding: 0 1px; }
mark.want { background: var(--mark-good); } mark.got { background: var(--mark-bad); }
.legend { font-size: .85rem; color: var(--soft); margin: .6rem 0 0; } .legend svg { margin: 0 .3rem -1px .9rem; }
.legend svg:first-child { margin-left: 0; }
"""


def document(title: str, body: str) -> str:
    """The whole page; the body must be escaped already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )
