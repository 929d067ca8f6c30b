"""The scaffolds that can be named in a config (agent.kind), as programs of agents/external.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl_jax.agents.external import GUEST, Program
from skyrl_jax.agents.install import LAYER_ENV, PYTHON, find_python, packages_layer
from skyrl_jax.agents.scripted import SHELL_SYSTEM
from skyrl_jax.core.config import OWN_LOOP, AgentConfig
from skyrl_jax.core.errors import ConfigError

MINI_SWE_AGENT = ("mini-swe-agent==2.4.6",)
OPENHANDS = ("openhands-sdk==1.58.2",)  # needs Python 3.12
_CHARS_PER_TOKEN = 4  # mini-swe-agent cuts observations by characters

# Offline: litellm would fetch its price list; both would greet.
_OFFLINE = {**LAYER_ENV, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
_MINI_ENV = {
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": "/tmp/mini-swe-agent",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
}
_OPENHANDS_ENV = {"OPENHANDS_SUPPRESS_BANNER": "1"}
_OPENHANDS_COMPACT = "Repair the repository with bash; call finish when you are done."


def scaffold(agent: AgentConfig, cache: Path, *, command_timeout_s: float, cwd: str) -> Program:
    """Return the program of ``agent.kind``; its packages are installed when they are missing.

    Args:
        agent: kind, prompt style and the cut of observations.
        cache: where layers are kept.
        command_timeout_s: the environment's limit of one command.
        cwd: where the task lies.

    Raises:
        ConfigError: no such scaffold.
        ImageError: its packages, or the Python that they need, cannot be had.
    """
    if agent.kind == "mini_swe_agent":
        layer = packages_layer("mini-swe-agent", MINI_SWE_AGENT, cache)
        return mini_swe_agent(agent, layer, command_timeout_s=command_timeout_s, cwd=cwd)
    if agent.kind == "openhands":
        return openhands(agent, openhands_layer(cache), cwd=cwd)
    raise ConfigError(
        f"agent.kind = {agent.kind!r}: neither {OWN_LOOP!r}, our own loop, nor a scaffold that "
        "skyrl_jax/agents/scaffolds.py:scaffold makes (mini_swe_agent, openhands)"
    )


def mini_swe_agent(
    agent: AgentConfig, layer: Path, *, command_timeout_s: float, cwd: str
) -> Program:
    """Return mini-swe-agent, unmodified, with its SWE-bench config or with a few words of one."""
    config: dict[str, Any] = {
        "agent": {"step_limit": 0, "cost_limit": 0.0},  # the gateway's budget ends an episode
        # the environment's own limit comes first; this one is for a lost sandbox
        "environment": {"timeout": int(2 * command_timeout_s + 30)},
        "model": {},
    }
    if agent.prompt_style == "compact":
        config["agent"] |= {"system_template": SHELL_SYSTEM, "instance_template": "{{task}}"}
        shown = f"{{{{ output.output[:{_CHARS_PER_TOKEN * agent.observation_tokens}] }}}}"
        config["model"] |= {"observation_template": shown, "format_error_template": "{{error}}"}
    return Program(
        name="mini-swe-agent",
        argv=("python3", "{shared}/mini_swe.py"),
        layers=(str(layer),),
        files={"mini_swe.py": GUEST / "mini_swe.py"},
        job={"base": "benchmarks/swebench.yaml", "cwd": cwd, "config": config},
        env={**_OFFLINE, **_MINI_ENV},
        submitted=("Submitted",),
    )


def openhands_layer(cache: Path) -> Path:
    """Return the layer of the OpenHands SDK, with a Python 3.12 of its own."""
    return packages_layer("openhands-sdk", OPENHANDS, cache, python=find_python("3.12"))


def openhands(agent: AgentConfig, layer: Path, *, cwd: str) -> Program:
    """Return the OpenHands SDK, unmodified, with its own system prompt or one line."""
    compact = agent.prompt_style == "compact"
    return Program(
        name="openhands-sdk",
        argv=(f"{PYTHON}/bin/python3", "{shared}/openhands_sdk.py"),
        layers=(str(layer),),
        files={"openhands_sdk.py": GUEST / "openhands_sdk.py"},
        job={"cwd": cwd, "system_prompt": _OPENHANDS_COMPACT if compact else ""},
        env={**_OFFLINE, **_OPENHANDS_ENV},
        submitted=("finish",),
    )
