"""The README's curve: a stand-alone, well-formed SVG with one line a run."""

import json
import subprocess
import sys
import xml.dom.minidom


def test_curve_of_two_runs(tmp_path, repo_root, child_env):
    for name in ("a", "b<c>"):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "resolved_rate_fresh": step / 20} for step in range(1, 11)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(text)
    out = tmp_path / "curve.svg"
    command = [sys.executable, str(repo_root / "benchmarks" / "curve.py"), str(out)]
    command += [str(tmp_path / "a"), str(tmp_path / "b<c>")]
    subprocess.run(command, env=child_env, check=True, timeout=60)
    drawn = xml.dom.minidom.parse(str(out))
    assert len(drawn.getElementsByTagName("polyline")) == 2
    words = [node.firstChild.data for node in drawn.getElementsByTagName("text")]
    assert "a" in words and "b<c>" in words
