"""The report page's style sheet: light and dark, no font or image from anywhere."""

STYLE = """
:root { color-scheme: light dark; --ink: #1d2430; --soft: #647083; --line: #dfe4ea; --grid: #e8ecf1;
  --paper: #fbfcfd; --card: #ffffff; --good: #1a7f4b; --bad: #b3402a;
  --c0: #2f6fdb; --c1: #e08a1e; --c2: #2a9d78; --c3: #b04fc0; --c4: #8a93a3; --c5: #c9503c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --soft: #93a0b3; --line: #2c3542;
  --grid: #28303c; --paper: #12161c; --card: #1a2029; --good: #4cc38a; --bad: #f0826b;
  --c0: #6ea1ff; --c1: #f2ae57; --c2: #55c9a2; --c3: #d286e0; --c4: #9aa4b5; --c5: #ee8371; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1040px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0 0 16px; } h2 { font-size: 17px; margin: 32px 0 10px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; }
.tile, figure, details { background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; }
.tile { padding: 10px 14px; } .tile .value { font-size: 22px; font-weight: 600; }
.tile .name, .tile .below, .unit, .note { color: var(--soft); font-size: 12.5px;
  font-weight: 400; }
.tile .below { min-height: 1.5em; }
table { border-collapse: collapse; width: 100%; background: var(--card); }
td, th { text-align: left; padding: 6px 10px; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; }
.grid-of-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(320px, 1fr));
  gap: 12px; }
figure { margin: 0; padding: 10px 12px; } figcaption { font-weight: 600; margin-bottom: 4px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--soft); font-size: 11px; } svg .grid { stroke: var(--grid); }
.dot { opacity: 0; } .dot:hover, .dot.alone { opacity: 1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 14px; font-size: 12.5px; color: var(--soft); }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 5px; }
details { padding: 8px 12px; margin: 8px 0; } summary { cursor: pointer; }
details .grid-of-charts, details table { margin-top: 10px; }
.message { border-left: 3px solid var(--line); padding-left: 10px; margin: 10px 0; }
.message.assistant { border-color: var(--c0); } .message.tool { border-color: var(--c2); }
.role { color: var(--soft); font-size: 12.5px; }
pre { margin: 2px 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12.5px; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 600; }
.none { color: var(--soft); }
"""
