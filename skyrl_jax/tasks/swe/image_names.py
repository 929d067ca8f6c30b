"""The container image of a real row, by the naming rules of the data sets. Pure.

    SWE-bench   swebench/sweb.eval.x86_64.<id, "__" -> "_1776_">:latest
    SWE-Gym     xingyaoww/sweb.eval.x86_64.<id, "__" -> "_s_">:latest
    R2E-Gym     the row's ``docker_image``
    SWE-smith   swebench/swesmith.x86_64.<owner>_1776_<repo>.<first 8 of the commit>

All lower case. A row that names its image itself (``image``, ``image_name``, ``docker_image``) is
believed. Source: the harnesses of the four projects.
"""

from __future__ import annotations

import re

from skyrl_jax.core.errors import DataError
from skyrl_jax.tasks.swe.rows import SweRow

KINDS = ("swe-bench", "swe-gym", "r2e-gym", "swe-smith")
_OWN = ("image", "image_name", "docker_image")
# "owner__repo.commit8", or an instance of it: "owner__repo.commit8.kind__hash".
_SMITH = re.compile(r"(?P<owner>[^/]+?)(?:__|/)(?P<repo>.+?)\.(?P<commit>[0-9a-f]{8})(?:\..*)?")
# Repositories of SWE-bench; the ids of SWE-Gym have the same form, its repositories are others.
_BENCH = frozenset(
    "astropy/astropy django/django matplotlib/matplotlib mwaskom/seaborn pallets/flask "
    "psf/requests pydata/xarray pylint-dev/pylint pytest-dev/pytest scikit-learn/scikit-learn "
    "sphinx-doc/sphinx sympy/sympy marshmallow-code/marshmallow pvlib/pvlib-python "
    "pydicom/pydicom pylint-dev/astroid pyvista/pyvista sqlfluff/sqlfluff".split()
)
_GYM = frozenset(
    "bokeh/bokeh conan-io/conan dask/dask facebookresearch/hydra getmoto/moto iterative/dvc "
    "modin-project/modin pandas-dev/pandas project-monai/monai pydantic/pydantic "
    "python/mypy".split()
)


def row_kind(row: SweRow) -> str:
    """Return which data set's rule names the row's image; "" = the row names it itself.

    Raises:
        DataError: none of them does.
    """
    if any(isinstance(row.extra.get(key), str) and row.extra[key] for key in _OWN):
        return ""
    said = str(row.extra.get("data_source") or row.extra.get("dataset") or "").lower()
    for kind in KINDS:
        if kind in said or kind.replace("-", "_") in said or kind.replace("-", "") in said:
            return kind
    if _SMITH.fullmatch(row.instance_id) and "__" in row.instance_id:
        return "swe-smith"
    repo = row.repo.lower()
    if repo in _BENCH:
        return "swe-bench"
    if repo in _GYM:
        return "swe-gym"
    raise DataError(
        f"{row.instance_id}: no rule names the image of repository {row.repo!r}; give the row a "
        f"field 'image', or 'data_source' with one of: {', '.join(KINDS)}"
    )


def row_image(row: SweRow) -> str:
    """Return the name of a row's image.

    Raises:
        DataError: no rule names it, or the fields that the rule needs are missing.
    """
    kind = row_kind(row)
    if not kind:
        return next(str(row.extra[key]) for key in _OWN if row.extra.get(key))
    name = row.instance_id.lower()
    if kind == "swe-bench":
        return f"swebench/sweb.eval.x86_64.{name.replace('__', '_1776_')}:latest"
    if kind == "swe-gym":
        return f"xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest"
    if kind == "swe-smith":
        found = _SMITH.fullmatch(name)
        if found is None:
            raise DataError(
                f"{row.instance_id}: an instance of SWE-smith is called "
                "owner__repo.commit8.change__hash"
            )
        owner, repo, commit = found["owner"], found["repo"], found["commit"]
        return f"swebench/swesmith.x86_64.{owner}_1776_{repo}.{commit}:latest"
    raise DataError(f"{row.instance_id}: an R2E-Gym row names its image in 'docker_image'")
