"""How a page looks: its style sheet, and what a browser may load for it."""

from __future__ import annotations

__all__ = ["COLOURS", "FONT", "POLICY", "RAMP", "STYLE"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif'
RAMP = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")  # of heat maps: viridis of matplotlib
# Colours of series: see packer.report.charts. Each has a contrast of 3:1 or more to the surface of its mode.
COLOURS = """
:root {
  --surface: #ffffff; --raised: #f4f6f8; --ink: #1a2027; --muted: #56616d; --grid: #dfe4e9; --strong: #c2410c;
  --series-1: #0072b2; --series-2: #c77700; --series-3: #00875f; --series-4: #b0548b; --series-5: #5b6b7b;
  --series-6: #3f51b5; --series-7: #8a6d00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --surface: #14181d; --raised: #1e242b; --ink: #e8ecf0; --muted: #a3aeb9; --grid: #343c45; --strong: #ff8a4c;
    --series-1: #4aa8e0; --series-2: #f0a830; --series-3: #2fbf95; --series-4: #de8fbd; --series-5: #93a3b3;
    --series-6: #8f9df0; --series-7: #d0b84a;
  }
}
"""
STYLE = (
    f"""{COLOURS}
body {{ font: 16px/1.5 {FONT}; }}
.ramp {{ width: 140px; height: 12px; border-radius: 2px; background: linear-gradient(90deg, {", ".join(RAMP)}); }}
"""
    + """
* { box-sizing: border-box; }
html { background: var(--surface); color: var(--ink); -webkit-text-size-adjust: 100%; }
body { margin: 0; }
main { max-width: 860px; margin: 0 auto; padding: 24px 20px 64px; overflow-wrap: anywhere; }
h1 { font-size: 1.05rem; font-weight: 600; color: var(--muted); margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 0 0 .6rem; }
h3 { font-size: 1.02rem; margin: 0 0 .4rem; }
p, ul, dl { margin: .5rem 0; }
ul { padding-left: 1.2rem; }
.lead { font-size: 1.45rem; line-height: 1.3; font-weight: 600; margin: 0; }
.section { margin-top: 2.4rem; padding-top: 1.4rem; border-top: 1px solid var(--grid); }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 1.4rem 0 0; }
.figure { flex: 1 1 200px; background: var(--raised); border-radius: 8px; padding: 12px 16px; }
.figure span { display: block; }
.value { font-size: 1.8rem; font-weight: 650; line-height: 1.2; font-variant-numeric: tabular-nums; }
.label { font-size: .95rem; }
.note, figcaption, caption { color: var(--muted); font-size: .9rem; }
figure { margin: 1rem 0; }
figure svg { display: block; width: 100%; height: auto; overflow: visible; }
figcaption { margin-top: .5rem; }
.wide { display: none; }
.narrow { max-width: 480px; }
@media (min-width: 860px) { .wide { display: block; } .narrow { display: none; } }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; padding: 0; margin: 0 0 .6rem;
  font-size: .9rem; }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px; }
.k1 { background: var(--series-1); } .k2 { background: var(--series-2); } .k3 { background: var(--series-3); }
.k4 { background: var(--series-4); } .k5 { background: var(--series-5); } .k6 { background: var(--series-6); }
.k7 { background: var(--series-7); }
.scale { display: flex; align-items: center; gap: 8px; font-size: .9rem; color: var(--muted); margin-bottom: .4rem; }
.table { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; line-height: 1.4; }
caption { text-align: left; padding-bottom: .4rem; }
th, td { text-align: left; vertical-align: top; padding: 6px 12px 6px 0; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--muted); vertical-align: bottom; overflow-wrap: normal; }
td { overflow-wrap: break-word; max-width: 26em; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
td.number { white-space: nowrap; }
td:first-child { min-width: 6.5em; }
th.number { min-width: 4.2em; }
tr.strong td { font-weight: 650; }
pre { background: var(--raised); border-radius: 6px; padding: 10px 12px; overflow-x: auto; margin: .6rem 0; }
code { font: .88rem/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  user-select: all; }
.card { border: 1px solid var(--grid); border-radius: 8px; padding: 14px 16px; margin: 1rem 0; break-inside: avoid; }
.badge { display: inline-block; margin-left: 10px; padding: 0 10px; border-radius: 999px; background: var(--raised);
  font-size: .85rem; font-weight: 600; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: 4px 16px; font-size: .92rem; }
dt { color: var(--muted); }
dd { margin: 0; }
summary { cursor: pointer; }
summary h2 { display: inline; }
details > :nth-child(2) { margin-top: 1rem; }
@media (max-width: 480px) {
  main { padding: 16px 16px 40px; }
  .lead { font-size: 1.2rem; }
  dl { grid-template-columns: 1fr; }
  dt { margin-top: 6px; }
}
@media print {
  main { max-width: none; padding: 0; }
  .wide { display: block; } .narrow { display: none; }
  .table, pre { overflow: visible; }
  pre { white-space: pre-wrap; }
  .section { border-top-color: #ccc; }
  figure, tr { break-inside: avoid; }
}
"""
)
