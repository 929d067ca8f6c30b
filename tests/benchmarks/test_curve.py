"""The README's curve: a stand-alone, well-formed SVG with one line a run."""

import json
import subprocess
import sys
import xml.dom.minidom


def test_curve_of_two_runs(tmp_path, repo_root, child_env):
    for name in ("a", "b<c>"):
        (tmp_path / name).mkdir()
        curve = [[step, 0.2 + step / 500] for step in (0, 75, 150)]
        (tmp_path / name / "summary.json").write_text(json.dumps({"resolved_curve": curve}))
    out = tmp_path / "curve.svg"
    command = [sys.executable, str(repo_root / "benchmarks" / "curve.py"), str(out)]
    command += [str(tmp_path / "a"), str(tmp_path / "b<c>")]
    subprocess.run(command, env=child_env, check=True, timeout=60)
    drawn = xml.dom.minidom.parse(str(out))
    assert len(drawn.getElementsByTagName("polyline")) == 2
    assert len(drawn.getElementsByTagName("circle")) == 6
    words = [node.firstChild.data for node in drawn.getElementsByTagName("text")]
    assert "a" in words and "b<c>" in words
