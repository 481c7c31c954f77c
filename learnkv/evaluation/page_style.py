"""How a page looks: on a screen, light or dark, on a phone, and on paper."""

from __future__ import annotations

from learnkv.evaluation.picture import COLORS, ink_on, shade

STEPS = 10  # shades of the shares that tokens were kept with


def style_sheet() -> str:
    light, dark = ("".join(f"--{name}:{pair[i]};" for name, pair in COLORS.items()) for i in (0, 1))
    steps = [shade(i / STEPS) for i in range(STEPS + 1)]
    shades = "".join(f".k{i}{{background:{color};color:{ink_on(color)}}}" for i, color in enumerate(steps))
    return f":root{{{light}}}@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}{shades}{STYLE}"


STYLE = """
*{box-sizing:border-box}
html{background:var(--paper);color:var(--ink);color-scheme:light dark;
 font:16px/1.5 system-ui,"DejaVu Sans",sans-serif;-webkit-text-size-adjust:100%}
body{max-width:1120px;margin:0 auto;padding:1.5rem 1.25rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:.2em 0 .6em;overflow-wrap:anywhere}
h2{font-size:1.3rem;margin:2.6em 0 .7em;padding-top:.5em;border-top:2px solid var(--ink)}
h3{font-size:1rem;margin:1.8em 0 .5em}
nav{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;font-size:.92rem}
a{color:var(--c0)}
p,li{max-width:75ch;overflow-wrap:anywhere}
figure{margin:1.2rem 0 2.4rem}
figcaption{color:var(--soft);font-size:.9rem;max-width:80ch;margin:.6rem 0}
.pictures{display:grid;gap:1.2rem 1rem;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--w)),1fr))}
.pictures svg{display:block;width:100%;height:auto;font-family:system-ui,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
.narrow{display:none}
.legend{display:flex;flex-wrap:wrap;gap:.15rem 1.2rem;list-style:none;padding:0;margin:.7rem 0;font-size:.85rem}
.legend.narrow{display:none}
.legend svg{width:40px;height:12px;margin-right:.5rem;vertical-align:middle}
.warning{border-left:4px solid var(--c1);padding:.5rem 1rem .5rem 2rem;margin:1.2rem 0}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.84rem;font-variant-numeric:tabular-nums;margin:.4rem 0}
th,td{padding:.28rem .7rem .28rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--grid);white-space:nowrap}
thead th{vertical-align:bottom;white-space:normal;min-width:3.5rem;color:var(--soft);font-weight:600}
tbody th{font-weight:500;position:sticky;left:0;background:var(--paper);
 }
th.long{min-width:10rem;max-width:17rem;white-space:normal;overflow-wrap:break-word}
.facts{font-size:.95rem}
.facts td{white-space:normal;overflow-wrap:anywhere;max-width:80ch}
.facts th{color:var(--soft);position:static;min-width:8rem;white-space:normal}
details{margin:.5rem 0}
summary{cursor:pointer;font-size:.92rem;color:var(--c0);overflow-wrap:anywhere}
details.long .scroll{max-height:24rem;overflow-y:auto}
pre{background:color-mix(in srgb,var(--grid) 35%,transparent);padding:.6rem .8rem;margin:.5rem 0;font-size:.82rem}
.strip{font:.82rem/1.75 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere;
 border:1px solid var(--grid);padding:.6rem;max-height:22rem;overflow-y:auto}
.strip span{padding:.1em 0}
.answer{box-shadow:0 -2px 0 var(--c1),0 2px 0 var(--c1)}
.at{outline:2px solid var(--c5)}
.token{display:block;min-height:1.5em;font-size:.85rem;color:var(--soft);overflow-wrap:anywhere}
.scale span{padding:.1em .5em;font-size:.85rem;display:inline-block}
.scale .answer{margin-left:.8rem}
:focus-visible{outline:3px solid var(--c5);outline-offset:2px}
@media (max-width:640px){
 body{padding:1rem .75rem 3rem}
 h1{font-size:1.35rem}
 .wide{display:none}.narrow{display:grid}.legend.narrow{display:flex}
 th.long{min-width:8rem;max-width:9rem;overflow-wrap:anywhere}
 .facts th{min-width:4.5rem}
}
@media print{
 @page{size:A4;margin:12mm}
 html{font-size:10.5pt}
 body{max-width:none;padding:0}
 nav,.token{display:none}
 summary{list-style:none;color:var(--ink);font-weight:600;margin-top:1rem}
 details::details-content{content-visibility:visible;display:block;height:auto}
 details.long{display:none}
 .wide{display:grid}.narrow,.legend.narrow{display:none}
 .scroll,.strip{overflow:visible;max-height:none}
 table{font-size:6.6pt}
 th,td{white-space:normal;padding-right:.35rem}
 thead th{min-width:0}
 tbody th,th.long{position:static;min-width:4rem;overflow-wrap:anywhere}
 .pictures>div,tr,h2,h3,pre{break-inside:avoid}
 h2,h3{break-after:avoid}
 pre{white-space:pre-wrap;overflow-wrap:anywhere}
 span,svg{print-color-adjust:exact;-webkit-print-color-adjust:exact}
}
"""
