"""Image names, logins, pauses and the disk budget: pure, by hand."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyrl_jax.core.errors import ConfigError, DataError, ImageError
from skyrl_jax.sandbox.image_auth import ANONYMOUS, read_logins
from skyrl_jax.sandbox.image_names import mirrored, parse_reference
from skyrl_jax.sandbox.image_retry import FIRST_S, LONGEST_S, pause, retry_after
from skyrl_jax.sandbox.image_shelf import Kept, Shelf, too_much
from skyrl_jax.tasks.swe.image_names import row_image
from skyrl_jax.tasks.swe.rows import SweRow

SHA = "sha256:" + "ab" * 32


@pytest.mark.parametrize(
    ("text", "name", "url", "there"),
    [
        ("alpine", "alpine:latest", "https://registry-1.docker.io", "library/alpine"),
        (
            "docker.io/library/alpine:3",
            "alpine:3",
            "https://registry-1.docker.io",
            "library/alpine",
        ),
        ("swebench/x.y_1776_z:v1", "swebench/x.y_1776_z:v1", "https://registry-1.docker.io", None),
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b:latest", "http://127.0.0.1:5000", "a/b"),
        ("localhost/a:1", "localhost/a:1", "http://localhost", "a"),
        ("ghcr.io/a/b@" + SHA, "ghcr.io/a/b@" + SHA, "https://ghcr.io", "a/b"),
    ],
)
def test_names(text, name, url, there):
    found = parse_reference(text)
    assert (found.name, found.url) == (name, url)
    assert there is None or found.path_there == there


@pytest.mark.parametrize(
    "text", ["", "Upper/case", "a//b", "a:b:c", "a@sha256:12", "ex ample.org/a", "-a/b", "a/../b"]
)
def test_what_is_no_name(text):
    with pytest.raises(ImageError, match="image name"):
        parse_reference(text)


def test_a_mirror_has_the_images_of_docker_hub_alone():
    hub, other = parse_reference("swebench/x:1"), parse_reference("ghcr.io/a/b:1")
    assert mirrored(hub, "127.0.0.1:5000").name == "127.0.0.1:5000/swebench/x:1"
    assert mirrored(parse_reference("alpine"), "m.org/p/").name == "m.org/p/library/alpine:latest"
    assert mirrored(other, "m.org") == other and mirrored(hub, "") == hub
    with pytest.raises(ImageError, match=r"sandbox\.image_mirror is 'mirror'"):
        mirrored(hub, "mirror")


def test_logins(tmp_path):
    file = tmp_path / "config.json"
    secret = base64.b64encode(b"me:pass:word").decode()
    auths = {"https://index.docker.io/v1/": {"auth": secret}, "ghcr.io": {"identitytoken": "tok"}}
    file.write_text(json.dumps({"auths": auths}))
    found = read_logins(str(file))
    assert found["docker.io"].for_daemon() == {"username": "me", "password": "pass:word"}
    assert found["ghcr.io"].for_daemon() == {"identitytoken": "tok"}
    assert "pass:word" not in repr(found) and "tok" not in repr(found)
    assert found["docker.io"].hide("bad pass:word " + secret) == "bad *** ***"
    assert ANONYMOUS.for_daemon() is None and read_logins("") == {}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no JSON"),
        ('{"credsStore": "desktop"}', "helper program"),
        ('{"auths": {"x.org": {"auth": "!"}}}', "no base64"),
        ('{"auths": {"x.org": {}}}', "no login"),
        ('{"auths": {"x.org": "s3cret"}}', "must be an object"),
    ],
)
def test_a_bad_file_of_logins_is_told_without_its_secrets(tmp_path, content, says):
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_logins(str(file))
    assert "s3cret" not in str(caught.value) and "image_login_file" in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_logins(str(tmp_path / "none"))


@given(st.integers(0, 40), st.floats(0, 1000), st.floats(0, 0.999))
def test_nobody_comes_back_before_the_server_said(attempt, after, draw):
    """After + up to one step; without a word of the server half of the step is sure."""
    step = min(LONGEST_S, FIRST_S * 2.0**attempt)
    found = pause(attempt, after, draw)
    assert after <= found <= after + step
    assert after or found >= step / 2


def test_the_header():
    assert retry_after(" 7 ") == 7.0 and retry_after("soon") == retry_after("") == 0.0
    assert retry_after("Thu, 01 Jan 1970 00:01:40 GMT", now=40.0) == 60.0
    assert retry_after("Thu, 01 Jan 1970 00:01:40 GMT", now=400.0) == 0.0
    assert retry_after("9" * 20) == 86_400.0


def kept(*sizes: int) -> list[Kept]:
    return [Kept(name=f"i{n}", used=float(n), size=size) for n, size in enumerate(sizes)]


def test_the_longest_unused_go_until_the_others_fit():
    names = [item.name for item in too_much(kept(5, 4, 3, 2), 9)]
    assert names == ["i0"]  # 14 - 5 = 9
    assert [i.name for i in too_much(kept(5, 4, 3, 2), 9, busy=["i0"])] == ["i1", "i2"]
    assert [i.name for i in too_much(kept(5, 4), 9, reserve=1)] == ["i0"]
    assert too_much(kept(5, 4), 0) == too_much(kept(5, 4), 9) == []


def test_the_shelf_outlives_its_process(tmp_path):
    shelf = Shelf(tmp_path / "images.json")
    shelf.note("a", 3)
    shelf.note("b", 4)
    shelf.touch("a")
    shelf.touch("stranger")
    found = {item.name: item for item in Shelf(tmp_path / "images.json").kept()}
    assert set(found) == {"a", "b"} and found["a"].used > found["b"].used
    shelf.forget("a")
    assert [item.name for item in shelf.kept()] == ["b"]
    (tmp_path / "images.json").write_text('{"b": ')
    assert shelf.kept() == []


def row(name: str, repo: str, **extra) -> SweRow:
    return SweRow(
        instance_id=name, repo=repo, base_commit="c", problem_statement="", patch="",
        test_patch="", fail_to_pass=("t",), pass_to_pass=(), extra=extra,
    )  # fmt: skip


def test_names_of_the_data_sets():
    """By the naming rules of SWE-bench, SWE-Gym, R2E-Gym and SWE-smith."""
    assert (
        row_image(row("sympy__sympy-20916", "sympy/sympy"))
        == "swebench/sweb.eval.x86_64.sympy_1776_sympy-20916:latest"
    )
    assert (
        row_image(row("getmoto__moto-5752", "getmoto/moto"))
        == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest"
    )
    assert row_image(row("x", "a/b", docker_image="namanjain12/x:1")) == "namanjain12/x:1"
    smith = row("oauthlib__oauthlib.1fd52536.combine_file__09vlzwgc", "swesmith/oauthlib")
    assert row_image(smith) == "swebench/swesmith.x86_64.oauthlib_1776_oauthlib.1fd52536:latest"
    with pytest.raises(DataError, match="no rule names the image"):
        row_image(row("a__b-1", "a/b"))
