"""Run mini-swe-agent 2.x, as its package is, on one task; starts inside the agent's sandbox.

Its docker environment talks to docker.py beside this file, so its commands run in the episode's
sandbox. ``task.json``: {"task": text, "cwd": folder, "config": {"agent", "environment", "model"}}
where ``config`` overrides the package's own config file (its ``base``). The last line printed is
{"exit": the agent's exit status}.
"""

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def sections(base, changes):
    """Return the package's config with our changes: what mini-swe-agent's own -c merges."""
    return {
        name: {**base.get(name, {}), **changes.get(name, {})}
        for name in ("agent", "environment", "model")
    }


def main():
    """Run the agent."""
    import yaml
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import builtin_config_dir
    from minisweagent.environments.docker import DockerEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    job = json.loads((HERE / "task.json").read_text())
    base = yaml.safe_load((Path(builtin_config_dir) / job["base"]).read_text())
    config = sections(base, job["config"])
    environment = {**config["environment"], "image": "episode", "cwd": job["cwd"]}
    environment["executable"] = str(HERE / "docker.py")
    environment.pop("environment_class", None)
    model = {**config["model"], "model_name": "openai/policy"}
    model["cost_tracking"] = "ignore_errors"
    model.pop("model_class", None)
    keys = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": os.environ["OPENAI_API_KEY"]}
    model["model_kwargs"] = {**model.get("model_kwargs", {}), **keys}
    model["model_kwargs"].pop("temperature", None)  # the gateway pins it
    agent = DefaultAgent(LitellmModel(**model), DockerEnvironment(**environment), **config["agent"])
    outcome = agent.run(job["task"])
    print(json.dumps({"exit": str(outcome.get("exit_status", ""))}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # no telemetry or logging thread keeps the sandbox waiting
